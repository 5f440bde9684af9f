"""The user's optimizer over pieces of parameters: what a server holds of a model, and what it does in a step.

A server makes `Shards` of its chunks and steps them with the gradients that come. Copies of the user's optimizer do
the steps, one a chunk; the object of the user is never changed. So hooks on it (`register_step_pre_hook` and its kin)
and schedulers do not run here: the hyperparameters that they set come with each step. Knows no network and no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ddp.errors import ArgumentError
from ddp.strategies.sharding.chunk_gradient import Gradient
from ddp.strategies.sharding.chunk_optimizer import Changed, ChunkOptimizer, splits_by_element
from ddp.strategies.sharding.optimizer_state import State, hyperparameters, state_of_piece
from ddp.strategies.sharding.partition import Chunk
from ddp.torch_internals import foreach_copy

__all__ = ["Shards"]


class Shards:
    """The chunks of one server: values, and the optimizer's state for them.

    The parameters that `optimizer` steps, in the order of its groups, give the first values; state that the optimizer
    has already is split over the pieces. `values` has the flat tensor (numel,) of each chunk by its index,
    where the values are to lie; `step` changes it in place. All of it is in host memory, wherever the parameters are;
    `capturable` is off here for that reason.

    Not for several threads at once. Raises UnsupportedError as `splits_by_element` does, or if the optimizer cannot be
    copied.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, chunks: Sequence[Chunk], values: Mapping[int, torch.Tensor]
    ) -> None:
        by_element = splits_by_element(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.values = values
        self._chunks = {}
        for chunk in chunks:
            foreach_copy(chunk.in_flat(values[chunk.index]), chunk.in_parameters(parameters))
            states = []
            for piece in chunk.pieces:
                parameter = parameters[piece.parameter]
                states.append(state_of_piece(optimizer.state.get(parameter, {}), piece, tuple(parameter.shape)))
            self._chunks[chunk.index] = ChunkOptimizer(
                optimizer, chunk, values[chunk.index], states, by_element=by_element
            )
        self._groups = hyperparameters(optimizer.param_groups)

    def step(
        self, gradients: Mapping[int, Gradient], *, groups: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[int, Changed]:
        """Make one step of the optimizer on these chunks only; return which rows it changed, by chunk.

        `gradients` go by chunk index. `groups`: new hyperparameters of every param group, for this and later steps.
        Of a chunk, None stands for all rows, else there is an entry for each piece: None for all of its rows, or their
        numbers (n,), ascending.

        Raises what the optimizer's own step raises; ArgumentError for another number of param groups.
        """
        if groups is not None:
            if len(groups) != len(self._groups):
                raise ArgumentError(
                    f"the optimizer has {len(groups)} param groups now and had {len(self._groups)} when its parameters "
                    "were handed over: add groups before prepare()"
                )
            self._groups = [dict(group) for group in groups]
        changed = {}
        for index, gradient in gradients.items():
            self._chunks[index].use(self._groups)
            changed[index] = self._chunks[index].step(gradient)
        return changed

    def state(self) -> dict[int, list[State]]:
        """What the optimizer keeps of the pieces of each chunk, by its index.

        Made of dicts, lists, numbers and tensors, as `torch.load(weights_only=True)` reads. The tensors are the live
        ones, which the next step changes. Values and hyperparameters are not in it.
        """
        return {index: self.state_of(index) for index in self._chunks}

    def state_of(self, index: int) -> list[State]:
        """What the optimizer keeps of the pieces of one chunk; live, as in `state`."""
        return self._chunks[index].states()

    def live(self) -> Iterator[tuple[Chunk, int, int, State]]:
        """The dicts in which the optimizer keeps its state, of the pieces at positions `first` to `stop` of a chunk."""
        for chunk in self._chunks.values():
            for first, stop, state in chunk.live():
                yield chunk.chunk, first, stop, state

    def load_state(self, state: Mapping[int, Sequence[State]]) -> None:
        """Go on from what `state` or `split_state` gave of these chunks, or of some. The tensors in it are copied.

        Raises ArgumentError if it is of other chunks, and changes nothing then.
        """
        if not all(index in self._chunks and self._chunks[index].fits(states) for index, states in state.items()):
            raise ArgumentError("the state is of other chunks than these: cut it anew from a whole state (split_state)")
        for index, states in state.items():
            self._chunks[index].load(states)
