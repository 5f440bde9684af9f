"""Where a fit stands, for `ddp.State`: what a replaced worker needs besides the model, the optimizer and the data.

It reads and sets what only it and `ddp.training.trainer` use of a trainer.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

from ddp.data.replica_loader import ReplicaLoader
from ddp.errors import ArgumentError
from ddp.resilience.loop import can_go_on
from ddp.resilience.state import State

__all__ = ["FitState", "state_of"]

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
    """What goes on after a failure in a fit that begins now, or None if nothing does."""
    if not (trainer.strategy.comes_back and can_go_on()):
        return None
    parts: dict[str, Any] = {
        "model": trainer.model,
        "optimizer": trainer.optimizer,
        "sampler": loader,
        "fit": FitState(trainer),
    }
    if trainer.scaler.is_enabled():
        parts["scaler"] = trainer.scaler
    try:
        state = State(**parts)
    except ArgumentError as error:
        warnings.warn(f"after a failure all processes of this fit() will start again: {error}", stacklevel=3)
        return None
    return None if state.commits.obstacle() else state
