"""How far a run has come: the phase that the job is in, and what is said to the user while it goes on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from itertools import islice

from launcher.job.attempt import AttemptState
from launcher.job.failure import Failure, what_happened
from launcher.job.fleet import Fleet
from launcher.job.host_state import HostPhase
from launcher.job.ranks import RankState
from launcher.protocol.reports import Facts


class Phase(Enum):
    GATHERING = auto()
    OPENING_STORE = auto()
    RUNNING = auto()
    EVIDENCE_ROUND = auto()
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
        hosts = f"{ready} of {len(fleet)} hosts ready; " if len(fleet) > 1 else ""
        return f"{again}{hosts}waiting for {names}"
    if phase is Phase.OPENING_STORE:
        return "opening the rendezvous store"
    if phase is Phase.RUNNING and attempt is not None:
        world = attempt.world_size
        started = world - attempt.ranks.count(RankState.STARTING)
        return "" if started == world else f"{started} of {world} workers started"
    if phase is Phase.EVIDENCE_ROUND:
        return "looking where the ranks stand"
    if phase is Phase.ENDING and attempt is not None:
        waiting = (name for name in attempt.members if name in fleet.busy)
        return f"stopping; waiting for {some(waiting, len(fleet.busy))}"
    if phase is Phase.STOPPING:
        waiting = (state.name for state in fleet if state.phase is not HostPhase.OUT)
        return f"stopping; waiting for {some(waiting, len(fleet) - out)}"
    return ""


def attempt_begins(number: int, members: Sequence[str], previous: Sequence[str]) -> str:
    now, before = set(members), set(previous)
    gone = [name for name in previous if name not in now]
    come = [name for name in members if name not in before]
    hosts = f"{len(members)} host{'s' if len(members) > 1 else ''}"
    without = f", without {some(gone)}" if gone else ""
    return f"attempt {number} begins on {hosts}{without}" + (f", with {some(come)}" if come else "")


def attempt_ended(number: int, cause: Failure, delay_s: float) -> str:
    when = f"; the next one begins in {delay_s:g} s" if delay_s else ""
    return f"attempt {number} failed: {what_happened(cause)}{when}"


def starts_again(failure: Failure, restart: str, delay_s: float) -> str:
    """Say that a process alone is started again; `restart` counts it."""
    when = f" in {delay_s:g} s" if delay_s else ""
    return f"{what_happened(failure)}; only this worker restarts{when} ({restart})"


def goes_on_without(failure: Failure, restart: str) -> str:
    """Say that an attempt goes on though a host is lost; `restart` counts it."""
    return (
        f"{what_happened(failure)}; the others keep their state and wait until its workers are certainly gone{restart}"
    )


def composed(number: int, members: Sequence[str], previous: Sequence[str], fresh: Sequence[str], size: int) -> str:
    """Say who goes on with an attempt, as which of its generations; `fresh` have been started for that."""
    gone = [name for name in previous if name not in members]
    without = f", without {some(gone)}" if gone else ""
    come = f", with {some(fresh)}" if fresh else ""
    workers = f"{size} worker{'' if size == 1 else 's'} on {len(members)} host{'' if len(members) == 1 else 's'}"
    return f"generation {number} goes on with {workers}{without}{come}"


def left_out(failure: Failure, reason: str) -> str:
    """Say that the others go on without a process; `reason` is why it is not started again, if that is news."""
    why = f" ({reason})" if reason else ""
    return f"{what_happened(failure)}; the other workers continue without it{why}"


def after_killed_runs(found: Mapping[str, Facts]) -> str:
    """Say what was found of earlier runs, by host."""
    runs, ended = (sum(numbers) for numbers in zip(*((f.killed_runs, f.ended) for f in found.values()), strict=True))
    what = "an earlier run that was" if runs == 1 else f"{runs} earlier runs that were"
    processes = f"{ended} process{'' if ended == 1 else 'es'} and " if ended else ""
    left = [
        f"; still there on {host}: {', '.join(facts.not_ended)}" for host, facts in found.items() if facts.not_ended
    ]
    return f"removed what {what} killed had left on {some(found)}: {processes}temporary folders{''.join(left)}"


def some(names: Iterable[str], count: int | None = None) -> str:
    """Return the first three of them, and how many more there are; `count`, where it is known, saves looking at all."""
    if count is None:
        names = list(names)
        count = len(names)
    first = list(islice(names, 3))
    return ", ".join(first) + (f" and {count - 3} more" if count > 3 else "")
