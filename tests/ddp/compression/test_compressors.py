"""Compressed gradients: how exact one reduction is, what error feedback gives back, and what training notices of it."""

from __future__ import annotations

import copy
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.compressed import Bucket, error, gradients, reduced, true_means
from testbed.present import present
from testbed.processes import wait_until
from testbed.slow import slow
from testbed.training import assert_same_bits
from testbed.worlds import world
from torch import nn

import ddp
from ddp.compression import Half, Int8, PowerSGD, make_compression
from ddp.compression.compressors import CompressionHook
from ddp.compression.quantize import dequantize, quantize, row_bytes
from ddp.errors import CheckpointError, CollectiveError, LayoutMismatchError

Method = str | Half | Int8 | PowerSGD


LOW_RANK = PowerSGD(rank=3, start_step=2)


# One reduction
# Rounding to b bits of mantissa errs by 2^-b / sqrt(12) or so of a value; twice, since ranks and the average round.
BOUNDS = {"fp16": 0.0004, "bf16": 0.003, "int8": 0.016}


@pytest.mark.parametrize("name", BOUNDS)
@world(slow(2), slow(3), 4)
def test_one_reduction_is_as_exact_as_its_numbers(name: str) -> None:
    """Sizes and dtypes of all kinds."""
    made = make_compression(name)
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        results = reduced(made, [flat.to(dtype) for flat in gradients(0, dist.get_rank())])
        assert_same_bits(results)
        for result, mean in zip(results, true_means(0), strict=True):
            if mean.numel():
                assert error(result, mean) < 0.05, (dtype, mean.numel())
    assert BOUNDS[name] / 8 < error(results[-1], true_means(0)[-1]) < BOUNDS[name]
    made.state.close()
    made.state.close()  # twice is once


@world(2)
def test_stream_order_gives_the_same_bits() -> None:
    """What CUDA does, one bucket at a time: both steps on the group itself, with the same bits as by threads."""
    for name in ("bf16", "int8"):
        threaded, streamed = make_compression(name), make_compression(name)
        state: Any = streamed.state
        state._exchange = copy.copy(state._exchange)
        state._exchange._pipeline = None
        for step in range(3):
            for size in (1, 5000):
                (flat,) = gradients(step, dist.get_rank(), [size])
                (a,), (b,) = reduced(threaded, [flat.clone()]), reduced(streamed, [flat.clone()])
                assert torch.equal(a, b)


@world(2)
def test_two_models_go_backward_in_two_threads() -> None:
    """Averages of two compressors at once, each in its own order, do not meet each other."""
    made = [make_compression("int8", dist.new_group()) for _ in range(2)]
    results: dict[int, list[torch.Tensor]] = {}

    def run(which: int) -> None:
        results[which] = [
            reduced(made[which], [torch.full((700,), which + 1.0) for _ in range(5)])[4] for _ in range(10)
        ]

    with ThreadPoolExecutor(2) as threads:
        [*threads.map(run, range(2))]
    for which in range(2):
        for result in results[which]:
            torch.testing.assert_close(result, torch.full((700,), which + 1.0))


@world(3)
def test_buckets_keep_their_order_at_any_pace() -> None:
    """Fifty buckets on their way at once, sent at a different pace on each rank, arrive as themselves."""
    sizes = [1 + 37 * number % 1500 for number in range(50)]
    made = {name: make_compression(name) for name in ("bf16", "int8")}
    for step in range(3):
        for hook in made.values():
            futures = []
            for number, flat in enumerate(gradients(step, dist.get_rank(), sizes)):
                if number % 7 == 3 * dist.get_rank():
                    time.sleep(0.001)
                flat.fill_(float(number + dist.get_rank()))
                futures.append(hook.hook(hook.state, Bucket(number, flat)))
            for number, future in enumerate(futures):
                expected = number + (dist.get_world_size() - 1) / 2
                torch.testing.assert_close(
                    future.wait(), torch.full((sizes[number],), expected), rtol=0.01, atol=0.01, msg=f"bucket {number}"
                )


