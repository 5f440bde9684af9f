"""USR1 ahead of the end: every worker gets it, all save in the same step, and with --requeue the run makes room."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from testbed.processes import run_dtrain, started_dtrain, wait_up
from testbed.typed import dtrain
from testbed.warm import HEADER

from launcher.job.attempt import AttemptState
from launcher.job.timers import Timers
from launcher.placement.placement import HostOffer, place
from launcher.protocol.two_way import Heartbeat

SCRIPT = (
    HEADER
    + """
import os, time
world = ddp.init()
checkpoint = ddp.Checkpoint("saved")
restored = checkpoint.load()
step = restored.step if restored else 0
before = step
while step < before + 1000:
    step += 1
    time.sleep(0.02 * (1 + world.rank))
    saves = checkpoint.due(step, every=0)
    if step == before + 2:
        print("up", flush=True)
    if saves:
        checkpoint.save(step)
        print("saved", step, "in attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        if not os.environ.get("GO_ON"):
            continue
        break
"""
)
# What SLURM says in the only node's batch script, where the job is started for the second time.
JOB = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1", "SLURM_RESTART_COUNT": "1"}


def _saved(text: str) -> list[str]:
    return re.findall(r"saved (\d+)", text)


def _scontrol(folder: Path, state: str = "RUNNING", *, refused: bool = False) -> dict[str, str]:
    """Return the environment of a job whose scontrol notes its arguments, and says that the job is in this state."""
    program = folder / "bin" / "scontrol"
    program.parent.mkdir()
    answer = "echo Access denied >&2; exit 1" if refused else f"echo JobId=41 JobState={state} Reason=None"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder / "told"}\n{answer}\n')
    program.chmod(0o755)
    return JOB | {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def _warned(
    folder: Path, script: str, *options: str, env: dict[str, str], signum: int | None = None
) -> tuple[int, str, str]:
    """Run a script until its workers are up, send USR1, and then another signal; return how the run ended."""
    (folder / "train.py").write_text(script)
    with started_dtrain("run", *options, "train.py", cwd=folder, env=env) as process:
        wait_up(process, 2 if "--nproc-per-node" in options else 1)
        process.send_signal(signal.SIGUSR1)
        if signum is not None:
            assert b"warned" in process.stdout.readline()
            process.send_signal(signum)
        out, err = process.communicate(timeout=60)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.usefixtures("warm")
def test_all_ranks_save_in_the_same_step_and_go_on(tmp_path: Path) -> None:
    env = {"GO_ON": "1", "OMP_NUM_THREADS": "1"}
    code, out, err = _warned(tmp_path, SCRIPT, "--nproc-per-node", "2", env=env)
    assert code == 0, (out, err)
    saved = _saved(out)
    assert (len(saved), len(set(saved))) == (2, 1)


@pytest.mark.parametrize("refused", [False, True])
def test_a_job_that_has_saved_is_queued_again(tmp_path: Path, refused: bool) -> None:
    env = _scontrol(tmp_path, refused=refused) | {"OMP_NUM_THREADS": "1"}
    code, out, err = _warned(tmp_path, SCRIPT, "--nproc-per-node", "2", "--requeue", env=env)
    assert code == 75, (out, err)
    assert len(re.findall(r"saved \d+ in attempt 1\n", out)) == 2
    assert (tmp_path / "told").read_text() == "requeue 41\n"
    assert "to make room (USR1, --requeue); exit code 75" in err
    assert "requeueing the job" in err
    assert ("`scontrol requeue 41` failed: Access denied" in err) is refused
    assert (tmp_path / "runs" / "slurm-41" / "attempt_1" / "0").is_dir()
    assert list((tmp_path / "saved").glob("step-*.pt"))


HEARS = """\
import signal, sys, time
seen = []
def hear(*_):
    seen.append(1)
    {}
signal.signal(signal.SIGUSR1, hear)
print('up', flush=True)
while not seen or {}: time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("script", "code", "requeued"),
    [
        (HEARS.format("sys.exit(75)", True), 75, True),
        (HEARS.format("sys.exit(3)", True), 3, False),
        (HEARS.format("1 / 0", True), 1, False),
        (HEARS.format("pass", False), 0, False),  # it finishes in time
        ("import time\nprint('up', flush=True)\ntime.sleep(60)", 75, True),  # the signal kills it
    ],
    ids=["75", "exit code", "exception", "success", "killed"],
)
def test_what_a_worker_does_after_the_warning_decides(tmp_path: Path, script: str, code: int, requeued: bool) -> None:
    found, _, err = _warned(tmp_path, script, "--requeue", env=_scontrol(tmp_path))
    assert (found, (tmp_path / "told").exists()) == (code, requeued), err
    is_killed = "USR1 killed its workers, which do not handle it: only what they saved before remains" in err
    assert is_killed == ("hear" not in script)


@pytest.mark.parametrize(
    ("signum", "state", "code", "requeued"),
    [
        (signal.SIGINT, "RUNNING", 130, False),
        (signal.SIGTERM, "CANCELLED", 143, False),
        (signal.SIGTERM, "TIMEOUT", 75, True),
    ],
)
def test_who_cancels_after_the_warning_has_cancelled(
    tmp_path: Path, signum: int, state: str, code: int, requeued: bool
) -> None:
    script = HEARS.format("print('warned', flush=True)", True)
    found, _, err = _warned(tmp_path, script, "--requeue", env=_scontrol(tmp_path, state), signum=signum)
    assert found == code, err
    reported = (tmp_path / "told").read_text() if (tmp_path / "told").exists() else ""
    assert ("requeue 41" in reported) is requeued


def test_attempts_of_earlier_lives_are_counted_on(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import os\nprint('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'])")
    run = tmp_path / "runs" / "slurm-41"
    (run / "attempt_4").mkdir(parents=True)
    for name in ("attempt_0.bak", "attempt_7", "attempt_8x"):  # not ours: a copy, a file, another name
        (run / name).write_text("")
    result = run_dtrain("run", "--requeue", "show.py", cwd=tmp_path, env=JOB)
    assert "attempt 5" in result.stdout, result


def test_the_record_of_earlier_lives_stays(own_runs: Path) -> None:
    (own_runs / "show.py").write_text("import os\nprint('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'])")
    for count in ("0", "1"):
        result = run_dtrain("run", "--requeue", "show.py", env=JOB | {"SLURM_RESTART_COUNT": count})
        assert f"attempt {count}" in result.stdout, result
    attempts = json.loads(Path("runs/slurm-41/run.json").read_text())["attempts"]
    assert [attempt["number"] for attempt in attempts] == [0, 1]
    said = dtrain("logs", "slurm-41").stdout
    assert said.splitlines() == ["[n1:0] attempt 0", "[n1:0] attempt 1"]


def test_only_more_checkpoints_than_before_count_as_saved() -> None:
    offers = [HostOffer(name, 1, (), False, "CUDA_VISIBLE_DEVICES", (0,), 1) for name in "ab"]
    attempt = AttemptState(0, ("a", "b"), place(offers, nproc=None), Timers(), began=0.0)

    def more(host: str, saved: int) -> bool:
        return attempt.take_heartbeat(host, Heartbeat(0.0, saved=saved), 1.0)

    assert [more("a", saved) for saved in (0, 1, 1, 2)] == [False, True, False, True]
    assert more("b", 0) is False
