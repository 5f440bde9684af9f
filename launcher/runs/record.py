"""The record of one run: its manifest, `run.json` in the run's folder, and the answer to `dtrain ps`.

    version         1; incremented when a key changes its meaning or is removed
    run_id, dtrain, state
                    state: "starting", "running", "restarting", "stopping", and at the end as `ended` in outcome
    command         {as_torchrun, words: the arguments of `dtrain run`, script: how many of them are SCRIPT [ARGS],
                    folder: where it was typed, is_function: by launcher.launch(), of SCRIPT}; secret values are `***`
    options         {name: {value, from, text}} of all that are not at their default; from: "command line", or the name
                    of the variable or file; text: the variable's, else null
    workdir, python of the workers
    controller      {host, pid, start: in clock ticks since boot}
    versions        {name: version} of packages installed here
    git             {commit, clean, untracked, diff_file, diff_too_large}, null if workdir is not in a repository
    hosts           names of all hosts given to the run
    attempts        [{number, began, ended, hosts, world_size, workers: [[rank, host, local rank, GPUs]], cause}], with
                    those of earlier starts of a SLURM job; where hosts were lost or came meanwhile, hosts and
                    world_size are the newest, and workers has each rank that was, where it was last
    began, ended    seconds since the epoch
    outcome         null until the run has ended, then as --error-json (output/error_json.py)
    report          null until the run has ended, then the final report, as in report.txt; its paths are absolute

It is written when the hosts are ready, at each attempt, when its hosts change and at the end, each time replacing the
previous one. A run that could not start leaves no folder.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import __version__
from launcher.job.attempt import AttemptState
from launcher.job.ending import why_failed
from launcher.job.job import Job
from launcher.job.run import Phase
from launcher.machine.packages import installed
from launcher.placement.job_spec import JobSpec
from launcher.runs.housekeeping import MANIFEST, Limits, remove_oldest
from launcher.runs.overview import Overview
from launcher.runs.registry import Entry

if TYPE_CHECKING:
    from launcher.runs.git import Git

VERSION = 1
SAMPLE_S = 1.0  # interval of samples of the step
RATE_S = 30.0  # window of the step rate
END_S = 2.0  # for the query of the repository, at the end of a run
_PACKAGES = ("torch", "numpy")
_DIFF = "uncommitted.diff"

Content = Mapping[str, Any]


def read_manifest(entry: Entry) -> Content:
    """Return the manifest of a run; empty if it is missing, or belongs to another run of the same name."""
    content = _read(Path(entry.folder))
    controller = content.get("controller") or {}
    return content if (controller.get("pid"), controller.get("start")) == (entry.pid, entry.start) else {}


def _read(folder: Path) -> Content:
    """Return the manifest in a folder; empty if it cannot be read."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and content.get("version") == VERSION else {}


def _earlier_attempts(spec: JobSpec, folder: Path) -> list[Content]:
    """Return the attempts of earlier starts of the job, which have left their record in the run's folder."""
    content = _read(folder) if spec.first_attempt else {}
    attempts = content.get("attempts", []) if content.get("run_id") == spec.run_id else []
    return [attempt for attempt in attempts if attempt["number"] < spec.first_attempt]


