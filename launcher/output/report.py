"""The final report of a run: what failed first and where, what followed, what is left, where to look next.

Pure. About SCREEN_LINES lines at most; omitted items are counted, and are complete in the files named at the end.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.hangs.positions import groups
from launcher.job.ending import Outcome, did_not_come
from launcher.job.failures.failure import (
    Failure,
    FailureKind,
    SecondaryFailures,
    group_secondary_failures,
    looks_like_consequence,
    plain_message,
    signal_name,
    what_happened,
)
from launcher.output.logfiles import STREAM_NAMES, log_folder
from launcher.output.stacks import odd_one_out, one_line
from launcher.output.text import count, printable, ranges, table

_NO_CUDA = re.compile(
    "Torch not compiled with CUDA|no attribute '_cuda_|doesn't have NCCL built in|Tried to instantiate dummy base class"
)
_OF_A_CRASH = re.compile(
    r'  File ".*/launcher/agent/workers/(bootstrap|fork_server|collectives)\.py", line \d+ in |Extension modules: '
)

SCREEN_LINES = 36
TAIL_LINES = 12
MESSAGE_LINES = 4
GROUPS = 5
SECONDARY = 3
HOSTS = 4
DEVICES = 4  # lines on GPUs
PROCESSES = 6
FAULTS = 20


def report(
    outcome: Outcome,
    *,
    folder: Path | None,
    tail: Callable[[int, int], list[str]],
    evidence_file: Path | None = None,
    replays: bool = False,
) -> str:
    """Return the report; a single line if the run succeeded or was stopped.

    `folder` is the run's log folder, None if it could not be written; `tail` returns the last lines of a rank's
    stream (1 or 2); `evidence_file` has the stacks of the last attempt, if any were written. `replays`: the steps
    before a failure were recorded.
    """
    text, cause = _text(outcome, folder, tail, evidence_file), outcome.cause
    is_raised = cause is not None and cause.kind is FailureKind.RAISED and not looks_like_consequence(cause)
    if replays and is_raised and not outcome.preempted:
        text += f"\n  replay it: dtrain replay {outcome.run_id}"
    return "\n".join([text, *_faults(outcome)])


def _text(
    outcome: Outcome, folder: Path | None, tail: Callable[[int, int], list[str]], evidence_file: Path | None
) -> str:
    if outcome.error is not None:
        return "\n".join([str(outcome.error), *_scan(outcome)])
    if outcome.preempted:
        how = f"ended after {outcome.duration_s:.1f} s to make room (USR1, --requeue)"
        lines = [f"{how}; exit code {outcome.exit_code}"]
        if outcome.cause is not None and outcome.cause.status == -signal.SIGUSR1:
            lines.append("USR1 killed its workers, which do not handle it: only what they saved before remains")
            lines.append("see ddp.Checkpoint.due, or end with code 75 once it is saved")
        return "\n".join([lines[0] + _where(folder), *lines[1:], *_scan(outcome)])
    if outcome.cause is not None:
        return "\n".join(_failure(outcome, outcome.cause, folder, tail, evidence_file))
    scan = _scan(outcome)
    if outcome.signum is not None:
        how = f"stopped by {signal_name(outcome.signum)} after {outcome.duration_s:.1f} s"
        stopped = f"{how}; {count(outcome.stopped, 'worker')} stopped{_where(folder)}"
        positions = _positions(outcome, None)
        stacks = [f"stacks of all ranks: {_quote(evidence_file)}"] if positions and evidence_file is not None else []
        return "\n".join([stopped, *_left_out(outcome), *_indent([*positions, *stacks]), *scan])
    success = f"{_who_succeeded(outcome)} finished successfully after {outcome.duration_s:.1f} s"
    if outcome.stopped:
        success += f", {outcome.stopped} of other roles stopped"
    if restarts := outcome.attempts - 1 + outcome.worker_restarts:
        success += f", {count(restarts, 'restart')}"
    return "\n".join(["; ".join([success, *scan[:1]]) + _where(folder), *scan[1:]])


def _where(folder: Path | None) -> str:
    return "" if folder is None else f"; output in {_quote(folder)}"


def _faults(outcome: Outcome) -> list[str]:
    """Format what each fault of --chaos cost."""
    if not outcome.faults:
        return []
    rows = [
        {
            "fault": f"{fault.action} {fault.target}",
            "at": _seconds(fault.at_s),
            "noticed after": _seconds(fault.detection_s),
            "went on after": _seconds(fault.recovery_s),
            "steps lost": "-" if fault.steps_lost is None else str(fault.steps_lost),
        }
        for fault in outcome.faults[:FAULTS]
    ]
    more = len(outcome.faults) - len(rows)
    rest = [f"and {count(more, 'more fault')}; --error-json has all of them"] if more else []
    return [f"--chaos made {count(len(outcome.faults), 'fault')}:", *table(rows), *rest]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _who_succeeded(outcome: Outcome) -> str:
    if outcome.stopped:
        return count(outcome.world_size - outcome.stopped, "worker")
    return "the worker" if outcome.world_size == 1 else f"all {outcome.world_size} workers"


def _failure(
    outcome: Outcome,
    cause: Failure,
    folder: Path | None,
    tail: Callable[[int, int], list[str]],
    evidence_file: Path | None,
) -> list[str]:
    """Return the report of a failure; the worker's last lines fill the remaining space."""
    missing = [printable(did_not_come(outcome.missing))] if outcome.missing else []
    before = [*missing, _headline(outcome, cause), *_indent(_exception(cause)), *_indent(_devices(outcome, cause))]
    consequences, positions = _consequences(outcome, cause), _positions(outcome, cause)
    after = positions + consequences if cause.kind is FailureKind.STALLED else consequences + positions
    if outcome.signum is not None:
        after.append(f"then stopped by {signal_name(outcome.signum)}")
    if outcome.no_restart_reason:
        after.append(outcome.no_restart_reason)
    after += _scan(outcome)
    after += _no_input(outcome, cause)
    after += _hint(outcome, cause)
    stream, lines = _last_lines(cause, tail)
    after += _next_step(cause, stream, folder, evidence_file)
    room = max(MESSAGE_LINES, min(TAIL_LINES, SCREEN_LINES - len(before) - len(after)))
    last = (
        [f"the last lines of its {STREAM_NAMES[stream]}:", *(f"| {line}" for line in lines[-room:])] if stream else []
    )
    return [*before, *_indent(last), *_indent(after)]


