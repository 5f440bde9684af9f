"""The ledger of a training with ddp.StepLoader, and the comparison of its hashes between ranks."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import Nursery
from testbed.processes import wait_until
from testbed.step_training import Training, lines_of
from testbed.worlds import world
from torch import nn

import ddp
from ddp.errors import ArgumentError, DriftError


def _record(kind: str, path: Path, steps: int, **options: Any) -> None:
    """Train with a ledger; a break ends the loop."""
    ddp.ledger(path)
    Training(kind, **options).run(steps)


def _steps(path: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in lines_of(path) if "hashes" in line}


@pytest.mark.parametrize("kind", ["transformer", "sparse", "bf16"])
def test_any_number_of_ranks_has_the_same_hashes_and_losses(nursery: Nursery, tmp_path: Path, kind: str) -> None:
    for ranks, group in ((1, "gloo"), (3, "gloo"), (4, "shm")):
        nursery.run(ranks, _record, group=group, kind=kind, path=tmp_path / f"{ranks}", steps=4, ledger="full")
    first, *others = (_steps(tmp_path / f"{ranks}") for ranks in (1, 3, 4))
    assert [*first] == [1, 2, 3, 4]
    assert [line["shares"] for line in first.values()] == [
        [8],
        [8],
        [2],
        [8],
    ]  # the last step of an epoch has 6 samples
    assert [line["shares"] for line in others[0].values()][2:] == [[1, 1, 0], [3, 3, 2]]
    for other in others:
        for number, line in other.items():
            assert {**line, "shares": None} == {**first[number], "shares": None}
    hashes = [pair for line in first.values() for pair in line["hashes"].values()]
    assert len({*map(tuple, hashes)}) > len(hashes) // 2  # they tell steps and parameters apart


def test_its_first_line_says_what_it_depends_on(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, _record, kind="mlp", path=tmp_path / "ledger", steps=1)
    first, step = lines_of(tmp_path / "ledger")
    assert first == {
        "ledger": 1,
        "machine": {"torch": torch.__version__, "processor": torch.backends.cpu.get_cpu_capability(), "threads": 1},
        "loader": {
            "samples": 71, "steps": 3, "global_batch_size": 32, "micro_batches": 8, "seed": 3, "shuffle": True,
        },
    }  # fmt: skip
    assert (step["step"], step["hashes"]) == (1, {})  # how long a step takes is not known yet


def test_all_parameters_come_in_turn(nursery: Nursery, tmp_path: Path) -> None:
    """Those that a ledger has in any step, it has with the hashes of a full one."""
    for kind in ("sampled", "full"):
        nursery.run(2, _record, kind="transformer", path=tmp_path / kind, steps=80, ledger=kind)
    sampled, full = (_steps(tmp_path / kind) for kind in ("sampled", "full"))
    assert {line["every"] for line in full.values()} == {1}
    names = {*full[1]["hashes"]}
    for first, line in sampled.items():
        for name, pair in line["hashes"].items():
            assert full[first]["hashes"][name] == pair
        every = line["every"]
        following = [sampled[at] for at in range(first + 1, first + 1 + every) if at in sampled]
        if len(following) == every and all(each["every"] == every for each in following):
            assert {name for each in following for name in each["hashes"]} == names, (first, every)
    assert max(line["every"] for line in sampled.values()) < 80


def test_a_second_model_has_a_number(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, _train_two_models, path=tmp_path / "ledger")
    assert {*_steps(tmp_path / "ledger")[1]["hashes"]} == {"weight", "bias", "weight of model 2", "bias of model 2"}


def test_what_has_no_line(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, _train_without_lines, path=tmp_path / "ledger")
    assert [*_steps(tmp_path / "ledger")] == [1, 2]
    assert all(line["every"] > 1 for line in _steps(tmp_path / "ledger").values())


def test_a_checkpoint_names_the_last_step_before_it(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, _save, folder=tmp_path / "saved", path=tmp_path / "ledger")
    file = tmp_path / "saved" / "step-0000000040.pt"
    *_, before, line, header, after = lines_of(tmp_path / "ledger")
    assert (before["step"], line, header["ledger"], after["step"]) == (4, {"checkpoint": str(file), "step": 4}, 1, 5)
    assert torch.load(file, weights_only=True)["ledger_step"] == 4
    nursery.run(3, _load, folder=tmp_path / "saved", path=tmp_path / "resumed")
    _, resumed, step = lines_of(tmp_path / "resumed")
    assert (resumed, step["step"]) == (line, 5)


def _train_two_models(path: Path) -> None:
    ddp.ledger(path)
    torch.manual_seed(0)
    nets = [nn.Linear(3, 3), nn.Linear(3, 1)]
    loader = ddp.StepLoader([torch.ones(3)] * 16, global_batch_size=8, micro_batch_size=2, ledger="full")
    models = [ddp.DistributedDataParallel(net) for net in nets]
    for step in loader.epochs(1):
        for x in step:
            models[1](models[0](x)).mean().backward()
        for net in nets:
            net.zero_grad()


def _train_without_lines(path: Path) -> None:
    """Evaluation, the loader of another training, and steps without any model."""
    ddp.ledger(path)
    training, other = Training("mlp"), Training("mlp", ledger="full")
    for _ in training.loader.evaluation():
        pass
    training.run(2)
    for _ in training.loader.evaluation():
        pass
    other.run(2)
    with pytest.raises(ArgumentError, match="before the training"):
        ddp.ledger(path)
    with pytest.raises(ArgumentError, match="ledger='all'; it must be one of 'sampled', 'full', 'off'"):
        Training("mlp", ledger="all")


def _save(folder: Path, path: Path) -> None:
    ddp.ledger(path)
    training, checkpoint = Training("mlp"), ddp.Checkpoint(folder)
    training.run(4)
    checkpoint.save(40, **training.parts)
    checkpoint.wait()
    training.run(1)


def _load(folder: Path, path: Path) -> None:
    ddp.ledger(path)
    training = Training("mlp")
    assert ddp.Checkpoint(folder).load(**training.parts)
    training.run(1)


def _change(training: Training, what: str, weight: nn.Parameter) -> None:
    with torch.no_grad():
        if what == "parameter":
            weight[2, 3] += 1e-6
        elif what == "state":
            training.optimizer.state[weight]["exp_avg"][2, 3] += 1e-3
        else:
            for parameter in training.net.parameters():
                assert parameter.grad is not None
                parameter.grad *= 1.5


@pytest.mark.parametrize("what", ["parameter", "state", "gradient"])
@world(3)
def test_a_rank_that_differs_is_named(what: str, tmp_path: Path) -> None:
    """In step 7, rank 1 changes something after the averages have arrived."""
    ddp.ledger(path := tmp_path / "ledger")
    training = Training("mlp")
    weight = dict(training.net.named_parameters())["1.weight"]

    def train() -> None:
        for step in training.loader.epochs(1000):
            for x, y in step:
                nn.functional.cross_entropy(training.model(x), y).backward()
            if training.loader.steps == 7 and dist.get_rank() == 1:
                _change(training, what, weight)
            training.optimizer.step()
            training.optimizer.zero_grad()

    with pytest.raises(DriftError) as raised:
        train()
    before = raised.value.step - 1
    wait_until(lambda: path.exists() and any(line.get("step") == before for line in lines_of(path)), "it is written")
    every = max(line["every"] for line in lines_of(path) if "hashes" in line)
    assert raised.value.ranks == (1,)
    if what == "gradient":  # its optimizer's state differs as well, so its weights do later
        assert raised.value.parameter in dict(training.net.named_parameters())
    else:
        assert raised.value.parameter == "1.weight"
    assert 8 <= raised.value.step <= 8 + every, (raised.value, every)


@world(3)
def test_a_gradient_that_differs_is_named_with_equal_weights(tmp_path: Path) -> None:
    """With a learning rate of 0 the weights stay equal."""
    ddp.ledger(tmp_path / "ledger")
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    loader = ddp.StepLoader([torch.ones(3)] * 64, global_batch_size=8, micro_batch_size=2, ledger="full", shuffle=False)
    model = ddp.DistributedDataParallel(net)
    if dist.get_rank() == 2:
        received = model.gradient_reducer
        assert received is not None
        policy: Any = received.policy
        delivered = policy.delivered

        def flip(*args: Any, **more: Any) -> None:
            if loader.steps == 4:
                assert net.bias.grad is not None
                net.bias.grad += 1e-3
            delivered(*args, **more)

        policy.delivered = flip

    def train() -> None:
        for step in loader.epochs(2):
            for x in step:
                model(x).mean().backward()
            net.zero_grad()

    with pytest.raises(DriftError, match=r"averaged gradients of step 4 differ: 'bias' on rank 2 of 3"):
        train()


@world(2)
def test_a_full_disk_ends_only_the_ledger() -> None:
    ddp.ledger("/dev/full")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        Training("mlp").run(3)
    expected = "ddp: the ledger cannot be written: [Errno 28] No space left on device. Training goes on without it\n"
    assert said.getvalue() == ("" if dist.get_rank() else expected)
