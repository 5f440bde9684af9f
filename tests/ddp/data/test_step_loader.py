"""A training with ddp.StepLoader has the same bits on any number of ranks."""

from __future__ import annotations

import hashlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import Nursery
from testbed.present import present
from testbed.step_training import Data, Training, net_of
from testbed.worlds import world
from torch import nn

import ddp
from ddp.errors import ArgumentError, BackwardError, UnsupportedError

WORLDS = [(1, "shm"), (2, "gloo"), (3, "shm"), (4, "gloo"), (9, "shm")]  # of 9 ranks one has no micro-batch


def _digest(nursery: Nursery, worlds: Iterable[tuple[int, str]], case: Callable[..., str], **given: Any) -> str:
    """The digest that all ranks of all worlds return."""
    found = {each: nursery.run(each[0], case, group=each[1], deadline_s=300, **given) for each in worlds}
    first, *others = {digest for digests in found.values() for digest in digests}
    assert not others, found
    return first


def _train(kind: str, steps: int = 4, **options: Any) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "9 ranks, but only 8 micro-batches")
        return Training(kind, **options).run(steps)


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        ("mlp", [(1, "shm"), (4, "gloo"), (9, "shm")]),  # in the last step of 9 ranks three have no micro-batch
        ("cnn", [(1, "shm"), (2, "gloo"), (3, "shm")]),
        ("transformer", [(1, "gloo"), (3, "gloo"), (5, "shm")]),
        ("sparse", [(1, "shm"), (2, "shm"), (3, "gloo")]),
        ("twice", [(1, "shm"), (3, "gloo"), (8, "shm")]),
        ("shared", [(1, "shm"), (3, "gloo"), (8, "shm")]),
        ("bf16", [(1, "shm"), (3, "gloo"), (4, "shm")]),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_bits_are_those_of_any_number_of_ranks(nursery: Nursery, kind: str, worlds: list[tuple[int, str]]) -> None:
    _digest(nursery, worlds, _train, kind=kind)


@pytest.mark.parametrize(
    "options",
    [{"kind": "cnn", "steps": 5, "buffers": "average"}, {"kind": "mlp", "weighs": True}],
    ids=["averages of buffers", "weights"],
)
def test_averages_and_weights_are_those_of_any_world(nursery: Nursery, options: dict[str, Any]) -> None:
    """Weights are not whole numbers, and some are 0."""
    found = _digest(nursery, WORLDS, _train, **options)
    plain = {name: value for name, value in options.items() if name in ("kind", "steps")}
    assert nursery.run(1, _train, **plain) != [found]


def test_loader_processes_and_other_micro_batches(nursery: Nursery) -> None:
    """Processes that load change nothing; other sizes of micro-batches are other sums."""
    plain, by_processes, other = (
        nursery.run(2, _train, kind="mlp", steps=2, num_workers=workers, micro_batch_size=size)
        for workers, size in ((0, 4), (2, 4), (0, 8))
    )
    assert plain == by_processes
    assert plain != other


@world(2)
def test_averages_of_buffers_are_those_by_hand() -> None:
    """By the samples of micro-batches: the last step has one of 3 and two of 2."""
    torch.manual_seed(1)
    x, norm = torch.randn(19, 4), nn.BatchNorm1d(4)
    data, model = torch.utils.data.TensorDataset(x), ddp.DistributedDataParallel(norm)
    loader = ddp.StepLoader(data, global_batch_size=12, micro_batch_size=3, shuffle=False, buffers="average")
    for step, bounds in zip(loader.epochs(1), ((0, 3, 6, 9, 12), (12, 15, 17, 19)), strict=True):
        parts = [x[begin:end] for begin, end in itertools.pairwise(bounds)]
        expected = [
            0.9 * getattr(norm, f"running_{name}")
            + 0.1 * sum(getattr(part, name)(0) * len(part) for part in parts) / step.samples
            for name in ("mean", "var")
        ]
        for (inputs,) in step:
            model(inputs).sum().backward()
        norm.zero_grad()
        found = torch.stack([present(norm.running_mean), present(norm.running_var)])
        assert torch.allclose(found, torch.stack(expected), atol=1e-6)
        assert norm.num_batches_tracked == step.number + 1


