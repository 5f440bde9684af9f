"""`dtrain replay` makes steps of an earlier run again in one process; `dtrain diff` compares the ledgers of two runs.

A replay is a run of its own, in the foreground, of the same script with the same arguments. What it begins with, where
it ends and where it saves is in DTRAIN_REPLAY_PLAN, which `ddp` reads (ddp/data/replay.py). Its ledger is compared
with the run's as it arrives.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.cli.caller import Caller, Verbosity
from launcher.cli.control import control
from launcher.cli.options import Options
from launcher.cli.request import Request, check_here, read_request
from launcher.cli.runs.rerun import prepare_rerun
from launcher.errors import RunError, UsageError
from launcher.job.ending import Outcome
from launcher.job.failures.failure import Failure, FailureKind
from launcher.machine.packages import version_of
from launcher.runs.housekeeping import Limits, hold
from launcher.runs.ledger import Comparison, Ledger, parsed, read_ledger, snapshots, step_of
from launcher.runs.record import read_manifest
from launcher.runs.registry import Entry, choose, entries

PREFIX = "replay-"
# Options of the run that say what it did; the others say where, how often and for whom.
_KEPT = (
    "module", "no_python", "export", "workdir", "python", "setup", "launch_prefix", "agent_prefix", "start_method",
    "ssh_config", "ssh_command", "accept_new_host_keys", "interface", "gpus_per_proc", "oversubscribe", "numa_binding",
    "on_nonfinite", "flight_recorder", "start_timeout_s", "grace_s", "log_dir", "env_for", "pass_local_rank",
    "virtual_local_rank", "run_path", "sync", "command", "as_torchrun",
)  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """What the user wants to see; `step` is None for where the run ended."""

    step: int | None
    micro_batch: int | None
    pdb: bool
    nproc: str
    on: str | None


def run_of(word: str) -> Entry:
    """Return a run; `last` is the last that is no replay. Raises RunError."""
    return choose(word, [each for each in entries() if word != "last" or not each.run_id.startswith(PREFIX)])


def diff_runs(words: tuple[str, str], *, as_json: bool) -> int:
    """Print the first step at which two runs, or two ledgers, differ; return 0 if none does, else 1."""
    try:
        there, here = (read_ledger(Path(w if os.path.isfile(w) else run_of(w).folder)) for w in words)
    except RunError as error:  # 1 would mean that they differ
        raise UsageError(str(error)) from error
    compared = Comparison()
    for number in there.steps:
        if (then := there.step(number)) and (now := here.step(number)) and compared.add(then, now):
            break
    loaders, found = _unequal(there.loader, here.loader), compared.difference
    if not compared.steps and found is None:
        ranges = (f"steps {each.steps[0]} to {each.steps[-1]}" if each.steps else "no step" for each in (there, here))
        raise UsageError(f"nothing in them can be compared: one has {', the other '.join(ranges)}")
    if as_json:
        first = None if found is None else vars(found)
        about = {"by_bits": not compared.by_loss, "hashes": compared.hashes, "equal": compared.steps}
        print(json.dumps({"loader": loaders, "first": first, **about}, indent=2))
    else:
        lines = [f"{name}: {then_is} and {now_is}" for name, (then_is, now_is) in loaders.items()]
        print(*lines, compared, *([] if found is None else [f"they differ at {found}"]), sep="\n")
    return int(found is not None)


def replay_run(
    word: str, wanted: Wanted, *, any_commit: bool, parse: Callable[..., Options], say: Callable[[str], None]
) -> int:
    """Replay a run to a step, or to where it ended; return the exit code. `parse` makes Options of arguments.

    Blocks; call from the main thread only.
    """
    entry = run_of(word)
    manifest, ledger = read_manifest(entry), read_ledger(Path(entry.folder))
    step = _last_step(wanted, ledger, entry.run_id, manifest.get("outcome") or {})
    again = prepare_rerun(entry, (), any_commit=any_commit, say=say)
    os.environ.update(again.variables)
    given = parse(again.argv, as_torchrun=again.as_torchrun)
    run_id = f"{PREFIX}{entry.run_id[:100]}-{os.urandom(2).hex()}"
    folder = Path(given.log_dir).absolute() / run_id
    begins, name, path = _newest(ledger, Path(entry.folder), step)
    lost = f"the state with which the run began, at step {ledger.first}, is gone" if begins < ledger.first else ""
    with nullcontext(path) if path is None or wanted.on else _pinned(path, folder) as pinned:
        plan = {
            "step": None if wanted.pdb and wanted.step is None else step,
            "micro_batch": wanted.micro_batch or 0,
            "pdb": wanted.pdb,
            "checkpoint": None,
            "state": None,
            name: pinned and str(pinned),
            "folder": str(folder / "checkpoints"),
            "threads": ledger.machine.get("threads"),
        }
        options = _options(given, wanted, plan, run_id)
        request = read_request(options)
        check_here(request.spec)
        if not any(host.remote for host in request.spec.hosts):
            request = replace(request, spec=replace(request.spec, sync=()))
        facts = [*filter(None, [again.code, lost]), *_differs(manifest, request)]
        replay = Replay(entry.run_id, ledger, manifest, facts)
        say(f"replay of run {entry.run_id} to step {step}, from step {begins}: {path or lost or 'its beginning'}")
        caller = Caller([*again.argv], read_ledger=replay.read)
        with hold(request.spec.log_dir, run_id):
            ended = control(request, options, Limits(None, None), Verbosity(False, False, False, say, None), caller)
    text, exit_code = replay.verdict(ended.outcome, wanted.step)
    say(text)
    return exit_code


def _last_step(wanted: Wanted, ledger: Ledger, run_id: str, outcome: Mapping[str, Any]) -> int:
    """Return the last step to make. Raises UsageError for one that the run did not have.

    A run that failed ended in the step of the rank that failed. If that is not known, it is the one after the last
    line: a step that fails has none.
    """
    has_failed = outcome.get("exit_code") != 0
    failed_in: int | None = (outcome.get("cause") or {}).get("step") if has_failed else None
    last = failed_in or ledger.last + has_failed
    most = max(last, max(ledger.steps, default=0) + has_failed)
    if wanted.step is not None and not ledger.first <= wanted.step <= most:
        raise UsageError(f"--step is {wanted.step}; run {run_id} had the steps {ledger.first} to {most}")
    if wanted.micro_batch is not None:
        if wanted.step is None or not wanted.pdb:
            raise UsageError("--micro-batch names a place in a step: add --step N and --pdb")
        then = ledger.step(wanted.step)  # the last step of an epoch may have fewer
        each = int(ledger.loader.get("micro_batches", 1)) if then is None else then.micro_batches
        if not 0 <= wanted.micro_batch < each:
            raise UsageError(f"--micro-batch is {wanted.micro_batch}; this step of run {run_id} had 0 to {each - 1}")
    return last if wanted.step is None else wanted.step


def _newest(ledger: Ledger, folder: Path, step: int) -> tuple[int, str, Path | None]:
    """Return the newest file with which the step can be made again: the step it begins with, its key in the plan."""
    saved = [(last + 1, "checkpoint", Path(path)) for path, last in ledger.checkpoints.items()]
    saved += [(last + 1, "state", path) for last, path in snapshots(folder).items()]
    there = [each for each in saved if each[0] <= step and each[2].exists()]
    return max(there, default=(1, "checkpoint", None), key=lambda each: each[0])


@contextmanager
def _pinned(path: Path, folder: Path) -> Iterator[Path]:
    """Link a file into the replay's folder, since the run may remove it (`keep=`); yield the path to use."""
    pins = folder / "pinned"
    pins.mkdir(parents=True)
    try:
        with suppress(OSError):  # it is a folder, or on another file system
            os.link(path, pins / path.name)
        yield next(pins.iterdir(), path)
    finally:
        shutil.rmtree(pins, ignore_errors=True)
        with suppress(OSError):
            folder.rmdir()  # if nothing was started