@world(2)
def test_infinite_and_nan_reach_all_ranks_and_go_again() -> None:
    """Inf and NaN reach every rank, and are gone in the next step."""
    rank = dist.get_rank()
    for name in BOUNDS:
        made = make_compression(name)
        for bad in (float("inf"), float("-inf"), float("nan")):
            flat = torch.ones(5000)
            flat[700] = bad if rank == dist.get_world_size() - 1 else 1.0
            (result,) = reduced(made, [flat])
            assert_same_bits([result])
            assert not result[700].isfinite()
            fine = torch.ones(5000, dtype=torch.bool)
            fine[512:1024] = name != "int8"  # its block
            fine[700] = False
            torch.testing.assert_close(result[fine], torch.ones(int(fine.sum())))
            (result,) = reduced(made, [torch.full((5000,), 2.0)])
            torch.testing.assert_close(result, torch.full((5000,), 2.0))
    half = make_compression("fp16")
    (result,) = reduced(half, [torch.tensor([6e4, 1e6, -1e6, 1.0])])  # the sum of the first is too large for float16
    torch.testing.assert_close(result, torch.tensor([6e4, float("inf"), float("-inf"), 1.0]), rtol=1e-3, atol=0)
    (result,) = reduced(make_compression("int8"), [torch.tensor([3e38, -1e38, 0.0])])
    torch.testing.assert_close(result, torch.tensor([3e38, -1e38, 0.0]), rtol=0.02, atol=1e36)
    (result,) = reduced(make_compression("int8"), [torch.tensor([1e-45, 0.0, -1e-39])])
    assert result.abs().max() < 1e-38  # nothing divides by zero


# Error feedback


@pytest.mark.parametrize(
    ("method", "least", "most"),  # of the sum's error: that of the last step, however many there were
    [(Int8(), 0, 1.5), (Int8(error_feedback=False), 15, 60), (LOW_RANK, 0, 10)],
    ids=["int8", "int8 without", "powersgd"],
)
@world(2)
def test_error_feedback_delivers_the_sum_of_the_true_means(method: Method, least: float, most: float) -> None:
    """Relative to the largest error of a single step.

    Half of the gradients are nearly the same in every step, a bias that no average over steps would hide.
    """
    made = make_compression(method)
    owed, largest = torch.zeros(6000).double(), 0.0
    constant = torch.linspace(-1, 1, 3000) ** 3
    for step in range(60):
        every = [torch.cat([constant + rank * 1e-3, gradients(step % 5, rank, [3000])[0] * 1e3]) for rank in range(2)]
        mean = torch.stack(every).double().mean(0)
        (result,) = reduced(made, [every[dist.get_rank()]], [[(60, 100)]])
        owed += mean - result.double()
        largest = max(largest, float((mean - result).norm()))
    assert least <= float(owed.norm()) / largest < most


# Training


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 1))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x) * self.scale