def _headline(outcome: Outcome, cause: Failure) -> str:
    headline = printable(what_happened(cause, in_full=True))
    if outcome.attempts > 1 or cause.attempt:
        headline = f"attempt {cause.attempt} of run {outcome.run_id}: {headline}"
    return headline


def _exception(cause: Failure) -> list[str]:
    if cause.kind is FailureKind.EXITED and cause.where:
        return [f"it called sys.exit {_at(cause)}"]
    if cause.kind is not FailureKind.RAISED:
        return []
    shown = [line for line in cause.message.splitlines() if line.strip()]
    if (more := len(shown) - MESSAGE_LINES) > 1:  # the last one says most if it quotes another traceback
        shown[MESSAGE_LINES - 1 : -1] = [f"({more} more lines)"]
    first = ": ".join(filter(None, (cause.error_type, *shown[:1])))
    lines = [printable(line) for line in (first, *shown[1:]) if line]
    if cause.where:
        lines.append(_at(cause))
    return lines


def _devices(outcome: Outcome, cause: Failure) -> list[str]:
    """Format what went wrong with GPUs during the attempt, that of the cause's host first."""
    lines = sorted(outcome.devices, key=lambda line: not line.startswith(f"{cause.host}: "))
    return _at_most(DEVICES, [printable(f"GPUs of {line}") for line in lines], "errors of GPUs")


def _at(cause: Failure) -> str:
    own = cause.where.rpartition(" in ")[2]
    inside = f", inside {cause.inside}" if cause.inside and cause.inside != own else ""
    return printable(f"at {cause.where}{inside}")


