"""`ddp.verify` on models with one reason to differ each, or none."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import Nursery
from testbed.training import Attention, Complex, Odd
from testbed.worlds import world
from torch import nn
from torch.nn import functional as F

import ddp
from ddp.comm.objects import gather_values
from ddp.errors import ArgumentError, LayoutMismatchError
from ddp.verification.verify import Verification, verify

ROWS = 24  # of the batch: divisible by 2, 3 and 4


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))


class Normed(nn.Module):
    def __init__(self, p: float = 0.0, *, tracks: bool = True) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(6, 20), nn.BatchNorm1d(20, track_running_stats=tracks)
        self.drop, self.b = nn.Dropout(p), nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(self.drop(self.norm(self.a(x)).relu()))


class DropsByFunction(nn.Module):
    """Random numbers that no module owns: in training only, or always."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.a, self.b, self.always = nn.Linear(6, 20), nn.Linear(20, 3), always

    def forward(self, x: torch.Tensor) -> Any:
        return self.b(F.dropout(self.a(x).tanh(), 0.2, training=self.always or self.training))


class LargeBatchOnly(nn.Module):
    """Uses a parameter only if the batch is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.extra = mlp(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x) + (self.extra(x) if len(x) == ROWS else 0)


class UnusedNorm(nn.Module):
    """Holds a batch norm and a dropout that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = mlp(), nn.BatchNorm1d(6), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x)