def _trained(method: Method | None, steps: int = 200) -> float:
    """Train a regression; returns the mean loss of the last 20 steps on the whole batch. Replicas end equal."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net, teacher = Net(), nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1))
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.008)
    made = make_compression(method) if method is not None else None
    if made is not None:
        model.register_comm_hook(made.state, made.hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        x = torch.randn(64, 12, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            y = teacher(x)
            if step >= steps - 20:
                losses.append(float((net(x) - y).square().mean()))
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        optimizer.zero_grad()
        (model(x[mine]) - y[mine]).square().mean().backward()
        optimizer.step()
    assert_same_bits([parameter.detach() for parameter in net.parameters()])
    if made is not None:
        made.state.close()
    return sum(losses) / len(losses)


@pytest.mark.slow
@world(2)
def test_training_is_that_of_float32() -> None:
    plain = _trained(None)
    assert plain < 0.02
    methods: list[Method] = ["fp16", "bf16", "int8", PowerSGD(rank=2, start_step=10)]
    for method in methods:
        assert abs(_trained(method) - plain) < 0.02 * plain, method  # measured: 0.002


# Checkpoints
SHAPES = ([(40, 30)], [(7,)], [(), (0, 3), (50, 41)])


FLATS = [sum(torch.Size(shape).numel() for shape in bucket) for bucket in SHAPES]


def tensors_of(state: Any) -> list[torch.Tensor]:
    """All tensors in the state of a compressor."""
    return [value for held in state["parameters"].values() for value in held.values() if torch.is_tensor(value)]


def assert_equal_states(first: Any, second: Any) -> None:
    assert first["parameters"].keys() == second["parameters"].keys()
    for key, held in first["parameters"].items():
        assert held.keys() == second["parameters"][key].keys()
    assert all(map(torch.equal, tensors_of(first), tensors_of(second)))


@pytest.mark.parametrize("method", ["bf16", "int8", LOW_RANK], ids=["bf16", "int8", "powersgd"])
@world(3)
def test_a_resumed_run_is_bitwise_the_one_that_went_on(method: Method, tmp_path: Path) -> None:
    """Six steps with a save after the third; a compressor that loads it makes the same last three."""

    def steps(made: CompressionHook, first: int) -> list[torch.Tensor]:
        return [
            result.clone()
            for step in range(first, first + 3)
            for result in reduced(made, gradients(step, dist.get_rank(), FLATS), SHAPES)
        ]

    made = make_compression(method)
    steps(made, 0)
    torch.save(made.state.state_dict(), tmp_path / f"{dist.get_rank()}")
    went_on = steps(made, 3)
    other = make_compression(method)
    steps(other, 7)  # what it has by then is forgotten
    other.state.load_state_dict(torch.load(tmp_path / "0", weights_only=True))
    resumed = steps(other, 3)
    assert all(torch.equal(a, b) for a, b in zip(went_on, resumed, strict=True))
    first, second = made.state.state_dict(), other.state.state_dict()
    count = {"bf16": 0, "int8": 5}.get(str(method), 2)  # of PowerSGD, two are worth it
    assert len(first["parameters"]) == len(second["parameters"]) == count
    assert_equal_states(first, second)
    assert_same_bits(tensors_of(first))


@world(2)
def test_what_is_owed_is_paid_once_when_plans_return() -> None:
    """A bucket of an older plan comes again, after its parameters have been in another, with one more or less."""
    names = ("a", "p", "q")
    parameters = {name: torch.empty(600) for name in names}
    made = make_compression(Int8(block=64), parameters=parameters)
    lacking = {name: torch.zeros(600, dtype=torch.float64) for name in names}
    plans: list[list[list[str]]] = [[["a"], ["p", "q"]], [["a", "p"]], [["a"], ["p", "q"]]]
    for step, plan in enumerate(plan for plan in plans for _ in range(3)):
        mine = dict(zip(names, gradients(step, dist.get_rank(), [600] * 3), strict=True))
        means = dict(zip(names, true_means(step, [600] * 3), strict=True))
        for number, keys in enumerate(plan):
            owners, shapes = [parameters[key] for key in keys], [(600,)] * len(keys)
            bucket = Bucket(number, torch.cat([mine[key] for key in keys]), keys is plan[-1], shapes, owners)
            for key, part in zip(keys, made.hook(made.state, bucket).wait().split(600), strict=True):
                lacking[key] += means[key] - part
    owed = made.state.state_dict()["parameters"]
    for name in names:
        torch.testing.assert_close(owed[name]["owed"].double(), lacking[name], rtol=1e-4, atol=1e-4)


@world(2)
def test_states_that_do_not_fit_are_errors() -> None:
    made = make_compression("int8")
    reduced(made, gradients(0, dist.get_rank(), [100, 200]))
    state = made.state.state_dict()
    for method, bad, text in (
        ("bf16", state, "that of compression int8, this is bf16"),
        ("int8", {}, "not the state of a compressor"),
        ("int8", {"method": "int8", "buckets": []}, "not the state of a compressor"),
        ("int8", {"method": "int8", "parameters": {"a": {"owed": 3}}}, "state of 'a' has no tensor 'owed'"),
        (
            "bf16",
            {"method": "bf16", "parameters": {"a": {}}},
            "compression bf16 has no residuals, but its state has 'a'",
        ),
        (LOW_RANK, {"method": "powersgd", "rank": 1, "parameters": {}}, "of rank 1, this has 3"),
        (LOW_RANK, {"method": "powersgd", "rank": 3, "parameters": {}}, "not the state of a compressor"),
    ):
        with pytest.raises(CheckpointError, match=text):
            make_compression(method).state.load_state_dict(bad)
    for sizes, text in (
        ([100, 201], r"'parameter 1' has shape \(201,\), that of the checkpoint \(200,\)"),
        ([100], "the model has no 'parameter 1'"),
    ):
        other = make_compression("int8")
        other.state.load_state_dict(state)
        with pytest.raises(CheckpointError, match=text):
            reduced(other, [torch.zeros(size) for size in sizes])
    weight = torch.empty(3, 4)
    named = make_compression("int8", parameters={"weight": weight})
    for name, shape, text in (("bias", (3, 4), "the model has no 'bias'"), ("weight", (4, 3), r"shape \(3, 4\)")):
        with pytest.raises(CheckpointError, match=text):
            named.state.load_state_dict({"method": "int8", "parameters": {name: {"owed": torch.zeros(shape)}}})


# PowerSGD


@world(2)
def test_low_rank_takes_any_gradient() -> None:
    """Scalars, empty, channels_last and zero gradients; NaN in one step; a matrix of low rank arrives exactly."""
    made = make_compression(LOW_RANK)
    shapes: list[list[tuple[int, ...]]] = [[(), (0, 3), (30, 20), (4,)], [(25, 25)], [(6, 5, 3, 3)]]
    rank = dist.get_rank()

    def flats(step: int, bad: float = 1.0) -> list[torch.Tensor]:
        left, right = torch.linspace(-1, 1, 30) * (rank + 1), torch.linspace(0, 2, 20) + step
        exact = torch.outer(left, right).flatten() * bad
        return [torch.cat([torch.tensor([2.0]), exact, torch.ones(4)]), torch.zeros(625), torch.full((270,), 0.5)]

    for step, bad in enumerate((1.0, 1.0, 1.0, float("nan") if rank == 0 else 1.0, 1.0, 1.0)):
        results = reduced(made, flats(step, bad), shapes)
        assert_same_bits(results)
        if step == 3:
            assert not results[0][1:601].isfinite().any()
            continue
        left, right = torch.linspace(-1, 1, 30) * (dist.get_world_size() + 1) / 2, torch.linspace(0, 2, 20) + step
        torch.testing.assert_close(results[0][1:601], torch.outer(left, right).flatten(), rtol=1e-4, atol=1e-4)
        assert results[0][[0, *range(601, 605)]].tolist() == [2.0, *[1.0] * 4]
        assert not results[1].any()
        torch.testing.assert_close(results[2], torch.full((270,), 0.5))
    model = nn.parallel.DistributedDataParallel(nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last))  # type: ignore[call-overload]  # torch's stub lacks it
    made = make_compression(LOW_RANK)
    model.register_comm_hook(made.state, made.hook)
    for _ in range(4):
        model(torch.ones(2, 8, 4, 4)).square().mean().backward()
    assert_same_bits([present(parameter.grad) for parameter in model.parameters()])


@world(2)
def test_low_rank_is_the_same_inside_autocast() -> None:
    """A backward pass inside the user's autocast computes in the dtypes of the gradients."""
    plain, inside = make_compression(LOW_RANK), make_compression(LOW_RANK)
    for step in range(4):
        flats = gradients(step, dist.get_rank(), [600])
        (expected,) = reduced(plain, [flats[0].clone()], [[(30, 20)]])
        with torch.autocast("cpu", torch.bfloat16):
            (result,) = reduced(inside, flats, [[(30, 20)]])
        assert torch.equal(result, expected)


