"""A script that closes its process group right after its last collective ends, and ends well."""

from pathlib import Path

import pytest
from testbed.processes import run_dtrain
from testbed.warm import HEADER

# A thread of gloo gives the tensors of the last collectives back when the model drops the last reference to the group.
TRAINS = f"""{HEADER}
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(20):
        model(torch.randn(16, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    everyone = [torch.zeros(8) for _ in range(dist.get_world_size())]
    for _ in range(5):
        dist.all_gather(everyone, torch.ones(8))
    dist.destroy_process_group()

main()
print("ended")
"""
# Groups of some ranks come and go, as in a script that makes one for each phase.
MAKES_MANY = """
import os, time
import torch.distributed as dist
dist.init_process_group("gloo")

def make_and_close(times):
    for _ in range(times):
        group = dist.new_group([0, 1])
        dist.barrier(group)
        dist.destroy_process_group(group)

def descriptors(at_most=0):
    time.sleep(1.5)
    make_and_close(1)  # those that were closed more than a second ago go then
    deadline = time.monotonic() + 60
    while (now := len(os.listdir("/proc/self/fd"))) > at_most and time.monotonic() < deadline and at_most:
        time.sleep(0.1)
    return now

make_and_close(20)
before = descriptors()
make_and_close(40)
print("grew by", max(0, descriptors(before) - before))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("method", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
def test_a_group_closed_after_a_collective_does_not_hang(tmp_path: Path, method: str) -> None:
    (tmp_path / "script.py").write_text(TRAINS)
    for _ in range(3):
        words = ["--nproc-per-node", "2", "--start-method", "auto" if method == "fork" else "exec"]
        result = run_dtrain("run", *words, "script.py", cwd=tmp_path)
        assert result.returncode == 0, result
        assert result.stdout.count("ended") == 2


def test_groups_that_were_closed_some_time_ago_are_not_kept(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MAKES_MANY)
    result = run_dtrain("run", "--nproc-per-node", "2", "script.py", cwd=tmp_path)
    assert result.returncode == 0, result
    assert result.stdout.count("grew by 0") == 2, result.stdout
