"""Where a fit stands, for `ddp.State`: what a replaced worker needs besides the model, the optimizer and the data.

It reads and sets what only it and `ddp.training.trainer` use of a trainer.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from ddp.comm.objects import gather_values
from ddp.data.replica_loader import ReplicaLoader
from ddp.errors import ArgumentError, ReplacementError
from ddp.monitoring.progress import set_restart_policy
from ddp.resilience.loop import can_go_on, is_replacement
from ddp.resilience.state import State

_PLACE = ("epoch", "step", "epoch_step", "learning_rate", "is_stopped", "is_ending_step")


class FitState:
    """Of one trainer. `state_dict` is the same on all replicas, `own_state` what this one has by itself."""

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


def state_of(trainer: Any, loader: ReplicaLoader) -> State | None:
    """What goes on after a failure in a fit that begins now; None on all replicas if there is an obstacle on one.

    All replicas call it, and those that take no failed one's place block until they have agreed. Of the others it
    raises ReplacementError where one cannot do what the replicas that are there do.
    """
    if not (trainer.strategy.comes_back and can_go_on()):
        return None
    state, problem = None, ""
    try:
        state = _state(trainer, loader)
        problem = state.commits.obstacle()
    except ArgumentError as error:
        problem = str(error)
    except Exception as error:  # whatever a callback's state_dict() raises before its on_fit_begin()
        problem = f"{type(error).__name__}: {error}"
    if is_replacement():
        if problem:
            set_restart_policy(0)
            raise ReplacementError(f"the other replicas go on with fit(), which this process cannot: {problem}")
        return state
    told = gather_values(problem)
    if not any(told):
        return state
    rank = next(rank for rank, each in enumerate(told) if each)
    reason = problem or f"rank {rank}: {told[rank]}"
    warnings.warn(f"after a failure all processes of this fit() will start again: {reason}", stacklevel=3)
    return None


def _state(trainer: Any, loader: ReplicaLoader) -> State:
    parts: dict[str, Any] = {
        "model": trainer.model,
        "optimizer": trainer.optimizer,
        "sampler": loader,
        "fit": FitState(trainer),
    }
    if trainer.scaler.is_enabled():
        parts["scaler"] = trainer.scaler
    return State(**parts)
