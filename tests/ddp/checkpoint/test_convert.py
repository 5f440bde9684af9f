"""What ddp.Checkpoint saves, torch.distributed.checkpoint reads, and the other way round; and nothing is unpickled."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from testbed.checkpoints import listed
from testbed.nursery import ROOT, Nursery
from testbed.present import present
from testbed.processes import run_program
from testbed.seeds import Seeds
from torch import nn

import ddp
from ddp.errors import ArgumentError, CheckpointError

if TYPE_CHECKING:
    import torch.distributed.checkpoint as dcp
    from testbed.sharded import DATA, build, train

    from ddp.checkpoint.convert import from_dcp, main, to_dcp

CASES = "testbed.sharded"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of dcp.save and load in one process


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import here what takes seconds, and what else each process of pytest would when it collects the tests."""
    global dcp, DATA, build, train, from_dcp, main, to_dcp
    import torch.distributed.checkpoint as dcp
    from testbed.sharded import DATA, build, train

    from ddp.checkpoint.convert import from_dcp, main, to_dcp


def _saved(folder: Path, **values: Any) -> tuple[nn.Module, torch.optim.Optimizer, ddp.DistributedSampler]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sampler = ddp.DistributedSampler(range(10))
    train(model, optimizer, 3)
    sampler.advance(len(list(itertools.islice(sampler, 4))))
    checkpoint = ddp.Checkpoint(folder, in_background=False)
    checkpoint.save(3, model=model, optimizer=optimizer, sampler=sampler, **values)
    return model, optimizer, sampler


def test_there_and_back_is_the_same_checkpoint(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "empty": {}, "none": None, "keys": {1: 2, (None): "x"}, "tuple": (1, torch.ones(2), [torch.zeros(1)]),
        "set": {1, 2}, "counter": Counter("aab"), "ordered": OrderedDict(b=1, a=torch.ones(1)), "list": [[], [{}]],
        "parameter": nn.Parameter(torch.ones(2)), "bytes": b"x", "scalar": torch.tensor(3),
        "none left": torch.zeros(0, 2),
    }  # fmt: skip
    _saved(tmp_path / "first", **values)
    path = tmp_path / "first" / "step-0000000003.pt"
    to_dcp(path, tmp_path / "dcp")
    back = from_dcp(tmp_path / "dcp", tmp_path / "second")
    assert back == tmp_path / "second" / "step-0000000003.pt"
    before, after = (torch.load(each, weights_only=True) for each in (path, back))
    assert _described(after) == _described(before)