class RunRecord:
    """The record. `keep` writes the manifest, in another thread; `on_start` is called once all workers have started."""

    def __init__(
        self, spec: JobSpec, about: Content, *, folder: Path, limits: Limits,
        keep: Callable[[Content], None], on_start: Callable[[], None], overview: Overview,
    ) -> None:  # fmt: skip
        self.state = "starting"
        self._spec = spec
        self._folder = folder
        self._limits = limits
        self._keep = keep
        self._on_start = on_start
        self._overview = overview
        self._began = time.time()
        self._attempt: AttemptState | None = None
        self._attempts = _earlier_attempts(spec, folder)
        self._members: tuple[str, ...] = ()  # of the attempt, as they are recorded
        self._taken_in = 0  # its workers that are recorded
        self._has_started = False
        self._samples: deque[tuple[float, int]] = deque()  # time, steps
        self._next_sample = 0.0
        self._git: Git | None = None
        self._slow = threading.Thread(target=self._find_slow_facts, name="record", daemon=True)
        self._lock = threading.Lock()
        self._content: dict[str, Any] = {
            "version": VERSION,
            "run_id": spec.run_id,
            "dtrain": __version__,
            **about,
            "workdir": str(spec.workdir),
            "python": spec.python,
            "versions": {},
            "git": None,
            "hosts": [host.name for host in spec.hosts],
            "began": self._began,
            "ended": None,
            "outcome": None,
            "report": None,
        }

    def watch(self, job: Job) -> None:
        """Record what has changed; the loop calls it after each event, so it must be fast."""
        attempt = job.attempt
        if attempt is not self._attempt:
            self._start_attempt(attempt)
        elif attempt is not None and self._has_changed(attempt):
            self._attempts[-1] = {**self._attempts[-1], **self._made_up_of(attempt)}
            self._write()
        elif not self._has_started and attempt is not None and job.phase is Phase.RUNNING and attempt.all_started:
            self._has_started = True
            self.state = "running"
            self._look_at_code()
            self._on_start()
        if attempt is not None and (now := time.monotonic()) >= self._next_sample:
            self._next_sample = now + SAMPLE_S
            if steps := attempt.steps:  # asks every host
                self._samples.append((now, steps))
                while now - self._samples[0][0] > RATE_S:
                    self._samples.popleft()

    def status(self, job: Job, now: float, *, in_full: bool) -> Content:
        """Return how far the run is; `in_full`: with every host and rank. Call in the loop."""
        attempt = job.attempt
        if job.phase is Phase.STOPPING:
            self.state = "stopping"
        elif attempt is not None and self._has_started:
            self.state = "running" if job.phase is Phase.RUNNING and attempt.all_started else "restarting"
        goodput = self._overview.goodput(now)
        return {
            "state": self.state,
            "waits_for": job.progress,
            "hosts": len(job.fleet) if attempt is None else len(attempt.members),
            "workers": None if attempt is None else attempt.world_size,
            "attempt": None if attempt is None else attempt.number,
            "step": None if attempt is None else attempt.steps,
            "steps_per_s": self.steps_per_s,
            "goodput": None if goodput is None else round(goodput, 4),
            **(self._overview.table(attempt, now) if in_full else {}),
        }

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second over the last half minute."""
        if len(self._samples) < 2:
            return None
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        return round((last - first) / (last_at - first_at), 3)

    def end(self, outcome: Content | None, state: str, report: str) -> None:
        """Record the end; `outcome` is as for --error-json. Slow facts follow in `finish`."""
        if self._attempt is None:
            return
        self._look_at_code()
        self._end_attempt()
        self.state = state
        with self._lock:
            self._content |= {"ended": time.time(), "outcome": outcome, "report": report}
        self._write()

    def finish(self) -> None:
        """Wait briefly for the state of the code, then remove old runs. Blocks; an exception may end it early."""
        if self._attempt is None:
            return
        try:
            self._slow.join(END_S)
        finally:
            if self._git is not None:
                self._git.end()
        self._slow.join(END_S)
        self._write()
        if self._limits:
            remove_oldest(self._folder.parent, self._limits, own=self._folder.name)

    def _start_attempt(self, attempt: AttemptState | None) -> None:
        self._end_attempt()
        self._attempt = attempt
        self._samples.clear()
        if attempt is None:
            return
        self._attempts.append(
            {
                "number": attempt.number,
                "began": time.time(),
                "ended": None,
                **self._made_up_of(attempt),
                "cause": None,
            }
        )
        self._write()

    def _has_changed(self, attempt: AttemptState) -> bool:
        """Return whether the attempt has other hosts or workers than are recorded."""
        return attempt.members is not self._members or attempt.ranks.taken_in != self._taken_in

    def _made_up_of(self, attempt: AttemptState) -> Content:
        """Return the hosts and workers of the attempt, to record them."""
        self._members, self._taken_in = attempt.members, attempt.ranks.taken_in
        return {
            "hosts": list(attempt.members),
            "world_size": attempt.world_size,
            "workers": [[w.rank, w.host, w.local_rank, list(w.gpus)] for w in attempt.ranks.places],
        }

    def _end_attempt(self) -> None:
        if self._attempt is None:
            return
        how = why_failed(self._attempt) or None
        self._attempts[-1] = {**self._attempts[-1], "ended": time.time(), "cause": how}

    def _write(self) -> None:
        with self._lock:  # until it is written: older content must not replace it
            self._keep({**self._content, "state": self.state, "attempts": [*self._attempts]})

    def _look_at_code(self) -> None:
        if self._slow.ident is None:
            self._slow.start()

    def _find_slow_facts(self) -> None:
        """Collect facts that take long to find, while the workers run."""
        versions = installed(_PACKAGES)
        git = None
        if _in_repository(self._spec.workdir):
            from launcher.runs.git import Git, write_diff

            self._git = Git(self._spec.workdir)
            if (state := self._git.look()) is not None:
                kept = write_diff(self._folder / _DIFF, state)
                git = state.as_json(_DIFF if kept else None)
        with self._lock:
            self._content |= {"versions": versions, "git": git}
        if self._limits:
            remove_oldest(self._folder.parent, self._limits, own=self._folder.name)
        self._write()


def _in_repository(folder: Path) -> bool:
    return any(os.path.exists(above / ".git") for above in (folder, *folder.parents))
