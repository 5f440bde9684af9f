"""What the replicas of a training share, and how far it is: the state that survives the failure of a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddp.checkpoint.state import Stateful, given_parts, wrapper_of
from ddp.comm.codec import encode
from ddp.errors import ArgumentError
from ddp.resilience.commits import Commits

__all__ = ["State"]

_ATOMS = frozenset({type(None), bool, int, float, str})


class State:
    """What all replicas of a training have in common, for `ddp.resilient`.

    `model` (in its wrapper), `optimizer`, `scheduler`, `scaler` and `sampler` are as in `ddp.Checkpoint.save`; `values`
    are the script's own, such as `epoch=0`: None, numbers, strings, bytes, tensors, and tuples, lists, sets and dicts
    of them. They are attributes: `state.epoch += 1`.

    `commit()` says that a step is done. After a failure every rank goes on from the newest step that any of them has
    committed, with the values, the place in the data, the learning rates, the buffers and the random numbers of then.
    What it does not take care of, such as a running loss in a local variable, begins anew with the function. A rank's
    own buffers and random numbers come back to the bit where the buffers take 4 MiB at most; larger ones become those
    of one rank, as they are.
    """

    def __init__(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        scaler: Stateful | None = None,
        sampler: Stateful | None = None,
        **values: Any,
    ) -> None:
        """Communicates nothing. Raises ArgumentError for what has no state, or a value that cannot be sent."""
        others = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "sampler": sampler}
        own = vars(self)
        own["values"] = {}
        for name, value in values.items():
            setattr(self, name, value)
        own["commits"] = Commits(given_parts(model=model, **others), wrapper_of(model), self.values)

    values: dict[str, Any]
    commits: Commits

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["values"][name]
        except KeyError:
            raise AttributeError(f"this State has no value {name!r}: give it to State({name}=...)") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(State, name) or name in State.__annotations__:
            raise ArgumentError(f"{name} is a name of ddp.State itself: choose another one for the value")
        if type(value) not in _ATOMS:
            encode(value)  # raises for what cannot be sent
        self.values[name] = value

    def commit(self) -> None:
        """Say that the step is done: it will not be made again, nor lost.

        Call it on every rank after each step of the optimizer, with no collective between the two. Communicates
        nothing. A DistributedSampler whose `advance` nobody has called is advanced by what it has handed out; where a
        DataLoader may have workers, which draw ahead, ArgumentError says to call it; so must who draws ahead in a
        thread. CollectiveError after a backward pass that failed.
        """
        self.commits.take()
        if (join_point := self.commits.join_point) is not None and self.commits.number is not None:
            join_point.committed(self.commits.number)
