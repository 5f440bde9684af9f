"""`dtrain` on a machine with CUDA devices: each worker gets its own, and too many workers are an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import json, os, sys, torch, ddp
world = ddp.init()
total = torch.ones(3, device=world.device)
torch.distributed.all_reduce(total)
said = {"rank": world.rank, "device": str(world.device), "backend": world.backend, "sum": total.tolist(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
open(f"{sys.argv[1]}/{world.rank}.json", "w").write(json.dumps(said))
"""


def _device_count() -> int:
    import torch

    return torch.cuda.device_count()


def _dtrain(*arguments: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "launcher", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=240)


def test_every_worker_has_a_device_of_its_own(tmp_path: Path) -> None:
    script, count = tmp_path / "script.py", _device_count()
    script.write_text(SCRIPT)
    done = _dtrain("run", "--nproc-per-node", count, script, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(count)]
    assert [each["sum"] for each in said] == [[float(count)] * 3] * count
    assert all("nccl" in each["backend"] for each in said)
    assert len({(each["device"], each["visible"]) for each in said}) == count


def test_more_workers_than_devices_are_refused(tmp_path: Path) -> None:
    script, count = tmp_path / "script.py", _device_count()
    script.write_text("print('started')")
    done = _dtrain("run", "--nproc-per-node", count + 1, script)
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert f"{count} GPU" in done.stderr, done.stderr


def test_env_names_the_devices() -> None:
    import torch

    done = _dtrain("env")
    assert done.returncode == 0, done.stderr
    assert torch.cuda.get_device_name(0) in done.stdout
