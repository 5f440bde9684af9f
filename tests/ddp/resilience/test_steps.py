"""Steps of ddp.StepLoader have the bits of an undisturbed run, while ranks fail, and hosts are lost and come back."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.once import once
from testbed.processes import LEASE, run_dtrain
from testbed.sshd import SshHosts
from testbed.training_seen import TrainingSeen, training

SCRIPT = Path(__file__).parents[2] / "programs" / "step_loader_script.py"
EPOCHS = "20"


Alone = Callable[[str], set[str]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The result of one rank after some epochs: the number of steps, and a digest of parameters, buffers and losses."""

    def result(epochs: str) -> set[str]:
        def run() -> list[str]:
            output = run_dtrain("run", SCRIPT, epochs, "0", cwd=tmp_path_factory.mktemp("alone")).stdout
            return re.findall(r"\] result (.*)$", output, re.MULTILINE)

        return {*once(tmp_path_factory, f"{epochs} epochs of steps", run)}

    return result


def kill_one(seen: TrainingSeen, rank: int) -> None:
    """Kill a rank after some more steps, and wait until it trains again."""
    before = len(seen.commits)
    seen.wait(lambda: len(seen.commits) > before + 12)
    victim = next(at for at in reversed(seen.commits) if at.rank == rank)
    os.kill(victim.pid, signal.SIGKILL)
    seen.wait(lambda: any(at.rank == rank and at.pid != victim.pid for at in seen.commits))


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_killed_ranks_change_no_bit(tmp_path: Path, alone: Alone, backend: str) -> None:
    options = ["--nproc-per-node", "3", "--max-restarts", "3"]
    env = {"DTRAIN_BACKEND": backend}
    with training("run", *options, str(SCRIPT), EPOCHS, "0.1", cwd=tmp_path, env=env) as seen:
        kill_one(seen, 2)
        kill_one(seen, 0)
    assert seen.stderr.count("only this worker restarts") == 2, seen.stderr
    assert seen.said("result") == alone(EPOCHS)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("rank_and_step", ["0.6", "1.14"])
def test_a_rank_that_dies_before_its_commit_changes_no_bit(tmp_path: Path, alone: Alone, rank_and_step: str) -> None:
    """Rank 0 of three, whose buffers count, and which has had two micro-batches; another in the last step."""
    options = ["--nproc-per-node", "3", "--max-restarts", "1"]
    result = run_dtrain("run", *options, SCRIPT, "3", "0", rank_and_step, cwd=tmp_path)
    assert result.stderr.count("only this worker restarts") == 1, result
    assert {*re.findall(r"\] result (.*)$", result.stdout, re.MULTILINE)} == alone("3")


def test_lost_hosts_change_no_bit(ssh_hosts: SshHosts, tmp_path: Path, alone: Alone) -> None:
    """Three ranks become two, one of these is killed, and then all are there again; four micro-batches a step."""
    argv = [
        "run", "--ssh-config", str(ssh_hosts.ssh_config), "--nproc-per-node", "1", *LEASE,
        "--hosts", "node1,node2,node3", "--nnodes", "1:3", "--max-restarts", "3",
        str(SCRIPT), EPOCHS, "0.25",
    ]  # fmt: skip
    with training(*argv, cwd=tmp_path) as seen:
        seen.wait(lambda: len(seen.sized(3)) > 15)
        ssh_hosts.stop(3)
        seen.wait(lambda: len(seen.sized(2)) > 6)
        victim = seen.sized(2)[-1]
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        seen.wait(lambda: any(at.host == victim.host and at.pid != victim.pid for at in seen.commits))
        ssh_hosts.start(3)
        seen.wait(lambda: seen.sized(3, after=killed))
    assert "attempt 1" not in seen.stderr, seen.stderr
    assert seen.said("result") == alone(EPOCHS)