# Groups, arguments, failures


@world(3)
def test_groups_and_arguments() -> None:
    """Of three ranks, 0 has one group with 1 and one with 2: its number of groups is not theirs."""
    first: Any = dist.new_group([0, 1])
    second: Any = dist.new_group([0, 2])
    for ranks, group in (((0, 1), first), ((0, 2), second)):
        if dist.get_rank() not in ranks:
            with pytest.raises(ddp.errors.ArgumentError, match="not a member"):
                make_compression("bf16", group)
            continue
        for method in ("bf16", "int8", LOW_RANK):
            for _ in range(2):
                made: Any = make_compression(method, group)
                for _ in range(3):
                    (result,) = reduced(made, [torch.full((600,), float(dist.get_rank()))], [[(20, 30)]])
                    torch.testing.assert_close(result, torch.full((600,), sum(ranks) / 2), rtol=1e-3, atol=1e-3)
                    assert_same_bits([result], group)
        made.state.close()
    if dist.get_rank() == 0:
        assert _threads() == 4
    for group in (first, second):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    made = first = second = group = None
    gc.collect()
    wait_until(lambda: not _threads(), "threads end when the last user of the group does")
    with pytest.raises(ddp.errors.ArgumentError, match="there are 'fp16', 'bf16', 'int8', 'powersgd'"):
        make_compression("int4")
    with pytest.raises(ddp.errors.ArgumentError, match="register_comm_hook"):
        make_compression(len)  # type: ignore[arg-type]
    for wrong in (lambda: Int8(block=30), lambda: Half(torch.float32), lambda: PowerSGD(rank=0)):
        with pytest.raises(ddp.errors.ArgumentError):
            wrong()
    with pytest.raises(LayoutMismatchError, match=r"rank 2 of the group has Int8\(block=64") as caught:
        make_compression(Int8(block=64) if dist.get_rank() == 2 else "int8")
    assert (caught.value.rank, caught.value.entry) == (2, "compression")


