"""What only devices can show of groups: NCCL connected at once, one control group, and a host that does not wait."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from testbed.nursery import ROOT

pytestmark = pytest.mark.gpu

PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # torch itself may come by it

PROGRAM = """
    import sys
    import torch
    import torch.distributed as dist
    import ddp
    import ddp.horovod as hvd

    world = ddp.init(sys.argv[1])
    assert dist.group.WORLD.bound_device_id == world.device, dist.group.WORLD.bound_device_id
    torch.manual_seed(0)
    models = [ddp.DistributedDataParallel(torch.nn.Linear(8, 8).to(world.device)) for _ in range(2)]
    controls = {model._reducer.channel.control for model in models}
    assert len(controls) == 1
    assert (dist.group.WORLD in controls) == (sys.argv[1] != "nccl")
    for model in models:
        model(torch.full((1, 8), float(world.rank), device=world.device)).sum().backward()
        expected = sum(range(world.world_size)) / world.world_size
        assert model.module.weight.grad[0, 0].item() == expected
    mine = torch.full((1000,), float(world.rank), device=world.device)
    hvd.allreduce(mine, op="sum")  # make what the first calls make, and load their kernels
    hvd.allgather(mine)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda._sleep(4_000_000_000)  # cycles: seconds
    busy.record()
    total = hvd.synchronize(hvd.allreduce_async(mine, op="sum"))
    every = hvd.allgather(mine)
    assert not busy.query(), "the host has waited for the device"
    torch.cuda.set_sync_debug_mode("default")
    assert total[0].item() == sum(range(world.world_size))
    assert every.view(world.world_size, -1)[:, 0].tolist() == list(map(float, range(world.world_size)))
    print("well", flush=True)
"""


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
def test_two_devices_share_a_control_group_and_the_host_goes_on(tmp_path: Path, backend: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: NCCL refuses ranks that share one")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PROGRAM))
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, backend],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("well") == 2


@pytest.mark.parametrize("chosen", [None, "0"])
def test_two_ranks_of_one_device_still_use_host_memory(tmp_path: Path, chosen: str | None) -> None:
    """ddp.init() does not connect NCCL where one visible device may be shared, also if CUDA_VISIBLE_DEVICES is set."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, ddp\n"
        "import torch.distributed as dist\n"
        "world = ddp.init()\n"
        "dist.all_reduce(ones := torch.ones(2))\n"
        "assert ones.tolist() == [2, 2]\n"
        "print(world.device, world.backend, dist.group.WORLD.bound_device_id, flush=True)\n"
    )
    if torch.cuda.device_count() > 1 or "CUDA_VISIBLE_DEVICES" in os.environ:
        pytest.skip("needs a machine with one CUDA device, and no CUDA_VISIBLE_DEVICES")
    env = {**{k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}, "PYTHONPATH": PYTHONPATH}
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script],
        env=env if chosen is None else {**env, "CUDA_VISIBLE_DEVICES": chosen},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("cuda:0 cpu:gloo,cuda:nccl None") == 2
