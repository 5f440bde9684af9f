"""A training that is hit goes on by itself, to the losses that it would have had: the GPT example under dtrain."""

import random
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from testbed import REPOSITORY
from testbed.once import once
from testbed.present import present
from testbed.processes import LEASE, Program, run_dtrain, started_dtrain
from testbed.resumes import assert_resumes
from testbed.sshd import SshHosts

GPT = REPOSITORY / "scripts/examples/train_gpt.py"
# 99 blocks for training: 40 steps of 8 go on into a fourth epoch.
SMALL = shlex.split(
    "--layers 1 --width 32 --heads 2 --block-size 32 --text-kb 4 --eval-blocks 25 --batch-size 8 --steps 40 "
    "--warmup-steps 5 --log-every 1 --eval-every 10 --sample-length 9 --checkpoint-every 3 --out out/gpt.pt"
)
# Runs the example, whose rank 0 stands still in the first attempt once it has shown this step.
HELD = """\
import builtins, os, re, runpy, sys, time
import torch, ddp
_, at, *sys.argv = sys.argv
show = builtins.print

def show_and_stop(*texts, **options):
    show(*texts, **options)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and re.match(rf"step +{at}  loss", str(texts[0])):
        time.sleep(600)

builtins.print = show_and_stop
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Half a batch and half a batch are summed in another order than the whole; see test_examples.py.
TOLERANCE = 1.01e-4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def run() -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        result = run_dtrain("run", "--nproc-per-node", "2", GPT, *SMALL, cwd=folder)
        assert result.returncode == 0, result.stderr
        (folder / "stdout").write_text(result.stdout)
        return folder

    return once(tmp_path_factory, "undisturbed", run)


def test_a_killed_worker_changes_no_bit(undisturbed: Path, tmp_path: Path) -> None:
    chance = random.Random(3)
    step, victim = chance.randrange(5, 35), chance.randrange(2)
    (tmp_path / "held.py").write_text(HELD)
    options = ["--nproc-per-node", "2", "--max-restarts", "1"]
    with started_dtrain("run", *options, "held.py", str(step), str(GPT), *SMALL, cwd=tmp_path) as process:
        before = _read_until(process, rf"step +{step}  loss")
        (worker,) = [p for p in psutil.Process(process.pid).children(recursive=True) if _rank(p) == str(victim)]
        worker.kill()
        stdout, stderr = process.communicate(timeout=60)
    after = stdout.decode()
    assert process.returncode == 0, stderr
    resumed = present(re.search(r"resuming after step (\d+)", after))
    assert int(resumed[1]) >= step - 2 * 3  # the last one may have been on its way to the disk
    assert {**_losses(before), **_losses(after)} == _losses((undisturbed / "stdout").read_text())
    # What was done twice gave the same both times.
    shared = _losses(before).keys() & _losses(after).keys()
    assert {s: _losses(before)[s] for s in shared} == {s: _losses(after)[s] for s in shared}
    ours, theirs = (torch.load(folder / "out/gpt.pt")["model"] for folder in (tmp_path, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_lost_host_and_a_smaller_world_give_the_same_losses(
    undisturbed: Path, ssh_hosts: SshHosts, tmp_path: Path
) -> None:
    hosts = ["--hosts", "node1,node2", "--nnodes", "1:2", "--ssh-config", str(ssh_hosts.ssh_config)]
    lease = [*LEASE, "--nproc-per-node", "1"]
    (tmp_path / "held.py").write_text(HELD)
    with started_dtrain("run", *hosts, *lease, "held.py", "17", str(GPT), *SMALL, cwd=tmp_path) as process:
        before = _read_until(process, r"step +17  loss")
        ssh_hosts.stop(1)  # rank 0 and the store were there
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    after = stdout.decode()
    assert re.search(r"resuming after step 1\d", after)
    assert "1 workers on cpu" in after
    assert {**_losses(before), **_losses(after)} == pytest.approx(
        _losses((undisturbed / "stdout").read_text()), abs=TOLERANCE, rel=0
    )
    ours, theirs = (torch.load(folder / "out/gpt.pt")["model"] for folder in (tmp_path, undisturbed))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-4)


@pytest.mark.timeout(400)
def test_a_script_in_nanogpt_s_form_resumes_after_a_restart(tmp_path: Path) -> None:
    assert_resumes("nanogpt", "6", "4", tmp_path)


def _read_until(process: Program, pattern: str) -> str:
    text = ""
    for line in _lines(process.stdout):
        text += line
        if re.search(pattern, line):
            return text
    raise AssertionError(f"it ended before {pattern!r}: {text}")


def _lines(stream: "Iterator[bytes]") -> Iterator[str]:
    for line in stream:
        yield line.decode()


def _losses(text: str) -> dict[str, float]:
    """`step loss` and `step validation loss` lines: kind and step -> loss."""
    found = re.findall(r"step +(\d+)  (loss|validation loss) ([0-9.]+)", text)
    return {f"{step} {kind}": float(loss) for step, kind, loss in found}


def _rank(process: psutil.Process) -> str | None:
    try:
        if "train_gpt.py" not in " ".join(process.cmdline()) or sys.executable not in process.cmdline()[0]:
            return None
        return process.environ().get("RANK")
    except (psutil.Error, OSError):
        return None