def _threads() -> int:
    return sum(thread.name.startswith("ddp-compression") for thread in threading.enumerate())


@world(1)
def test_a_world_of_one_compresses_nothing() -> None:
    for method in ("fp16", "bf16", "int8", LOW_RANK):
        made = make_compression(method)
        for step in range(4):
            flats = gradients(step, 0)
            before = [flat.clone() for flat in flats]
            assert all(torch.equal(a, b) for a, b in zip(reduced(made, flats), before, strict=True))
        assert made.state.state_dict()["parameters"] == {}


@pytest.mark.parametrize("method", ["bf16", "int8", LOW_RANK], ids=["bf16", "int8", "powersgd"])
@world(3)
def test_a_lost_rank_is_an_error(method: Method) -> None:
    """The last rank leaves in the middle; the others get an error within seconds, and the same one ever after."""
    made = make_compression(method)

    def step(number: int) -> None:
        reduced(made, gradients(number, dist.get_rank(), [30_000, 30_000]), [[(200, 150)], [(200, 150)]])

    for number in range(3):
        step(number)
    if dist.get_rank() == 2:
        made.state.close()
        return
    began = time.monotonic()
    with pytest.raises(CollectiveError, match=r"(?s)missing: the .*rank 2: does not answer") as caught:
        step(3)
    with pytest.raises(CollectiveError):
        step(4)
    assert time.monotonic() - began < 20
    assert caught.value.rank == dist.get_rank()


@world(2, deadline_s=20)
def test_a_rank_may_leave_without_waiting(tmp_path: Path) -> None:
    """Rank 0 starts averages that rank 1 never joins, and its interpreter ends all the same."""
    made = make_compression("int8")
    reduced(made, [torch.ones(5000)])
    if dist.get_rank() == 0:
        for number in range(4):
            made.hook(made.state, Bucket(number, torch.ones(5000)))
        (tmp_path / "left").touch()
        return
    wait_until((tmp_path / "left").exists, "rank 0 leaves")


def test_quantized_blocks_come_back_within_half_a_scale() -> None:
    """Every value comes back within half a scale; what was lost is left, exactly."""
    values = torch.randn(2, 3, 16) * torch.tensor([1e-3, 1.0, 1e6]).view(1, 3, 1)
    values[1, 2] = 0.0
    wire = torch.empty(2, row_bytes(3, 16), dtype=torch.uint8)
    back, left = torch.empty_like(values), values.clone()
    quantize(left, wire, torch.empty_like(values))
    dequantize(wire, back)
    half_scale = values.abs().amax(-1, keepdim=True) / 254
    assert bool(((values - back).abs() <= half_scale * 1.001).all())
    torch.testing.assert_close(back + left, values, rtol=1e-6, atol=0)
