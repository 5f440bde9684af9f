"""The end of a run as JSON for programs; also written for a successful run. cli/main.py names the file.

One object. Every key is always present; it is null, an empty list or an empty string if it does not apply.

    version         2; incremented when a key changes its meaning or is removed
    run_id          null if the command line was invalid
    exit_code       dtrain's exit code
    ended           "finished", "failed" (see cause), "stopped" (see signal), "not started" (see error)
    signal          name of the signal that stopped dtrain
    error           why no worker was started: {type, message, hosts: {name: reason}}
    cause           the first failure that was not a consequence of another:
                    {kind, host, rank, pid, exit_status, signal, killer, error_type, message, where, inside, attempt,
                    after_s, step, log_folder}. kind: "raised", "exited", "killed", "never started", "host lost",
                    "store lost", "stalled", "hung". If a signal killed the process, exit_status is null and
                    signal its name. where: "file:line in function" of the user's own code; inside: the function below
                    it that raised; both for "exited" if the worker called sys.exit, else empty. step: that of
                    the ledger in which it ended, null without a ledger
    secondary_failures
                    independent failures after the cause: {count, groups: [{count, kind, how, ranks}]}
    preempted       whether the run ended to make room (--requeue) and will be started again
    finished_ranks  ranks that had ended with code 0; others, including the cause, may still have waited for them
    left_out        failures, as in cause, of processes without which the others continued; may include the cause
    worker_restarts restarts of a single process
    faults          injected by --chaos: [{action, target, at_s, detection_s, recovery_s, steps_lost}]; at_s counts from
                    the start of the run, the next two from the fault; null if never reached
    stopped         workers that dtrain stopped
    attempts        number of attempts
    no_restart_reason
                    why no further attempt was made
    world_size      workers of the last attempt
    hosts           number of hosts that had workers in any attempt
    duration_s
    processes       at the end: {left: {host: [process]}, swept: number that outlived their workers and were ended,
                    unchecked: {host: reason}}
    missing         the ranks that the failed ones had waited for until a collective's timeout:
                    [{rank, host, where, awaited_in}]
    standing        where the ranks were when the cause was noticed: [{ranks, where, call, inside, note}]
    collectives     in which the ranks disagreed then, a line of text for each
    devices         what had gone wrong with GPUs then, a line of text for each, beginning with the host
    goodput         how the wall time was spent, in seconds that add up to duration_s: {goodput: the fraction spent
                    training, start_s, training_s, waiting_s: for stragglers, checkpoints_s: with evaluation,
                    failures_s, rest_s, repeated_s: the part of failures in steps made twice}; see timeline/goodput.py.
                    goodput and training_s are null if no worker uses ddp (rest_s then includes its work); all of it is
                    null if no host was asked
    stragglers      [{host, ranks, what, times, attempt, from_step, after_s, to_step, for_s}]; the last two are null if
                    it was slow until the end; see timeline/stragglers.py
    log_folder      of the run; null if it could not be written. Paths are relative if --log-dir was
    evidence_file   the stacks of all ranks when the cause was noticed

It contains nothing from the environment or the arguments of a process.
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
from launcher.job.ending import MissingRank, Outcome, did_not_come
from launcher.job.failures.failure import Failure, FailureKind, group_secondary_failures, signal_name
from launcher.output.logfiles import log_folder
from launcher.output.text import printable
from launcher.output.whole_file import write_json
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
    """Write how a run ended. Raises OSError; readers see the whole new file or the previous one."""
    write_json(path, as_json(outcome, folder, evidence_file, parts=parts, stragglers=stragglers))


def write_usage_error_json(path: Path, error: DtrainError) -> None:
    """Write that the command line or the configuration was invalid. Raises OSError like `write_error_json`."""
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
    """Return the object described in the module's docstring."""
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
        "missing": [dataclasses.asdict(each) for each in outcome.missing],
        "standing": [{**dataclasses.asdict(group), "ranks": list(group.ranks)} for group in groups(outcome.evidence)],
        "collectives": list(outcome.collectives),
        "devices": list(outcome.devices),
        "goodput": None if parts is None else parts.as_json(),
        "stragglers": [each.as_json() for each in stragglers],
        "log_folder": None if folder is None else str(folder),
        "evidence_file": None if folder is None or evidence_file is None else str(evidence_file),
    }


def brief_cause(content: Mapping[str, Any]) -> str:
    """Summarize why a run ended, from what `as_json` returned; empty if all workers finished."""
    error, cause = content["error"], content["cause"]
    if error is not None:
        host = next(iter(error["hosts"]), "")
        return _brief(f"{host}: {error['hosts'][host]}" if host else error["message"])
    if content.get("preempted"):
        return "made room (--requeue)"
    if cause is None:
        return f"stopped by {content['signal']}" if content["signal"] else ""
    if missing := content.get("missing"):
        return _brief(did_not_come([MissingRank(**each) for each in missing]))
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
    """Return the first line of a text, cut to the width of a table column."""
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
        "step": cause.step or None,
        "log_folder": None if folder is None else str(log_folder(folder, cause.attempt, cause.rank)),
    }
