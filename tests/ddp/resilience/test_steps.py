"""Steps of ddp.StepLoader have the bits of an undisturbed run, while ranks fail, and hosts are lost and come back."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from testbed.processes import run_dtrain, started_dtrain
from testbed.sshd import SshHosts
from testbed.training_seen import TrainingSeen

SCRIPT = Path(__file__).parents[2] / "programs" / "step_loader_script.py"
EPOCHS = "20"


def alone(folder: Path) -> set[str]:
    """The result of one rank: the number of steps, and a digest of parameters, buffers and all losses."""
    output = run_dtrain("run", SCRIPT, EPOCHS, "0", cwd=folder).stdout
    return {*re.findall(r"\] result (.*)$", output, re.MULTILINE)}


def kill_one(seen: TrainingSeen, rank: int) -> None:
    """Kill a rank after some more steps, and wait until it trains again."""
    before = len(seen.commits)
    seen.wait(lambda: len(seen.commits) > before + 12)
    victim = next(at for at in reversed(seen.commits) if at.rank == rank)
    os.kill(victim.pid, signal.SIGKILL)
    seen.wait(lambda: any(at.rank == rank and at.pid != victim.pid for at in seen.commits))


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_killed_ranks_change_no_bit(tmp_path: Path, backend: str) -> None:
    options = ["--nproc-per-node", "3", "--max-restarts", "3"]
    env = {"DTRAIN_BACKEND": backend}
    with started_dtrain("run", *options, str(SCRIPT), EPOCHS, "0.1", cwd=tmp_path, env=env) as process:
        seen = TrainingSeen(process)
        kill_one(seen, 2)
        kill_one(seen, 0)
        (tmp_path / "quick").touch()
        stderr = seen.end_well()
    assert stderr.count("only this worker restarts") == 2, stderr
    assert seen.said("result") == alone(tmp_path)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("rank_and_step", ["0.6", "1.14"])
def test_a_rank_that_dies_between_its_gradients_and_its_commit_changes_no_bit(
    tmp_path: Path, rank_and_step: str
) -> None:
    """Rank 0 of three, whose buffers count, and which has had two micro-batches; another in the last step."""
    options = ["--nproc-per-node", "3", "--max-restarts", "1"]
    result = run_dtrain("run", *options, SCRIPT, "3", "0", rank_and_step, cwd=tmp_path)
    assert result.stderr.count("only this worker restarts") == 1, result
    plain = run_dtrain("run", SCRIPT, "3", "0", cwd=tmp_path)
    first, second = ({*re.findall(r"\] result (.*)$", each.stdout, re.MULTILINE)} for each in (result, plain))
    assert first == second


def test_lost_hosts_change_no_bit(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    """Three ranks become two, one of these is killed, and then all are there again; four micro-batches a step."""
    argv = [
        "run", "--ssh-config", str(ssh_hosts.ssh_config), "--nproc-per-node", "1", "--heartbeat-timeout-s", "3",
        "--hosts", "node1,node2,node3", "--nnodes", "1:3", "--max-restarts", "3",
        str(SCRIPT), EPOCHS, "0.25",
    ]  # fmt: skip
    with started_dtrain(*argv, cwd=tmp_path) as process:
        seen = TrainingSeen(process)
        seen.wait(lambda: len(seen.sized(3)) > 15)
        ssh_hosts.stop(3)
        seen.wait(lambda: len(seen.sized(2)) > 6)
        victim = seen.sized(2)[-1]
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        seen.wait(lambda: any(at.host == victim.host and at.pid != victim.pid for at in seen.commits))
        ssh_hosts.start(3)
        seen.wait(lambda: seen.sized(3, after=killed))
        (tmp_path / "quick").touch()
        stderr = seen.end_well()
    assert "attempt 1" not in stderr, stderr
    assert seen.said("result") == alone(tmp_path)