def _no_input(outcome: Outcome, cause: Failure) -> list[str]:
    """Suggest what to do if a rank prompted a user who could not answer."""
    asked = cause.error_type == "BdbQuit" or (cause.error_type == "EOFError" and "reading a line" in cause.message)
    if not asked or cause.rank is None or cause.rank == outcome.stdin_rank:
        return []
    return [
        f"no one can answer rank {cause.rank}: its standard input is empty",
        f"to let it read the terminal in the next run: dtrain run --stdin {cause.rank} ...",
    ]


def _hint(outcome: Outcome, cause: Failure) -> list[str]:
    """Suggest what to do about a cause whose message does not."""
    if cause.error_type == "ModuleNotFoundError" and outcome.hosts > 1:
        return [f"if it is only missing on {cause.host}: --sync env sends your packages, --sync code your own modules"]
    if "out-of-memory killer" in cause.killer:
        return ["to need less memory: fewer workers on each host (--nproc-per-node), or a smaller batch"]
    if cause.kind is not FailureKind.RAISED or not _NO_CUDA.search(cause.message):
        return []
    return [f"the torch on {cause.host} is built without CUDA; dtrain check shows torch and GPUs of each host"]


def _last_lines(cause: Failure, tail: Callable[[int, int], list[str]]) -> tuple[int, list[str]]:
    """Return the worker's last lines and their stream: stderr if it wrote there, 0 if it wrote nothing.

    Lines about dtrain's own files and loaded libraries, which a crash prints, are in the log file only.
    """
    if cause.rank is None or cause.kind is FailureKind.NEVER_STARTED:
        return 0, []
    for stream in (2, 1):
        if lines := tail(cause.rank, stream):
            return stream, [line for line in lines if not _OF_A_CRASH.match(line)]
    return 0, []


def _consequences(outcome: Outcome, cause: Failure) -> list[str]:
    same: list[Failure] = []
    others: list[Failure] = []
    for failure in outcome.secondary_failures:
        (same if _is_the_same(failure, cause) else others).append(failure)
    counted = group_secondary_failures(others)
    lines = _left_out(outcome)
    if outcome.finished_ranks:
        shown = ranges(outcome.finished_ranks)
        who = f"rank {shown}" if len(outcome.finished_ranks) == 1 else f"ranks {shown}"
        it = "it" if len(outcome.finished_ranks) == 1 else "them"
        lines.append(f"{who} had finished, with code 0: others may still have waited for {it}")
    if same:
        who = f"all {outcome.world_size} workers" if len(same) + 1 == outcome.world_size else count(len(same), "other")
        lines.append(f"{who} raised the same {cause.error_type or 'exception'}")
    lines += [printable(_secondary_failures(group)) for group in counted[:SECONDARY]]
    if more := sum(group.count for group in counted[SECONDARY:]):
        lines.append(f"and {more} more in other ways")
    if outcome.stopped:
        lines.append(f"{count(outcome.stopped, 'worker')} stopped by dtrain")
    return lines


def _is_the_same(failure: Failure, cause: Failure) -> bool:
    def what(each: Failure) -> tuple[str, str, str]:
        return each.error_type, plain_message(each.message), each.where

    return failure.kind is cause.kind is FailureKind.RAISED and what(failure) == what(cause)


def _left_out(outcome: Outcome) -> list[str]:
    """List the processes that failed while the attempt continued."""
    ranks = sorted(failure.rank for failure in outcome.left_out if failure.rank is not None)
    cause = outcome.cause
    lines = []
    if cause is not None and any(failure is cause for failure in outcome.left_out):
        lines.append("the other workers continued without it to the end")
        ranks = [rank for rank in ranks if rank != cause.rank]
    if ranks:
        who, it = (f"rank {ranks[0]}", "it") if len(ranks) == 1 else (f"ranks {', '.join(map(str, ranks))}", "them")
        lines.append(f"{who} failed too; the other workers continued without {it}")
    return lines


