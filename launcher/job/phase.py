"""How far a run has come, as the job counts it and as the user is told. Pure."""

from __future__ import annotations

from enum import Enum, auto

from launcher.job.attempt import AttemptState
from launcher.job.fleet import Fleet
from launcher.job.host_state import HostPhase
from launcher.job.progress_messages import some

__all__ = ["Phase", "progress"]


class Phase(Enum):
    GATHERING = auto()
    OPENING_STORE = auto()
    RUNNING = auto()
    COLLECTING = auto()
    ENDING = auto()  # the attempt
    STOPPING = auto()  # the job
    ENDED = auto()


def progress(phase: Phase, fleet: Fleet, attempt: AttemptState | None) -> str:
    """Say in a few words what the run is waiting for."""
    out, ready = fleet.count(HostPhase.OUT), fleet.count(HostPhase.READY)
    if phase is Phase.GATHERING:
        waiting = (s.name for s in fleet if s.phase is not HostPhase.READY and s.phase is not HostPhase.OUT)
        names = some(waiting, len(fleet) - ready - out) or "the next try"
        again = f"attempt {attempt.number + 1}: " if attempt is not None else ""
        return f"{again}{ready} of {len(fleet)} hosts ready; waiting for {names}"
    if phase is Phase.OPENING_STORE:
        return "opening the rendezvous store"
    if phase is Phase.RUNNING and attempt is not None:
        started, world = len(attempt.started), attempt.world_size
        return "" if started == world else f"{started} of {world} workers started"
    if phase is Phase.COLLECTING:
        return "a worker failed; looking where the others stand"
    if phase is Phase.ENDING and attempt is not None:
        waiting = (name for name in attempt.members if name in fleet.busy)
        return f"stopping; waiting for {some(waiting, len(fleet.busy))}"
    if phase is Phase.STOPPING:
        waiting = (state.name for state in fleet if state.phase is not HostPhase.OUT)
        return f"stopping; waiting for {some(waiting, len(fleet) - out)}"
    return ""
