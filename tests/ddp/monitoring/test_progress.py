"""A launcher can read from 40 bytes how many steps a worker has done, how many checkpoints it has saved, whether
the others can do without it, and whether it evaluates or saves."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ddp
from ddp.monitoring import progress


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "progress"
    path.write_bytes(bytes(72))
    monkeypatch.setenv("DTRAIN_PROGRESS_FILE", str(path))
    progress._counters.cache_clear()
    yield path
    progress._counters.cache_clear()


def _read(path: Path) -> tuple[int, int]:
    steps, checkpoints, *_ = struct.unpack("<9Q", path.read_bytes())
    return steps, checkpoints


@pytest.mark.usefixtures("group_of_one")
def test_a_worker_alone_counts_too(counters: Path, tmp_path: Path) -> None:
    model = ddp.DistributedDataParallel(torch.nn.Linear(2, 2))
    for step in range(1, 4):
        loss = model(torch.ones(2)).sum() + model(torch.ones(2)).sum()
        assert _read(counters)[0] == step - 1
        loss.backward()
        assert _read(counters)[0] == step
    with model.no_sync():
        model(torch.ones(2)).sum().backward()
    with torch.no_grad():
        model(torch.ones(2))
    assert _read(counters) == (3, 0)
    ddp.Checkpoint(tmp_path / "checkpoints", in_background=False).save(3)
    assert _read(counters) == (3, 1)


def test_how_a_process_stands_is_the_third_number(counters: Path) -> None:
    for kind in (1, 2, 3, 4, 0):
        progress.set_restart_policy(kind)
        assert struct.unpack("<9Q", counters.read_bytes()) == (0, 0, kind, *[0] * 6)
    with pytest.raises(ValueError, match=r"set_restart_policy\(5\)"):
        progress.set_restart_policy(5)


def test_the_fourth_number_changes_with_each_phase(counters: Path) -> None:
    def number() -> int:
        return int(struct.unpack("<9Q", counters.read_bytes())[3])

    seen = [number()]
    with progress.phase(progress.EVALUATION):
        seen.append(number())
        with progress.phase(progress.SAVE):
            seen.append(number())
        seen.append(number())
    seen.append(number())
    assert [each % 3 for each in seen] == [0, 1, 2, 1, 0]
    assert len({*seen}) == 5
    with pytest.raises(KeyError), progress.phase(progress.SAVE):
        raise KeyError
    assert number() % 3 == 0


@pytest.mark.parametrize("kind", ["missing", "short", "folder", "unwritable"])
def test_a_file_that_cannot_be_used_is_no_error(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress"
    if kind == "short":
        path.write_bytes(bytes(16))
    elif kind == "folder":
        path.mkdir()
    elif kind == "unwritable":
        path = Path("/proc/version")  # not even for root
    monkeypatch.setenv("DTRAIN_PROGRESS_FILE", str(path))
    progress._counters.cache_clear()
    progress.count_step()
    progress.count_checkpoint()
    progress.count_step_after([])
    progress.set_restart_policy(1)
    assert progress._counters() is None


def test_another_process_sees_a_step_at_once(counters: Path) -> None:
    read = "import struct, sys; print(struct.unpack('<9Q', open(sys.argv[1], 'rb').read()))"
    for step in range(1, 3):
        progress.count_step()
        said = subprocess.run([sys.executable, "-c", read, counters], check=True, capture_output=True, text=True)
        assert said.stdout == f"({step}, 0, 0, 0, 0, 0, 0, 0, 0)\n"