@world(1, 3)
def test_weights_are_those_of_the_mean_over_all() -> None:
    """In float64, with a last step of unequal micro-batches; a weight of 0 hides a loss that is not finite."""
    torch.manual_seed(1)
    x, y, net = torch.randn(22, 6).double(), torch.randn(22).double(), nn.Linear(6, 1).double()
    weights = torch.rand(22).double()
    weights[:3] = 0
    data = torch.utils.data.TensorDataset(x, y, weights)
    loader = ddp.StepLoader(data, global_batch_size=12, micro_batch_size=3, shuffle=False)
    model = ddp.DistributedDataParallel(net)
    for step, rows in zip(loader.epochs(1), torch.arange(22).split(12), strict=True):
        for inputs, targets, each in step:
            losses = (model(inputs)[:, 0] - targets).square()
            model.backward((losses * each).sum() / each.sum(), weight=each.sum())
        losses = (net(x[rows])[:, 0] - y[rows]).square()
        mean = (losses * weights[rows]).sum() / weights[rows].sum()
        (expected,) = torch.autograd.grad(mean, [net.weight])
        assert net.weight.grad is not None
        assert (net.weight.grad - expected).abs().max() < 1e-12
        net.zero_grad()


def test_unfrozen_parameters_count_from_their_first_step(nursery: Nursery) -> None:
    _digest(nursery, WORLDS[:4], _unfreeze)


def _unfreeze() -> str:
    """Return a digest of the gradients; the last step has a micro-batch of 3 and one of 2."""
    torch.manual_seed(1)
    net, digest = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1)), hashlib.sha256()
    net[0].requires_grad_(False)
    model, x = ddp.DistributedDataParallel(net), torch.randn(29, 6)
    loader = ddp.StepLoader(torch.utils.data.TensorDataset(x), global_batch_size=12, micro_batch_size=3, shuffle=False)
    for step, rows in zip(loader.epochs(1), torch.arange(29).split(12), strict=True):
        net[0].weight.requires_grad_(step.number > 0)
        net[0].bias.requires_grad_(step.number > 1)
        for (inputs,) in step:
            model(inputs).square().mean().backward()
        found = [each.grad.clone() for each in net.parameters() if each.grad is not None]
        expected = torch.autograd.grad(net(x[rows]).square().mean(), [p for p in net.parameters() if p.requires_grad])
        assert len(found) == len(expected) == min(4, 2 + step.number)
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-5)
            digest.update(one.numpy().tobytes())
        net.zero_grad()
    return digest.hexdigest()


def _save(folder: Path) -> None:
    training = Training("cnn")
    training.run(2)
    checkpoint = ddp.Checkpoint(folder)
    checkpoint.save(2, **training.parts)
    checkpoint.wait()


def _resume(folder: Path) -> str:
    training = Training("cnn")
    assert ddp.Checkpoint(folder).load(**training.parts)
    return f"{torch.rand(2).tolist()} {random.random()} {training.run(3)}"


def test_a_training_goes_on_with_another_number_of_ranks(nursery: Nursery, tmp_path: Path) -> None:
    """From the middle of an epoch, and with the same random numbers."""
    nursery.run(3, _save, folder=tmp_path)
    _digest(nursery, [(ranks, "gloo") for ranks in (3, 2, 1, 4)], _resume, folder=tmp_path)


@world(3)
def test_ranks_without_micro_batches_are_named_once() -> None:
    loader = ddp.StepLoader(Data("mlp"), global_batch_size=8, micro_batch_size=4)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            next(iter(loader.epochs(1)))
    said = "3 ranks, but only 2 micro-batches in a step of ddp.StepLoader: ranks from 2 on have none. "
    assert [str(each.message).startswith(said) for each in warned] == [True] * (dist.get_rank() == 0)


@world(2)
def test_a_step_that_was_abandoned_changes_nothing() -> None:
    """Its iterator ends within a forward pass of a later step, as where the traceback of its failure lives on."""
    undisturbed, training = Training("mlp").run(2), Training("mlp")
    start = training.loader.state_dict()
    abandoned = iter(next(training.loader.epochs(1)))
    next(abandoned)
    training.loader.load_state_dict(start)
    training.net.register_forward_pre_hook(lambda *_: abandoned.close())  # type: ignore[attr-defined]  # a generator
    assert training.run(2) == undisturbed


@world(2)
def test_a_step_abandoned_after_micro_batches_changes_nothing() -> None:
    """Of two ranks each has four; gradients have weights."""
    results = []
    for count in (0, 1, 2, 3):
        training = Training("mlp", weighs=True)
        training.run(1)
        start = training.loader.state_dict()
        for x, y in itertools.islice(next(training.loader.epochs(1)), count):
            training.model.backward(nn.functional.cross_entropy(training.model(x), y), weight=2)
        training.loader.load_state_dict(start)
        results.append(training.run(2))
    assert len({*results}) == 1, results


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Twenty-four numbers, of which four are damaged."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in range(4, 8):
            raise ValueError("damaged")
        return torch.tensor([float(index)])