def _secondary_failures(group: SecondaryFailures) -> str:
    if group.kind is FailureKind.HOST_LOST:
        return f"{count(group.count, 'other host')} {group.how}"
    if group.kind is FailureKind.STORE_LOST:
        return f"the rendezvous store {group.how}"
    return f"{count(group.count, 'other')} {group.how}"


def _positions(outcome: Outcome, cause: Failure | None) -> list[str]:
    """Format where each group of ranks was when the cause was noticed, without the failed ones, which were exiting.

    Without a cause: when a user stopped a run that seemed to hang. In a hung run, ranks fail because they are stopped.
    """
    evidence = outcome.evidence
    is_hung = cause is None or cause.kind is FailureKind.STALLED
    if cause is not None and not is_hung:
        failed = {failure.rank for failure in (*outcome.secondary_failures, cause)}
        evidence = tuple(each for each in evidence if each.rank not in failed)
    found = groups(evidence)
    if not found:
        return [*map(printable, outcome.collectives)]
    others = "where each rank was:" if cause is None else "where the other ranks were:"
    others = "where each rank is:" if cause is not None and is_hung else others
    lines = [others, *(f"  {printable(one_line(group))}" for group in found[:GROUPS])]
    if more := len(found[GROUPS:]):
        ranks = sum(len(group.ranks) for group in found[GROUPS:])
        lines.append(f"  and {count(ranks, 'rank')} in {count(more, 'other place')}")
    if is_hung and (odd := odd_one_out(evidence)):
        lines.append(printable(odd))
    return [*lines, *map(printable, outcome.collectives)]


def _scan(outcome: Outcome) -> list[str]:
    """Format what was found on the hosts at the end; empty if no worker was started and nothing was found."""
    if not (outcome.hosts or outcome.left or outcome.unchecked or outcome.swept):
        return []
    left = sum(len(processes) for _, processes in outcome.left)
    checked = max(len(outcome.left), outcome.hosts - len(outcome.unchecked))
    checks = [f"{count(left, 'process')} left on {count(checked, 'host')}"] if checked else []
    if outcome.unchecked:
        checks.append(f"{count(len(outcome.unchecked), 'host')} could not be checked")
    swept = f" ({count(outcome.swept, 'process')} outlived the workers and were ended)" if outcome.swept else ""
    lines = ["; ".join(checks) + swept]
    names = [
        f"still there on {host}: {printable(process)}" for host, processes in outcome.left for process in processes
    ]
    lines += _at_most(PROCESSES, names, "processes")
    reasons = [f"host {host} could not be checked: {printable(reason)}" for host, reason in outcome.unchecked]
    return lines + _at_most(HOSTS, reasons, "hosts")


def _next_step(cause: Failure, stream: int, folder: Path | None, evidence_file: Path | None) -> list[str]:
    """Return the last lines: where all output is kept, and the command that shows it."""
    if folder is None:
        return ["not all output was kept: the log files could not be written"]
    logs = log_folder(folder, cause.attempt, cause.rank)
    stacks = [] if evidence_file is None else [f"stacks of all ranks: {_quote(evidence_file)}"]
    if cause.rank is not None:
        if stream:
            where = f"its whole output: {_quote(logs)}/stdout.log, stderr.log"
            return [where, *stacks, f"see it: less {_quote(logs / f'{STREAM_NAMES[stream]}.log')}"]
        return ["it wrote no output", *stacks, *([f"see it: less {_quote(evidence_file)}"] if evidence_file else [])]
    see = f"tail {_quote(logs)}/*/stderr.log" if evidence_file is None else f"less {_quote(evidence_file)}"
    return [f"the output of all workers: {_quote(logs)}", *stacks, f"see it: {see}"]


def _quote(path: Path) -> str:
    return shlex.quote(str(path))


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _at_most(most: int, lines: Sequence[str], noun: str) -> list[str]:
    return [*lines[:most], *([f"and {len(lines) - most} more {noun}"] if len(lines) > most else [])]