def _options(given: Options, wanted: Wanted, plan: Mapping[str, Any], run_id: str) -> Options:
    kept: dict[str, Any] = {name: getattr(given, name) for name in _KEPT}
    if not wanted.on and given.python and "/" in given.python and not os.path.exists(given.python):
        kept["python"] = None  # that of other hosts
    kept["export"] = (*given.export, "DTRAIN_REPLAY=1", f"DTRAIN_REPLAY_PLAN={json.dumps(plan)}")
    origins = tuple((name, origin) for name, origin in given.origins if name in _KEPT)
    where: dict[str, Any] = {"hosts": wanted.on, "standalone": wanted.on is None}
    return Options(**kept, **where, nproc_per_node=wanted.nproc, run_id=run_id, origins=origins)


def _differs(manifest: Mapping[str, Any], request: Request) -> list[str]:
    """Return how versions and Python differ from those of the run."""
    names = manifest["versions"]
    then = {**names, "Python": manifest["python"], "dtrain": manifest["dtrain"]}
    now = {**{name: version_of(name) for name in names}, "Python": request.spec.python, "dtrain": __version__}
    return _lines(_unequal(then, now))


def _unequal(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (then[name], now.get(name)) for name in then if then[name] != now.get(name)}


def _lines(unequal: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [f"{name} was {then}, here it is {now}" for name, (then, now) in unequal.items()]


class Replay:
    """Compares the ledger of a replay with that of its run; `facts` are other differences, known before."""

    def __init__(self, run_id: str, ledger: Ledger, manifest: Mapping[str, Any], facts: Sequence[str]) -> None:
        self._run_id = run_id
        self._ledger = ledger
        self._recorded = (manifest["outcome"] or {}).get("cause") or {}
        self._facts = facts
        self._has_git = manifest["git"] is not None
        self._here = Ledger()
        self._compared = Comparison()
        self._reached = 0  # the newest step
        self._rest: dict[int, bytes] = {}  # by rank, an unfinished line

    def read(self, rank: int, data: bytes) -> list[str]:
        """Take bytes of a ledger; return what the user should see of them. Called in the thread of the output."""
        *lines, self._rest[rank] = (self._rest.get(rank, b"") + data).split(b"\n")
        return [f"replay: {text}" for line in lines for text in self._read(parsed(line))]

    def _read(self, found: Mapping[str, Any]) -> list[str]:
        if next(iter(found), "") == "stopped":
            self._reached = found["stopped"]
            return [f"before micro-batch {found.get('micro_batch')} of step {self._reached}; {self._compared}"]
        if next(iter(found), "") != "step" or (now := step_of(found, self._here.machine)) is None:
            self._here.note(found)
            return []
        self._reached = now.number
        then = self._ledger.step(now.number)
        if then is None or (different := self._compared.add(then, now)) is None:
            return []
        loader, machine = self._ledger.loader, self._ledger.machine
        facts = [*self._facts, *_lines(_unequal(loader, self._here.loader) | _unequal(machine, self._here.machine))]
        return [f"not as in run {self._run_id}: {different}", *(facts or [self._equal()])]

    def _equal(self) -> str:
        equal = "versions and the number of samples are as they were"
        return f"commit, {equal}" if self._has_git else f"{equal}; the code is in no git repository"

    def verdict(self, outcome: Outcome, step: int | None) -> tuple[str, int]:
        """Return the last line and the exit code; `step` is the one that was to be reached."""
        cause, differs = outcome.cause, self._compared.difference
        text = f"replay: {self._compared}" + ("" if differs is None else f"; not as in run {self._run_id}: {differs}")
        if cause is not None and cause.kind is FailureKind.RAISED:
            return f"{text}; {self._is_recorded(cause)}", outcome.exit_code
        if outcome.exit_code != 0:
            return text, outcome.exit_code
        if step is not None and self._reached < step:
            return f"{text}; the script ended before step {step}", 1
        return text, int(differs is not None)

    def _is_recorded(self, cause: Failure) -> str:
        """Compare an exception with the recorded one: its type and place."""
        raised, then = f"{cause.error_type} at {cause.where}", self._recorded
        if then.get("kind") != FailureKind.RAISED.value:
            return f"{raised}; run {self._run_id} has recorded no exception"
        recorded = f"{then['error_type']} at {then['where']}"
        if recorded == raised:
            return f"the recorded exception came again: {raised}"
        return f"{raised}; run {self._run_id} has recorded {recorded}"
