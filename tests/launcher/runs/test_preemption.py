"""USR1 ahead of the end: every worker gets it, all save in the same step, and with --requeue the run makes room."""

import os
import re
import signal
from pathlib import Path

import pytest
from testbed.processes import run_dtrain, started_dtrain, wait_up
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


@pytest.mark.usefixtures("warm")
def test_all_ranks_save_in_the_same_step_and_go_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {"GO_ON": "1", "OMP_NUM_THREADS": "1"}
    with started_dtrain("run", "--nproc-per-node", "2", "train.py", cwd=tmp_path, env=env) as process:
        wait_up(process, 2)
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, (out, err)
    saved = _saved(out.decode())
    assert (len(saved), len(set(saved))) == (2, 1)


@pytest.mark.parametrize("refused", [False, True])
def test_a_job_that_has_saved_is_queued_again(tmp_path: Path, refused: bool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    reported = tmp_path / "told"
    env = _scontrol(tmp_path, refused=refused) | {"OMP_NUM_THREADS": "1"}
    with started_dtrain("run", "--nproc-per-node", "2", "--requeue", "train.py", cwd=tmp_path, env=env) as process:
        wait_up(process, 2)
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 75, (out, err)
    assert len(re.findall(r"saved \d+ in attempt 1\n", out.decode())) == 2
    assert reported.read_text() == "requeue 41\n"
    assert "to make room (USR1, --requeue); exit code 75" in err.decode()
    assert "requeueing the job" in err.decode()
    assert ("`scontrol requeue 41` failed: Access denied" in err.decode()) is refused
    assert (tmp_path / "runs" / "slurm-41" / "attempt_1" / "0").is_dir()
    assert list((tmp_path / "saved").glob("step-*.pt"))


def test_a_worker_that_the_signal_kills_has_the_job_queued_again(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)")
    env = {**JOB, "PATH": os.environ["PATH"]}
    with started_dtrain("run", "--requeue", "wait.py", cwd=tmp_path, env=env) as process:
        wait_up(process, 1)
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert b"USR1 killed its workers, which do not handle it: only what they saved before remains" in err


@pytest.mark.parametrize(
    ("reaction", "code", "requeued"), [("sys.exit(75)", 75, True), ("sys.exit(3)", 3, False), ("1 / 0", 1, False)]
)
def test_a_worker_that_fails_after_the_warning_has_failed(
    tmp_path: Path, reaction: str, code: int, requeued: bool
) -> None:
    (tmp_path / "end.py").write_text(
        f"import signal, sys, time\ndef hear(*_): {reaction}\nsignal.signal(signal.SIGUSR1, hear)\n"
        "print('up', flush=True)\nwhile True: time.sleep(0.01)\n"
    )
    with started_dtrain("run", "--requeue", "end.py", cwd=tmp_path, env=_scontrol(tmp_path)) as process:
        wait_up(process, 1)
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, (tmp_path / "told").exists()) == (code, requeued), err


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
    (tmp_path / "wait.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: print('warned', flush=True))\n"
        "print('up', flush=True)\nfor _ in range(6000): time.sleep(0.01)\n"
    )
    env = _scontrol(tmp_path, state)
    with started_dtrain("run", "--requeue", "wait.py", cwd=tmp_path, env=env) as process:
        wait_up(process, 1)
        process.send_signal(signal.SIGUSR1)
        assert b"warned" in process.stdout.readline()
        process.send_signal(signum)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
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


def test_a_run_that_finishes_in_time_is_not_queued_again(tmp_path: Path) -> None:
    (tmp_path / "end.py").write_text(
        "import signal, time\nseen = []\nsignal.signal(signal.SIGUSR1, lambda *_: seen.append(1))\n"
        "print('up', flush=True)\nwhile not seen: time.sleep(0.01)\n"
    )
    with started_dtrain("run", "--requeue", "end.py", cwd=tmp_path, env=JOB) as process:
        wait_up(process, 1)
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, b"queued" in err) == (0, False), err


def test_only_more_checkpoints_than_before_count_as_saved() -> None:
    offers = [HostOffer(name, 1, (), False, "CUDA_VISIBLE_DEVICES", (0,), 1) for name in "ab"]
    attempt = AttemptState(0, ("a", "b"), place(offers, nproc=None), Timers(), began=0.0)

    def more(host: str, saved: int) -> bool:
        return attempt.take_heartbeat(host, Heartbeat(0.0, saved=saved), 1.0)

    assert [more("a", saved) for saved in (0, 1, 1, 2)] == [False, True, False, True]
    assert more("b", 0) is False
