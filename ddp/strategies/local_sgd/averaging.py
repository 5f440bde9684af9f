"""Local SGD: each rank steps by itself, and the replicas are averaged every so many steps.

    model = ddp.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    local = ddp.LocalSGD(model, optimizer, every=8)
    ...  # the loop as it was
    local.sync()  # on every rank, before the model is evaluated or saved

`LocalSGD` switches the wrapper's reduction off, counts the steps and averages; it never steps, and the optimizer's
own state stays with each rank.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from ddp.comm.fingerprint import fingerprints
from ddp.comm.objects import gather_values
from ddp.data_parallel.replicas import weights_of
from ddp.errors import ArgumentError, DdpError, UnsupportedError
from ddp.monitoring.progress import count_step
from ddp.monitoring.stall_report import waiting_for_peers
from ddp.resilience.parts import Part, accompany
from ddp.strategies.local_sgd.outer_optimizer import OuterOptimizer, Settings
from ddp.strategies.local_sgd.rank_state import RankState, average, compare
from ddp.torch_internals import call_after_backward, is_in_join

_UNSEEN_STEPS = 2  # of the optimizer, without a backward pass between them that the wrapper knows of


class LocalSGD:
    """Let each rank make `every` optimizer steps by itself, then continue from the average of the replicas.

    `model` is ddp.DistributedDataParallel or torch's, and `optimizer` steps its parameters; every rank makes the same
    LocalSGD after wrapping. The first `after` steps are ordinary, with averaged gradients. Then the wrapper sends
    nothing during backward. After each `every` steps, all ranks continue from the parameters' average over the
    wrapper's group, or, with an outer optimizer, from a step towards it: the outer gradient is the last starting point
    minus the average, and SGD with `outer_lr`, `outer_momentum` and `nesterov` applies it. The defaults of the outer
    optimizer are plain averaging; `every=1` with them is ordinary training, bitwise.

    **A step** is a forward pass of the wrapper outside `no_sync()` and its backward, which every rank makes equally
    often. Steps of the optimizer are not counted, because one rank may skip one (GradScaler at an inf, a check of the
    norm), and averaging waits for all ranks. For the same reason averaging happens when the next forward pass begins:
    only then is the last step, skipped or not, known to be over. Call `sync()` to average at once. Forward passes with
    gradients inside `no_sync()` are part of the step that follows.

    **Buffers** (unless `broadcast_buffers=False`) and frozen parameters that differ between ranks are averaged too;
    integers become rank 0's. Tensors that are equal on all ranks keep their bits.

    **Saving.** `state_dict()` of the module and of this object raise DdpError while replicas differ; after `sync()`
    rank 0's checkpoint stands for all. A `sync()` starts a new round of `every` steps. The optimizer's moments are
    never averaged: if rank 0's are saved, all ranks get them when the run is resumed.

    **Compression** of the wrapper applies to averaged gradients only: averages of replicas are sent uncompressed, and
    a residual left when the local steps begin waits for the next averaged gradients (after `close()`), in checkpoints
    too.

    Unsupported while ranks step by themselves: `join()` and weights of `backward()` (UnsupportedError).

    In a resilient function (`ddp.resilient`), make it before the function. After a failure all ranks continue from the
    state of one surviving rank: the other ranks' local steps since the last average are lost.

    Memory: with an outer optimizer, a copy of the trained parameters and one more for its momentum. Every `sync` also
    compares the ranks' settings, starting points and momenta, so that none drifts away unnoticed.

    Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD", ICLR (`after`: their post-local SGD); Douillard
    et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models" (AdamW, every=500, outer_lr=0.7,
    outer_momentum=0.9, nesterov).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        after: int = 0,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        nesterov: bool = True,
    ) -> None:
        self._settings = Settings(every, after, outer_lr, outer_momentum, nesterov)
        wrapper: Any = model
        _check_wrapped(wrapper, optimizer)
        self._model: Callable[[], Any] = weakref.ref(model)  # a wrapper of either class, or None
        self._step = 0
        self._own_steps = 0  # of this rank alone, since the replicas were last equal
        self._round = _Round()
        self._outer = OuterOptimizer(self._settings)
        self._has_backward = True  # since the optimizer's last step
        self._unseen_steps = 0
        self._warned: set[str] = set()
        self._is_off = False  # the wrapper's reduction, by this object, while a forward pass runs
        self._gradient_hooks: list[RemovableHandle] = []
        self._hooks = [
            model.register_forward_pre_hook(_Attached(self._before_forward), prepend=True),
            model.register_forward_hook(_Attached(self._after_forward), always_call=True),
            # The wrapper reads the inner module's state too.
            wrapper.module.register_state_dict_pre_hook(_Attached(self._before_state_dict)),
            optimizer.register_step_post_hook(_Attached(self._after_optimizer_step)),
        ]
        self._watch_gradients(model)
        self._part = _AveragingPart(self)
        accompany(wrapper.module, self._part)
        # Parameters outlive their wrapper, and their hooks would keep this object alive.
        self._finalizer = weakref.finalize(model, _remove, self._hooks, self._gradient_hooks)

    @property
    def step(self) -> int:
        """Number of complete steps. The last one counts once the next forward pass begins or `sync()` was called."""
        return self._step

    @property
    def has_diverged(self) -> bool:
        """Whether this rank has made local steps that are not averaged yet."""
        return self._own_steps > 0 or (self._round.is_complete and self._round.is_own)

    def sync(self) -> None:
        """Average the replicas now.

        Every rank must call it, before the model is evaluated or saved and at the end; it blocks until all do. Ranks
        may arrive with different numbers of steps: one that waits here takes part in the averages of those that still
        train, with the parameters that it has. Without local steps on any rank nothing changes.

        Raises LayoutMismatchError if the ranks have different settings, DriftError if their starting points or momenta
        differ, CollectiveError if a rank is gone.
        """
        self._close_round()
        self._synchronise(self._wrapper(), is_waiting=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the count of steps and the outer momentum, which are the same on every rank.

        The starting point of the next steps is not included: right after `sync()` that is the model. Raises DdpError
        if this rank has made local steps since then.
        """
        self._refuse_if_diverged()
        step = self._step + self._round.is_complete
        return {"step": step, "outer_momentum": {name: tensor.detach() for name, tensor in self._outer.momenta.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state that `state_dict` returned, perhaps in a world of another size. Every rank must call it.

        Raises ArgumentError for momenta that do not fit the model.
        """
        self._outer.load(state["outer_momentum"], weights_of(self._wrapper()))
        self._step, self._own_steps, self._round = int(state["step"]), 0, _Round()

    def close(self) -> None:
        """Go back to averaging gradients in every step, for good. Call `sync()` before; warns if you did not.

        Every rank must call it after the same step. The optimizer's state, such as momentum, still differs between
        ranks and would make the replicas different again: make a new optimizer, or broadcast rank 0's state
        (`ddp.horovod.broadcast_optimizer_state`).
        """
        if self.has_diverged:
            warnings.warn(
                f"LocalSGD is closed after {_steps(self._own_steps or 1)} that this rank has made by itself: the "
                "replicas stay different; call sync() on every rank before close()",
                stacklevel=2,
            )
        if (model := self._model()) is not None:
            model.steps_alone = False
        self._finalizer()

    def _before_forward(self, model: Any, _: object) -> None:
        if model is not self._model():
            return
        if not torch.is_grad_enabled():
            self._warn_if_evaluated()
            return
        self._after_forward(model)  # torch has left it out if Ctrl-C ended the last forward pass
        self._close_round()
        if self._own_steps >= self._settings.every:
            self._synchronise(model, is_waiting=False)
        is_own = self._step >= self._settings.after and not self._settings.is_ordinary
        model.steps_alone = is_own  # the wrapper refuses some calls then
        if is_own and is_in_join(model):
            raise UnsupportedError(
                "LocalSGD inside join(): leave join() out, and call sync() of LocalSGD where a rank's inputs end; it "
                "waits there for the others"
            )
        if not model.require_backward_grad_sync:
            return  # the user's no_sync()
        if self._round.is_open:  # no hook saw the backward of the last forward: other parameters may be trained now
            self._watch_gradients(model)
        self._round = _Round(is_open=True, is_own=is_own)
        if is_own:
            if self._outer.needs_starts:
                self._outer.begin(weights_of(model))
            # Both wrappers decide in forward whether its backward reduces. Restored at once, so that the attribute
            # holds the user's choice and no_sync() can be distinguished from this.
            self._is_off = True
            model.require_backward_grad_sync = False

    def _after_forward(self, model: Any, *_: object) -> None:
        if self._is_off and model is self._model():
            model.require_backward_grad_sync = True
            self._is_off = False

    def _on_gradient(self, _: torch.Tensor) -> None:
        """Handle a gradient. Called for every parameter, so the common case comes first."""
        current = self._round
        if current.is_queued or not current.is_open:
            return
        current.is_queued = True
        call_after_backward(lambda: self._after_backward(current))

    def _after_backward(self, ended: _Round) -> None:
        ended.is_open, ended.is_complete = False, True
        self._has_backward = True
        if ended.is_own:
            count_step()

    def _close_round(self) -> None:
        if self._round.is_complete:
            self._step += 1
            self._own_steps += self._round.is_own
            self._round = _Round()

    def _after_optimizer_step(self, *_: object) -> None:
        self._unseen_steps = 0 if self._has_backward else self._unseen_steps + 1
        self._has_backward = False
        if self._unseen_steps >= _UNSEEN_STEPS:
            self._warn(
                "the optimizer steps without a backward pass that went through the forward of the wrapper, outside "
                "no_sync(): LocalSGD does not count such steps, and the replicas are not averaged after them"
            )

    def _watch_gradients(self, model: Any) -> None:
        _remove(self._gradient_hooks)
        hook = self._on_gradient  # neither copies nor pickles of a parameter have it
        self._gradient_hooks += [
            parameter.register_post_accumulate_grad_hook(hook)
            for parameter in weights_of(model).values()
            if parameter.requires_grad
        ]

    def _before_state_dict(self, module: nn.Module, *_: object) -> None:
        model = self._model()
        if model is not None and module is model.module:
            self._refuse_if_diverged()

    def _refuse_if_diverged(self) -> None:
        if self.has_diverged:
            raise DdpError(
                f"this rank has made {_steps(self._own_steps + self._round.is_complete)} by itself since the replicas "
                "were averaged, so its state is not that of the others: call sync() of LocalSGD on every rank first"
            )

    def _warn_if_evaluated(self) -> None:
        if self.has_diverged:
            self._warn(
                "a forward pass without gradients runs on a replica that has made steps by itself since the replicas "
                "were averaged: call sync() of LocalSGD on every rank before evaluating"
            )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=4)

    def _wrapper(self) -> Any:
        model = self._model()
        if model is None or not self._finalizer.alive:
            raise ArgumentError("LocalSGD is closed, or the wrapped model is gone: make a new one for the new wrapper")
        return model

    @torch.no_grad()
    def _synchronise(self, model: Any, *, is_waiting: bool) -> None:
        group: dist.ProcessGroup = model.process_group
        everybody_waits = False
        while not everybody_waits:
            parameters = weights_of(model)
            if self._outer.needs_starts:
                self._outer.begin(parameters)
            named = [*parameters.items(), *_buffers(model)]
            mine = RankState(
                is_waiting=is_waiting,
                step=self._step,
                own_steps=self._own_steps,
                settings=asdict(self._settings),
                values=fingerprints(dict(named)),
                starts=fingerprints(self._outer.starts),
                momenta=fingerprints(self._outer.momenta),
            )
            states = [mine]
            if group.size() > 1:
                with waiting_for_peers("exchange of LocalSGD's states", group):
                    states = [RankState(**state) for state in gather_values(asdict(mine), group=group)]
            compare(states)
            if any(state.own_steps for state in states):
                average(group, [tensor for name, tensor in named if len({state.values[name] for state in states}) > 1])
                self._outer.step(parameters)
            self._step, self._own_steps, self._outer.starts = max(state.step for state in states), 0, {}
            self._part.changed()
            everybody_waits = not is_waiting or all(state.is_waiting for state in states)