class KeepsFloat32(nn.Module):
    """Cannot run in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.a(x.float().cos())


class Dropping(nn.Module):
    """Attention and an LSTM, whose dropouts are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
        self.lstm, self.out = nn.LSTM(6, 5, num_layers=2, dropout=0.3, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        rows = torch.stack([x, x.cos(), x.sin()], dim=1)  # (rows, 3, 6)
        return self.out(self.lstm(rows + self.attention(rows, rows, rows)[0])[0][:, -1])


_noise = itertools.count()


def mean(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def total(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def root(model: nn.Module, batch: Any) -> Any:
    return total(model, batch) / len(batch["x"]) ** 0.5


def masked(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["masked"], ignore_index=-1)


def by_place(model: nn.Module, batch: Any) -> Any:
    place = torch.arange(len(batch["x"]), dtype=torch.float64).cos()
    return (place * F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")).mean()


def contrastive(model: nn.Module, batch: Any) -> Any:
    one, other = (F.normalize(model(batch["x"] + shift), dim=1) for shift in (0, 0.1))
    return F.cross_entropy(one @ other.T, torch.arange(len(one)))


def sum_and_penalty(model: nn.Module, batch: Any) -> Any:
    return total(model, batch) + sum(p.square().sum() for p in model.parameters())


def unseeded(model: nn.Module, batch: Any) -> Any:
    return mean(model, batch) * (1 + 0.1 * next(_noise))


def of_rank(model: nn.Module, batch: Any) -> Any:
    return mean(model, batch) * (1 + 0.1 * dist.get_rank())


def with_length(model: nn.Module, batch: Any) -> Any:
    return mean(model, batch) + len(batch["x"])


def squares(model: nn.Module, batch: Any) -> Any:
    return (model(batch["x"]) ** 2).mean()


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], torch.Tensor]


CASES: dict[str, Case] = {
    "plain": Case(mlp, mean),
    "odd": Case(Odd, squares),
    "attention": Case(Attention, mean),
    "complex": Case(Complex, squares),
    "norm in eval": Case(lambda: Normed(0.3).eval(), mean),
    "float32": Case(KeepsFloat32, mean),
    "batch norm": Case(Normed, mean),
    "batch norm without running statistics": Case(lambda: Normed(tracks=False), mean),
    "dropout": Case(lambda: nn.Sequential(mlp(), nn.Dropout(0.3)), mean),
    "dropout as attributes": Case(Dropping, mean),
    "dropout by function": Case(lambda: DropsByFunction(always=False), mean),
    "random in eval": Case(lambda: DropsByFunction(always=True), mean),
    "sum": Case(mlp, total),
    "sum beside an unused norm": Case(UnusedNorm, total),
    "root": Case(mlp, root),
    "masked": Case(mlp, masked),
    "place": Case(mlp, by_place),
    "contrastive": Case(mlp, contrastive),
    "penalty": Case(mlp, sum_and_penalty),
    "unseeded": Case(mlp, unseeded),
    "rank": Case(mlp, of_rank),
    "length": Case(mlp, with_length),
    "large batch only": Case(LargeBatchOnly, mean),
    "three at once": Case(lambda: Normed(0.3), masked),
    "sum of batch norm": Case(Normed, total),
}


def made(name: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return CASES[name].model()


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(3, (ROWS,), generator=generator)
    hidden = y.clone()
    hidden[: ROWS // 4] = -1
    return {"x": torch.randn(ROWS, 6, generator=generator), "y": y, "masked": hidden}


def verified(name: str) -> tuple[Verification, str]:
    """The same on all ranks."""
    found = verify(made(name), CASES[name].loss, batch())
    report = str(found)
    assert gather_values(report) == [report] * dist.get_world_size()
    return found, report


ALIKE = ["plain", "odd", "attention", "complex", "norm in eval", "float32"]


@pytest.mark.parametrize("name", ALIKE)
@world(2)
def test_what_trains_alike_is_said_to(name: str) -> None:
    found, report = verified(name)
    assert found.ok, report
    assert not found.differences
    assert not found.drifted
    assert found.compared + len(found.unused) == sum(p.requires_grad for p in made(name).parameters())
    assert found.dtype == (torch.float32 if name == "float32" else torch.float64)
    assert found.unused == (("never",) if name == "odd" else ())
    assert "the same" in report


@pytest.mark.parametrize("name", [name for name in CASES if name not in ALIKE])
@world(2)
def test_what_does_not_train_alike_is_said_to_differ(name: str) -> None:
    found, report = verified(name)
    assert not found.ok
    assert bool(found.differences) == (name != "length")
    assert "NOT THE SAME" in report
    names = [each.name for each in found.differences]
    assert names == [each for each, _ in made(name).named_parameters() if each in names]
    assert f"{names[0]!r} is the first" in report if names else "parameters agree" in report
    assert len(report.splitlines()) <= 26
    assert max(map(len, report.splitlines())) <= 120


@pytest.mark.slow
@world(3)
def test_the_table_has_the_numbers_in_a_world_of_three() -> None:
    found, report = verified("plain")
    assert found.ok, report
    found, report = verified("sum")
    assert {round(each.ratio, 9) for each in found.differences} == {round(1 / 3, 9)}
    assert found.loss_alone == pytest.approx(3 * found.loss_distributed)
    assert "distributed / alone 0.333333" in report
    found, report = verified("large batch only")
    assert {"extra.weight", "extra.bias"} <= {each.name for each in found.differences}


@world(2)
def test_nothing_of_the_users_changes() -> None:
    """With a plain model, and with wrapped ones that are in the middle of a step."""
    rank = dist.get_rank()
    for wrap in (lambda m: m, ddp.DistributedDataParallel, nn.parallel.DistributedDataParallel):
        inner = made("three at once")
        inner.a.requires_grad_(False)
        model = wrap(inner)
        mine = {name: tensor[rank::2] for name, tensor in batch().items()}
        masked(model, mine).backward()
        inner.norm.eval()
        whole = batch()
        before = snapshot(inner, whole)
        parameters = list(inner.parameters())
        assert not verify(model, masked, whole).ok
        after = snapshot(inner, whole)
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert torch.equal(value, after[key]) if isinstance(value, torch.Tensor) else value == after[key], key
        assert all(a is b for a, b in zip(parameters, inner.parameters(), strict=True))
        if wrap is not ddp.DistributedDataParallel:
            masked(model, mine).backward()  # hooks are as they were


def snapshot(model: nn.Module, whole: dict[str, torch.Tensor]) -> dict[str, Any]:
    kept: dict[str, Any] = {f"value of {k}": v.clone() for k, v in model.state_dict().items()}
    kept |= {f"gradient of {n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    kept |= {f"mode of {n}": m.training for n, m in model.named_modules()}
    kept |= {f"batch {name}": tensor.clone() for name, tensor in whole.items()}
    return kept | {"torch": torch.get_rng_state(), "python": random.getstate(), "dtype": torch.get_default_dtype()}


@world(2)
def test_drifted_replicas_are_named() -> None:
    model = ddp.DistributedDataParallel(made("plain"))
    assert verify(model, mean, batch()).ok
    model.module[2].bias.data[1] += 1e-6 * dist.get_rank()
    found = verify(model, mean, batch())
    assert (found.ok, found.differences) == (False, ())
    assert "'2.bias' on rank 1" in found.drifted


@world(2)
def test_batches_are_nested_and_dtypes_one_s_own() -> None:
    """Nested batches, a tolerance, the model's own dtype, weights that differ before."""
    whole = batch()
    nested = (whole["x"], [{"y": whole["y"]}, None, 0.5, torch.tensor(2.0)])

    def loss(model: nn.Module, given: Any) -> Any:
        x, (labels, nothing, half, two) = given
        assert nothing is None
        return F.cross_entropy(model(x), labels["y"]) * half * two

    torch.manual_seed(dist.get_rank())  # a plain model may differ between ranks, as before wrapping
    found = verify(mlp(), loss, nested)
    assert found.ok, found
    found = verify(mlp(), loss, nested, double=False)
    assert (found.ok, found.dtype) == (True, torch.float32)
    assert 0 < found.largest_error < 1e-4
    assert not verify(mlp(), loss, nested, double=False, tolerance=1e-12).ok
    found = verify(mlp().bfloat16(), lambda m, b: m(b.bfloat16()).float().square().mean(), whole["x"], double=False)
    assert (found.ok, found.tolerance) == (True, 5e-2)
    for name in ("masked", "sum"):
        assert verify(made(name), CASES[name].loss, whole, double=False).differences


@world(2)
def test_a_wrong_call_is_an_error_on_every_rank() -> None:
    """Perhaps by one."""
    rank, whole = dist.get_rank(), batch()

    def fails(model: nn.Module, given: Any) -> Any:
        if rank == 1:
            raise KeyError("no such column")
        return mean(model, given)

    other, plain = made("plain"), made("plain")
    frozen, wide = made("plain").requires_grad_(False), made("plain")
    if rank == 1:
        wide.append(nn.Linear(3, 3))
    short = {name: each[: ROWS - 1] for name, each in whole.items()}
    calls: list[tuple[nn.Module, Callable[[nn.Module, Any], torch.Tensor], Any, str]] = [
        (plain, mean, {**whole, "x": whole["x"] + (rank == 1)}, "rank 1 has another batch than rank 0"),
        (plain, mean, short, "the batch has 23 samples, which 2 ranks cannot share equally: pass 22"),
        (plain, mean, {**whole, "y": whole["y"][1:]}, "first dimensions 24, 23"),
        (plain, mean, {**whole, "words": ["a"]}, "batch holds a builtins.str"),
        (plain, fails, whole, "rank 1: loss_fn(model, batch) failed: KeyError: 'no such column'"),
        (plain, lambda m, b: m(b["x"]).sum(1), whole, "one of shape (24,)"),
        (plain, lambda m, b: mean(m, b).detach(), whole, "without gradient"),
        (plain, lambda m, b: mean(other, b), whole, "no parameter got a gradient"),
        (frozen, mean, whole, "nothing to compare"),
    ]
    for model, loss, given, said in calls:
        with pytest.raises(ArgumentError, match=re.escape(said)) as caught:
            verify(model, loss, given)
        assert gather_values(str(caught.value)) == [str(caught.value)] * 2
    with pytest.raises(LayoutMismatchError, match="rank 1"):
        verify(wide, mean, whole)
    assert verify(plain, mean, whole).ok  # usable afterwards


@world(3)
def test_a_subgroup_verifies_by_itself() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        with pytest.raises(ArgumentError, match="not a member"):
            verify(made("plain"), mean, batch(), process_group=group)
        return
    assert verify(made("plain"), mean, batch(), process_group=group).world_size == 2
    (first, *_) = verify(made("sum"), total, batch(), process_group=group).differences
    assert first.ratio == pytest.approx(1 / 2)


def _verify_alone() -> str:
    found = verify(made("batch norm"), mean, batch())
    assert found.ok
    assert found.world_size == 1
    return str(found)


def test_one_rank_has_nothing_to_compare(nursery: Nursery) -> None:
    assert not torch.distributed.is_initialized()
    without_group = _verify_alone()
    assert nursery.run(1, _verify_alone) == [without_group]
    assert "nothing to compare" in without_group
