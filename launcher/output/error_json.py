"""How a run ended, as JSON for programs: always written, for a run that went well too. cli/main.py names the file.

One object. Every key is always there; what does not apply is null, an empty list or an empty string.

    version         2; a new number where a key changes its meaning or goes
    run_id          null where the command could not be run as it was typed
    exit_code       what dtrain ends with
    ended           "finished", "failed" (see cause), "stopped" (see signal), "not started" (see error)
    signal          the name of the signal that told dtrain to stop
    error           why no worker was started: {type, message, hosts: {name: reason}}
    cause           the first failure that was no consequence of another:
                    {kind, host, rank, pid, exit_status, signal, killer, error_type, message, where, inside, attempt,
                    after_s, log_folder}. kind: "raised", "exited", "killed", "never started", "host lost",
                    "store lost", "stalled", "hung". exit_status is null and signal a name for what a signal
                    killed. where: "file:line in function" of the user's own code; inside: the function that raised
                    below it; of "exited" where it called sys.exit, else empty
    secondary_failures
                    what failed after the cause by itself: {count, groups: [{count, kind, how, ranks}]}
    preempted       whether it ended to make room (--requeue), to be started again
    finished_ranks  ranks that had ended with code 0; others, the cause among them, may still have waited for them
    left_out        failures, as in cause, of processes that the others went on without; the cause may be one of them
    worker_restarts how often one process alone was started again
    faults          of --chaos: [{action, target, at_s, detection_s, recovery_s, steps_lost}]; at_s after the begin of
                    the run, the next two after the fault, null if it did not come to that
    stopped         workers that dtrain stopped
    attempts        how many were made
    no_restart_reason
                    why no further attempt was made
    world_size      workers of the last attempt
    hosts           how many had workers, in any attempt
    duration_s
    processes       at the end: {left: {host: [process]}, swept: how many outlived their workers and were ended,
                    unchecked: {host: reason}}
    standing        where the ranks were when the cause was noticed: [{ranks, where, call, inside, note}]
    goodput         what the wall time went to, in seconds that add up to duration_s: {goodput: training's part of it,
                    start_s, training_s, waiting_s: for stragglers, checkpoints_s: with evaluation, failures_s, rest_s,
                    repeated_s: of failures, steps made twice}; see timeline/goodput.py. goodput and training_s are null
                    where no worker uses ddp (then rest_s has its work), all of it where no host was asked
    stragglers      what was slow: [{host, ranks, what, times, attempt, from_step, after_s, to_step, for_s}], the last
                    two null for what was slow to the end; see timeline/stragglers.py
    log_folder      of the run; null if it could not be written. Paths are as dtrain was given --log-dir
    evidence_file   the stacks of all ranks when the cause was noticed

Nothing in it is taken from the environment or the arguments of a process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import DtrainError
from launcher.hangs.positions import groups
from launcher.hosts.folding import StartError
from launcher.job.chaos import FaultCost
from launcher.job.failure import Failure, FailureKind, group_secondary_failures, signal_name
from launcher.job.outcome import Outcome
from launcher.output.json_file import write_json
from launcher.output.logfiles import log_folder
from launcher.output.text import printable
from launcher.timeline.goodput import Parts
from launcher.timeline.stragglers import Straggler

VERSION = 2
BRIEF_CHARACTERS = 44


def write_error_json(
    path: Path,
    outcome: Outcome,
    *,
    folder: Path | None,
    evidence_file: Path | None = None,
    parts: Parts | None = None,
    stragglers: Sequence[Straggler] = (),
) -> None:
    """Write the end of a run. Raises OSError; whoever reads the file sees all of it or the one before."""
    write_json(path, as_json(outcome, folder, evidence_file, parts=parts, stragglers=stragglers))


def write_usage_error_json(path: Path, error: DtrainError) -> None:
    """Write that the command could not be run as it was typed or configured. Raises OSError as `write_error_json`."""
    never = Outcome(
        run_id="", exit_code=error.exit_code, error=error,
        signum=None, cause=None, secondary_failures=(), stopped=0, world_size=0, hosts=0, attempts=0,
        no_restart_reason="", evidence=(), swept=0, left=(), unchecked=(), duration_s=0.0,
    )  # fmt: skip
    write_json(path, {**as_json(never, None, None), "run_id": None})


def as_json(
    outcome: Outcome,
    folder: Path | None,
    evidence_file: Path | None,
    *,
    parts: Parts | None = None,
    stragglers: Sequence[Straggler] = (),
) -> dict[str, Any]:
    """Return the object that the module describes."""
    error = outcome.error
    hosts = error.reasons if isinstance(error, StartError) else {}
    return {
        "version": VERSION,
        "run_id": outcome.run_id,
        "exit_code": outcome.exit_code,
        "ended": _ended(outcome),
        "signal": None if outcome.signum is None else signal_name(outcome.signum),
        "error": None if error is None else {"type": type(error).__name__, "message": str(error), "hosts": hosts},
        "cause": None if outcome.cause is None else _of_cause(outcome.cause, folder),
        "secondary_failures": {
            "count": len(outcome.secondary_failures),
            "groups": [
                {"count": group.count, "kind": group.kind.value, "how": group.how, "ranks": list(group.ranks)}
                for group in group_secondary_failures(outcome.secondary_failures)
            ],
        },
        "preempted": outcome.preempted,
        "finished_ranks": list(outcome.finished_ranks),
        "left_out": [_of_cause(failure, folder) for failure in outcome.left_out],
        "worker_restarts": outcome.worker_restarts,
        "faults": [_of_fault(fault) for fault in outcome.faults],
        "stopped": outcome.stopped,
        "attempts": outcome.attempts,
        "no_restart_reason": outcome.no_restart_reason,
        "world_size": outcome.world_size,
        "hosts": outcome.hosts,
        "duration_s": round(outcome.duration_s, 3),
        "processes": {
            "left": {host: list(processes) for host, processes in outcome.left},
            "swept": outcome.swept,
            "unchecked": dict(outcome.unchecked),
        },
        "standing": [{**dataclasses.asdict(group), "ranks": list(group.ranks)} for group in groups(outcome.evidence)],
        "goodput": None if parts is None else parts.as_json(),
        "stragglers": [each.as_json() for each in stragglers],
        "log_folder": None if folder is None else str(folder),
        "evidence_file": None if folder is None or evidence_file is None else str(evidence_file),
    }


def brief_cause(content: Mapping[str, Any]) -> str:
    """Say in a few words what ended a run, given what `as_json` returned; empty where all workers finished."""
    error, cause = content["error"], content["cause"]
    if error is not None:
        host = next(iter(error["hosts"]), "")
        return _brief(f"{host}: {error['hosts'][host]}" if host else error["message"])
    if content.get("preempted"):
        return "made room (--requeue)"
    if cause is None:
        return f"stopped by {content['signal']}" if content["signal"] else ""
    kind, rank = FailureKind(cause["kind"]), f"rank {cause['rank']}"
    if kind is FailureKind.HOST_LOST:
        return f"host {cause['host']} lost"
    if kind is FailureKind.STORE_LOST:
        return "rendezvous store lost"
    if kind is FailureKind.STALLED:
        return _brief(cause["message"])
    if kind is FailureKind.RAISED:
        return _brief(": ".join(filter(None, (rank, cause["error_type"] or "exception", cause["message"]))))
    if kind is FailureKind.EXITED:
        return f"{rank}: exit code {cause['exit_status']}"
    if kind is FailureKind.KILLED:
        return f"{rank}: {'out of memory, ' if 'out-of-memory killer' in cause['killer'] else ''}{cause['signal']}"
    return f"{rank} {kind.value}"


def _of_fault(fault: FaultCost) -> dict[str, Any]:
    return {name: round(v, 3) if isinstance(v, float) else v for name, v in dataclasses.asdict(fault).items()}


def _brief(text: str) -> str:
    """Return the first line of a text, cut to what a column of a table has room for."""
    line = printable(next((line.strip() for line in text.splitlines() if line.strip()), ""))
    return line if len(line) <= BRIEF_CHARACTERS else f"{line[: BRIEF_CHARACTERS - 3].rstrip()}..."


def _ended(outcome: Outcome) -> str:
    if outcome.error is not None:
        return "not started"
    if outcome.cause is not None:
        return "failed"
    return "finished" if outcome.signum is None else "stopped"


def _of_cause(cause: Failure, folder: Path | None) -> dict[str, Any]:
    killed = cause.rank is not None and cause.status < 0
    ended = cause.rank is not None and cause.kind is not FailureKind.NEVER_STARTED and not killed
    return {
        "kind": cause.kind.value,
        "host": cause.host or None,
        "rank": cause.rank,
        "pid": cause.pid or None,
        "exit_status": cause.status if ended else None,
        "signal": signal_name(-cause.status) if killed else None,
        "killer": cause.killer,
        "error_type": cause.error_type,
        "message": cause.message,
        "where": cause.where,
        "inside": cause.inside,
        "attempt": cause.attempt,
        "after_s": round(cause.ran_s, 3),
        "log_folder": None if folder is None else str(log_folder(folder, cause.attempt, cause.rank)),
    }
