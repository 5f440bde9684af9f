"""Progress of a fit, for `ddp.State`: what a replaced worker needs besides the model, the optimizer and the data.

It reads and sets attributes of a trainer that only it and `ddp.training.trainer` use.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from ddp.comm.objects import gather_values
from ddp.data import replay
from ddp.data.replica_loader import ReplicaLoader
from ddp.data.step_loader import StepLoader
from ddp.errors import ArgumentError, ReplacementError
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.progress import set_restart_policy
from ddp.resilience.loop import can_go_on, is_replacement
from ddp.resilience.state import State

_PLACE = ("epoch", "step", "epoch_step", "learning_rate", "is_stopped", "is_ending_step")


class FitState:
    """State of one trainer. `state_dict` is the same on all replicas, `own_state` is this replica's own."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "place": {name: getattr(trainer, name) for name in _PLACE},
            "logs": trainer.logs,
            "weights": trainer.weighted.place(),
            "callbacks": trainer.callbacks.states(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        vars(trainer).update(state["place"])
        trainer.logs = state["logs"]
        trainer.weighted.load(*state["weights"])
        trainer.callbacks.forget_failure()
        trainer.callbacks.load_states(state["callbacks"])

    def own_state(self) -> bytes:
        trainer = self._trainer
        own = (trainer.totals.numbers(), trainer.asks_to_stop, trainer.weighted.of_step)
        return json.dumps(own).encode()

    def load_own_state(self, state: bytes) -> None:
        trainer = self._trainer
        totals, trainer.asks_to_stop, trainer.weighted.of_step = json.loads(state)
        trainer.totals.set(totals)


def state_of(trainer: Any, loader: ReplicaLoader | StepLoader) -> State | None:
    """Return the state of a fit that survives a failure; None on all replicas if one of them has an obstacle.

    Every replica must call it; all but replacements of failed ones block until they have agreed. Raises
    ReplacementError on a replacement that cannot do the same as the other replicas.
    """
    if (replayed := replay.plan()) is not None and replayed.state is not None:
        return _state(trainer, loader)
    if not (trainer.strategy.comes_back and can_go_on()):
        return None
    state, problem = None, ""
    try:
        state = _state(trainer, loader)
        problem = state.commits.obstacle()
    except ArgumentError as error:
        problem = str(error)
    except Exception as error:  # a callback's state_dict() may raise anything before its on_fit_begin()
        if is_interrupt(error):
            raise
        problem = f"{type(error).__name__}: {error}"
    if is_replacement():
        if problem:
            set_restart_policy(0)
            raise ReplacementError(f"the other replicas continue fit(), but this process cannot: {problem}")
        return state
    problems = gather_values(problem)
    if not any(problems):
        return state
    rank = next(rank for rank, each in enumerate(problems) if each)
    reason = problem or f"rank {rank}: {problems[rank]}"
    warnings.warn(f"after a failure all processes of this fit() will start again: {reason}", stacklevel=3)
    return None


def _state(trainer: Any, loader: ReplicaLoader | StepLoader) -> State:
    parts: dict[str, Any] = {
        "model": trainer.model,
        "optimizer": trainer.optimizer,
        "sampler": loader,
        "fit": FitState(trainer),
    }
    if trainer.scaler.is_enabled():
        parts["scaler"] = trainer.scaler
    return State(**parts)