def _described(value: Any) -> Any:
    """Types, order and values, comparable."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.requires_grad, value.stride(), value.tolist()
    if isinstance(value, dict):
        return type(value), [(key, _described(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [_described(item) for item in value]
    return type(value), value


def test_a_converted_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    model, optimizer, sampler = _saved(tmp_path / "first")
    expected = train(model, optimizer, 4), sampler.state_dict(), random.random(), torch.rand(2).tolist()
    to_dcp(tmp_path / "first" / "step-0000000003.pt", tmp_path / "dcp")
    from_dcp(tmp_path / "dcp", tmp_path / "second")
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sampler = ddp.DistributedSampler(range(10))
    assert ddp.Checkpoint(tmp_path / "second").load(model=model, optimizer=optimizer, sampler=sampler)
    assert (train(model, optimizer, 4), sampler.state_dict(), random.random(), torch.rand(2).tolist()) == expected


def test_torch_s_own_reader_takes_what_we_write(tmp_path: Path) -> None:
    model, optimizer, _ = _saved(tmp_path / "first", best=0.5)
    to_dcp(tmp_path / "first" / "step-0000000003.pt", tmp_path / "dcp")
    other = build()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    train(other, fresh, 1)
    state: dict[str, Any] = {"model": other.state_dict(), "optimizer": fresh.state_dict(), "values": {"best": 0.0}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    other.load_state_dict(state["model"])
    fresh.load_state_dict(state["optimizer"])
    assert state["values"] == {"best": 0.5}
    assert train(other, fresh, 2) == train(model, optimizer, 2)


def test_shards_are_filled_from_our_checkpoint(nursery: Nursery, tmp_path: Path) -> None:
    model, *_ = _saved(tmp_path / "first")
    to_dcp(tmp_path / "first" / "step-0000000003.pt", tmp_path / "dcp")
    loss = model(DATA).square().mean().item()
    assert nursery.run(2, f"{CASES}:loads_sharded", folder=str(tmp_path / "dcp")) == pytest.approx(
        [loss] * 2, rel=1e-12
    )


def test_a_run_goes_on_from_shards(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, f"{CASES}:saves_sharded", folder=str(tmp_path / "dcp"), steps=3)
    path = from_dcp(tmp_path / "dcp", tmp_path / "ours", step=3, parts={"model": "app.model", "optimizer": "app.optim"})
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    restored = present(ddp.Checkpoint(tmp_path / "ours").load(model=model, optimizer=optimizer))
    assert (restored.step, restored.values, restored.path) == (3, {"epoch": 4}, path)
    assert torch.equal(torch.get_rng_state(), before)
    alone = build()
    expected = train(alone, torch.optim.AdamW(alone.parameters(), lr=0.05), 7)
    assert train(model, optimizer, 4) == pytest.approx(expected, rel=1e-10)


def test_shards_are_for_dcp_to_save(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, f"{CASES}:shards_are_refused_by_checkpoint", folder=str(tmp_path))
    assert listed(tmp_path) == []


def test_parts_are_found_by_their_usual_names(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # whose state is empty
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 8}, checkpoint_id=tmp_path / "dcp")
    from_dcp(tmp_path / "dcp", tmp_path / "ours")
    assert ddp.Checkpoint(tmp_path / "ours").load(model=build(), optimizer=optimizer).step == 8  # type: ignore[union-attr]


def test_a_bare_state_dict_is_the_model(tmp_path: Path) -> None:
    dcp.save(build().state_dict(), checkpoint_id=tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"none of its keys is a part.*0\.weight"):
        from_dcp(tmp_path / "dcp", tmp_path / "ours", step=1)
    with pytest.raises(CheckpointError, match="give step="):
        from_dcp(tmp_path / "dcp", tmp_path / "ours", parts={"model": ""})
    with pytest.raises(CheckpointError, match="there is no 'scheduler', but"):
        from_dcp(tmp_path / "dcp", tmp_path / "ours", parts={"model": "", "scheduler": "scheduler"}, step=1)
    with pytest.raises(ArgumentError, match="no part 'weights'"):
        from_dcp(tmp_path / "dcp", tmp_path / "ours", parts={"weights": ""}, step=1)
    assert not (tmp_path / "ours").exists()
    from_dcp(tmp_path / "dcp", tmp_path / "ours", parts={"model": ""}, step=1)
    assert ddp.Checkpoint(tmp_path / "ours").load(model=build()) is not None


# Foreign files


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_pickled_values_are_refused_or_left_out(tmp_path: Path) -> None:
    bomb = Bomb(tmp_path / "went off")
    dcp.save({"model": build().state_dict(), "step": 1, "note": bomb}, checkpoint_id=tmp_path / "beside")
    with pytest.warns(UserWarning, match="note is left out"):
        from_dcp(tmp_path / "beside", tmp_path / "ours")
    assert ddp.Checkpoint(tmp_path / "ours").load(model=build()).values == {}  # type: ignore[union-attr]
    dcp.save({"model": {"w": torch.ones(1), "extra": bomb}, "step": 1}, checkpoint_id=tmp_path / "inside")
    with pytest.raises(CheckpointError, match=r"model\.extra would have to be unpickled"):
        from_dcp(tmp_path / "inside", tmp_path / "theirs")
    assert not bomb.mark.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "ran out of input"),
        (b"text", "metadata: "),
        (pickle.dumps({"a": 1}), "does not describe a checkpoint"),
        (pickle.dumps(os.getcwd), "posix.getcwd, which is no part of DCP's format"),
    ],
)
def test_a_description_of_something_else_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"(?i){reason}"):
        from_dcp(tmp_path, tmp_path / "ours")


def test_a_description_that_runs_code_does_not(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "went off")))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir, which is no part"):
        from_dcp(tmp_path, tmp_path / "ours")
    assert not (tmp_path / "went off").exists()


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    dcp.save({"model": build().state_dict(), "step": 1}, checkpoint_id=tmp_path / "dcp")
    with open(tmp_path / "dcp" / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    for place in metadata.storage_data.values():
        place.relative_path = f"../{place.relative_path}"
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        from_dcp(tmp_path / "dcp", tmp_path / "ours")


def test_a_description_with_wrong_numbers_is_refused(tmp_path: Path) -> None:
    dcp.save({"model": build().state_dict(), "step": 1}, checkpoint_id=tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    whole = path.read_bytes()

    def refused(change: Callable[[Any], None]) -> None:
        metadata = pickle.loads(whole)
        change(metadata)
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=str(tmp_path / "dcp")):
            from_dcp(tmp_path / "dcp", tmp_path / "ours")

    def first(metadata: Any) -> Any:
        return metadata.state_dict_metadata["model.0.weight"]

    refused(lambda metadata: setattr(first(metadata), "size", torch.Size([1 << 59])))
    refused(lambda metadata: setattr(first(metadata), "size", "large"))
    refused(lambda metadata: setattr(first(metadata), "properties", None))
    refused(lambda metadata: setattr(metadata, "state_dict_metadata", None))
    refused(lambda metadata: setattr(metadata, "planner_data", {"step": 3}))
    refused(lambda metadata: setattr(metadata, "storage_data", {1: None}))
    refused(lambda metadata: metadata.storage_data.clear())


def test_bytes_that_were_changed_are_refused_or_read(tmp_path: Path, seeds: Seeds) -> None:
    """Nothing else than CheckpointError comes out of a damaged description."""
    dcp.save({"model": {"w": torch.ones(2)}, "step": 1}, checkpoint_id=tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    whole = path.read_bytes()
    generator = random.Random(*seeds(1))
    refused = 0
    for _ in range(300):
        changed = bytearray(whole)
        changed[generator.randrange(len(whole))] = generator.randrange(256)
        path.write_bytes(changed)
        try:
            from_dcp(tmp_path / "dcp", tmp_path / "ours")
        except CheckpointError:
            refused += 1
    assert refused > 50


def test_a_folder_of_ours_becomes_another_step(tmp_path: Path) -> None:
    _saved(tmp_path / "first", best=0.5)
    path = tmp_path / "first" / "step-0000000003.pt"
    to_dcp(path, tmp_path / "dcp")
    back = from_dcp(tmp_path / "dcp", tmp_path / "second", step=9)
    before, after = (torch.load(each, weights_only=True) for each in (path, back))
    assert _described(after) == _described({**before, "step": 9})


@pytest.mark.parametrize("step", ["x", -1, 1 << 64, 2.0, True])
def test_what_is_no_step_is_refused(step: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="step is "):
        from_dcp(tmp_path, tmp_path / "ours", step=step)
    dcp.save({"model": build().state_dict(), "step": -1}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="its step is -1"):
        from_dcp(tmp_path / "dcp", tmp_path / "ours")


def test_a_folder_that_lacks_a_file_is_named(tmp_path: Path) -> None:
    _saved(tmp_path / "first")
    to_dcp(tmp_path / "first" / "step-0000000003.pt", tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="dcp is not empty"):
        to_dcp(tmp_path / "first" / "step-0000000003.pt", tmp_path / "dcp")
    (tmp_path / "dcp" / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=f"could not read {tmp_path}/dcp"):
        from_dcp(tmp_path / "dcp", tmp_path / "second")


def test_a_damaged_checkpoint_is_not_converted(tmp_path: Path) -> None:
    _saved(tmp_path / "first")
    path = tmp_path / "first" / "step-0000000003.pt"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{path}: is cut short"):
        to_dcp(path, tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()


# The command


def test_the_command_converts_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _saved(tmp_path / "first")
    first, second = (tmp_path / name / "step-0000000003.pt" for name in ("first", "second"))
    environment = {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-W", "error", "-m", "ddp.checkpoint.convert"]
    done = run_program(*words, first, tmp_path / "dcp", env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/dcp\n", "")
    assert main([str(tmp_path / "dcp"), str(tmp_path / "second")]) == 0
    assert capsys.readouterr().out == f"{second}\n"
    parts = ["--step", "5", "--part", "model=model", "--part", "optimizer=optimizer"]
    assert main([str(tmp_path / "dcp"), str(tmp_path / "third"), *parts]) == 0
    restored = ddp.Checkpoint(tmp_path / "third").load(model=build(), optimizer=torch.optim.AdamW(build().parameters()))
    assert restored.step == 5  # type: ignore[union-attr]
    assert main([str(tmp_path / "dcp"), str(tmp_path / "fourth"), "--part", "model"]) == 1
    assert "--part model: write NAME=KEY" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing"), str(tmp_path / "fourth")]) == 1
    assert "nothing: " in capsys.readouterr().err
