"""The global batch of a plain loader stays what it was while hosts are lost and come back. Real sshd."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from testbed.processes import run_dtrain, started_dtrain
from testbed.sshd import SshHosts
from testbed.training_seen import TrainingSeen

SCRIPT = Path(__file__).parents[2] / "ddp_worlds" / "kept_batch_script.py"
EPOCHS = "20"


def passes(output: str) -> dict[tuple[int, str], float]:
    """The loss of each micro-batch, by step and samples; where a step was made again, or a pass is spare, the same."""
    found: dict[tuple[int, str], float] = {}
    for step, samples, loss in re.findall(r"\] pass (\d+) (\S+) (\S+)$", output, re.MULTILINE):
        assert found.setdefault((int(step), samples), float(loss)) == pytest.approx(float(loss), rel=1e-9)
    return found


def await_size(seen: TrainingSeen, ranks: int) -> None:
    """Wait until so many ranks have made some steps."""
    seen.wait(lambda: len(seen.sized(ranks)) > 2 * ranks + 2)


@pytest.mark.usefixtures("warm")  # for the run without hosts
@pytest.mark.parametrize("ranks", [3, 4])
def test_steps_and_losses_are_those_of_a_run_that_never_shrank(ssh_hosts: SshHosts, tmp_path: Path, ranks: int) -> None:
    """Three ranks become two, or four three and two; one of these is killed, and then all are there again.

    70 samples in batches of 4: the last ones of an epoch are short.
    """
    names = [f"node{number}" for number in range(1, ranks + 1)]
    argv = [
        "run", "--ssh-config", str(ssh_hosts.ssh_config), "--nproc-per-node", "1", "--heartbeat-timeout-s", "3",
        "--hosts", ",".join(names), "--nnodes", f"1:{ranks}", "--max-restarts", "3", str(SCRIPT), EPOCHS, "0.25",
    ]  # fmt: skip
    with started_dtrain(*argv, cwd=tmp_path) as process:
        seen = TrainingSeen(process)
        seen.wait(lambda: len(seen.sized(ranks)) > 5 * ranks)
        for number in range(ranks, 2, -1):
            ssh_hosts.stop(number)
            await_size(seen, number - 1)
        victim = seen.sized(2)[-1]
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        seen.wait(lambda: any(at.host == victim.host and at.pid != victim.pid for at in seen.commits))
        for number in range(3, ranks + 1):
            ssh_hosts.start(number)
        seen.wait(lambda: seen.sized(ranks, after=killed))
        (tmp_path / "quick").touch()
        stderr = seen.end_well()
    assert "attempt 1" not in stderr, stderr
    plain = run_dtrain(
        "run", "--nproc-per-node", f"{ranks}", SCRIPT, EPOCHS, "0", cwd=tmp_path, env={"DTRAIN_BACKEND": "gloo"}
    )  # fmt: skip
    assert plain.returncode == 0, plain
    expected, found = passes(plain.stdout), passes(seen.output)
    assert found.keys() <= expected.keys(), "the same samples in each step, each of them in one micro-batch"
    assert len(expected) - len(found) <= ranks - 2, "the last line of each host that was lost may not have come"
    assert found == pytest.approx({key: expected[key] for key in found}, rel=1e-9)
    (result,), (undisturbed,) = seen.said("result"), {*re.findall(r"\] result (.*)$", plain.stdout, re.MULTILINE)}
    assert [*map(float, result.split())] == pytest.approx([*map(float, undisturbed.split())], rel=1e-9)