class _AveragingPart(Part):
    """The part of LocalSGD's state that a resilient function restores: the progress of the round and its start."""

    def __init__(self, local: LocalSGD) -> None:
        self._local = weakref.ref(local)
        self._kept = 0, 0

    def keep(self) -> None:
        if (local := self._local()) is not None:
            is_complete = local._round.is_complete
            self._kept = local._step + is_complete, local._own_steps + (is_complete and local._round.is_own)

    def roll_back(self) -> None:
        if (local := self._local()) is not None:
            local._step, local._own_steps = self._kept
            local._round = _Round()

    def to_send(self) -> Any:
        local = self._local()
        return None if local is None else (self._kept, local._outer.starts, local._outer.momenta)

    def receive(self, sent: Any) -> None:
        if (local := self._local()) is not None:
            self._kept, local._outer.starts, local._outer.momenta = sent
            self.roll_back()


@dataclass
class _Round:
    """The progress of a step: announced by a forward pass, backward running, backward over."""

    is_own: bool = False
    is_open: bool = False
    is_queued: bool = False
    is_complete: bool = False


class _Attached:
    """A hook that belongs to this process's object: in a copy or a pickle of the module it does nothing."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __call__(self, *arguments: Any) -> None:
        self._method(*arguments)

    def __reduce__(self) -> tuple[type[_Attached], tuple[Callable[..., None]]]:
        return _Attached, (_do_nothing,)


def _do_nothing(*_: object) -> None:
    """Replace the hook in a copy."""


def _buffers(model: Any) -> list[tuple[str, torch.Tensor]]:
    if not model.broadcast_buffers:
        return []
    return [(n, b) for n, b in model.module.named_buffers() if n not in model.parameters_to_ignore]


def _remove(*lists: list[RemovableHandle]) -> None:
    for handles in lists:
        for handle in handles:
            handle.remove()
        handles.clear()


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


def _check_wrapped(model: Any, optimizer: Any) -> None:
    """Raise ArgumentError or UnsupportedError unless ranks can step `optimizer` on a wrapped `model` by themselves."""
    if not all(hasattr(model, name) for name in ("module", "process_group", "require_backward_grad_sync")):
        raise ArgumentError(f"model is a {type(model).__name__}: wrap it in ddp.DistributedDataParallel first")
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    if "ZeroRedundancyOptimizer" in names:
        raise UnsupportedError("ZeroRedundancyOptimizer steps for other ranks too, so none can step by itself")
    if "StandInOptimizer" in names:
        raise UnsupportedError(
            "the optimizer that prepare() of central_storage or parameter_server returned steps for all ranks, so none "
            "can step by itself: make LocalSGD with the model and optimizer that were never given to prepare()"
        )
    if "LBFGS" in names:
        raise UnsupportedError("LBFGS evaluates the model several times in a step, and must not find it averaged then")
    if not hasattr(optimizer, "register_step_post_hook"):
        raise ArgumentError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in stepped for parameter in model.parameters()):
        raise ArgumentError("the optimizer steps none of the model's parameters: make it from model.parameters()")