@world(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_that_ends_early_leaves_the_next_its_samples(workers: int) -> None:
    """Of six steps the second has damaged samples alone, the third is not begun, the fifth is left in the middle."""
    loader = ddp.StepLoader(Numbers(), global_batch_size=4, micro_batch_size=1, shuffle=False, num_workers=workers)
    model = ddp.DistributedDataParallel(nn.Linear(1, 1))
    seen: list[list[int]] = []
    for step in loader.epochs(1):
        seen.append([])
        if step.number == 2:
            continue
        model.zero_grad()
        with pytest.raises(ValueError, match="damaged") if step.number == 1 else nullcontext():
            for x in step:
                seen[-1].append(int(x))
                if step.number == 4:
                    break
                model(x).sum().backward()
    both: list[list[list[int]]] = [[], []]
    dist.all_gather_object(both, seen)
    assert both[0] == [[0, 1], [], [], [12, 13], [16], [20, 21]]
    assert both[1] == [[2, 3], [], [], [14, 15], [18], [22, 23]]


def test_a_step_may_be_taken_ahead_and_is_iterated_once() -> None:
    loader = ddp.StepLoader(Numbers(), global_batch_size=4, micro_batch_size=2, shuffle=False)
    first, _, third, *_ = loader.epochs(1)
    assert [next(iter(step)).flatten().tolist() for step in (first, third)] == [[0, 1], [8, 9]]
    for step in (first, third):
        with pytest.raises(ArgumentError, match="each is iterated once"):
            next(iter(step))


@world(2)
def test_what_a_step_cannot_take_is_refused() -> None:
    training = Training("mlp")

    def step(act: Any) -> None:
        """Make a step of eight micro-batches."""
        training.loader.set_epoch(training.loader.epoch + 1)
        for each in training.loader.epochs(1000):
            for x, y in each:
                act(x, y)
            return

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(training.model(x), y)

    def in_no_sync(x: torch.Tensor, y: torch.Tensor) -> None:
        with training.model.no_sync():
            loss_of(x, y).backward()

    step(lambda x, y: loss_of(x, y).backward())
    with pytest.raises(BackwardError, match=r"\.grad held the averages.*zero_grad"):
        step(lambda x, y: loss_of(x, y).backward())
    training.optimizer.zero_grad()
    with pytest.raises(UnsupportedError, match="no_sync"):
        step(in_no_sync)
    for to_none in (True, False):

        def cleared(x: torch.Tensor, y: torch.Tensor, *, to_none: bool = to_none) -> None:
            loss = loss_of(x, y)
            training.optimizer.zero_grad(set_to_none=to_none)
            loss.backward()

        with pytest.raises(BackwardError, match=r"was changed between two micro-batches.* zero_grad\(\) once"):
            step(cleared)
    passes = iter(range(99))

    def weighted_once(x: torch.Tensor, y: torch.Tensor) -> None:
        training.model.backward(loss_of(x, y), weight=None if next(passes) else 2.0)

    with pytest.raises(BackwardError, match=r"gave no weight.* for each micro-batch"):
        step(weighted_once)
    with pytest.raises(BackwardError, match="add up to 0"):
        step(lambda x, y: training.model.backward(loss_of(x, y), weight=0))
    *_, last = (bare := net_of("mlp")).parameters()
    last.requires_grad_(False)
    unfrozen = ddp.DistributedDataParallel(bare)

    def unfreezing(x: torch.Tensor, y: torch.Tensor) -> None:
        nn.functional.cross_entropy(unfrozen(x), y).backward()
        last.requires_grad_()

    with pytest.raises(BackwardError, match=r"unfrozen within a step of ddp\.StepLoader"):
        step(unfreezing)
    bare = net_of("mlp")
    with pytest.raises(ArgumentError, match="wrap it in"):
        step(lambda x, y: nn.functional.cross_entropy(bare(x), y).backward())
    compressed = ddp.DistributedDataParallel(net_of("mlp"), compression="bf16")
    with pytest.raises(UnsupportedError, match="compression or a communication hook"):
        step(lambda x, _: compressed(x))
    with pytest.raises(ArgumentError, match="mean"):
        next(training.loader.epochs(1000)).mean([1.0] * 99)
    for name in ("global_batch_size", "micro_batch_size", "torch", "seed"):
        state = training.loader.state_dict()
        with pytest.raises(ArgumentError, match=name.replace("torch", "last bits")):
            training.loader.load_state_dict({**state, name: 7})
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"batch_size": 4}, "leave batch_size out"),
        ({"buffers": "mean"}, "buffers='mean'; it must be"),
        ({"micro_batch_size": 64}, "micro_batch_size=64 and global_batch_size=32"),
    )
    for options, said in wrong:
        with pytest.raises(ArgumentError, match=said):
            ddp.StepLoader(Data("mlp"), **{"global_batch_size": 32, "micro_batch_size": 4, **options})
