# mypy: disable-error-code="union-attr"
"""One script under every strategy: the same training, the same numbers, and plain words for what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from testbed.one_training import Setting, assert_equals_oracle, check_mean, check_reduce, oracle, train, whole_loss
from testbed.present import present
from testbed.worlds import world
from torch import nn

import ddp
from ddp.comm import objects
from ddp.comm.reduction import combine, payload_of
from ddp.errors import ArgumentError, LaunchEnvironmentError, UnsupportedError
from ddp.strategies.parameter_server.rendezvous import ProcessRole
from ddp.strategies.parameter_server.strategy import _world_of as world_of_role
from ddp.strategies.strategy import Strategy
from ddp.training.optimizer_step import average_gradients
from ddp.world import World

SETTINGS = [
    Setting("mlp", "sgd"),
    Setting("odd", "adamw", groups=3),
    Setting("norm", "sgd", batch=12),
    Setting("words", "sgd"),
    Setting("bag", "sparse adam"),
]
RUNS = [
    *((name, setting) for setting in SETTINGS for name in ("all_reduce", "central_storage")),
    ("local_sgd", Setting("mlp", "plain sgd", options={"every": 1})),
    ("all_reduce", Setting("mlp", "adamw", options={"communication": "gloo", "bucket_cap_mb": 0.001})),
]


@world(1, 3)
@pytest.mark.parametrize(("name", "setting"), RUNS, ids=lambda value: getattr(value, "model", value))
def test_synchronous_strategies_equal_one_process(name: str, setting: Setting) -> None:
    strategy = ddp.strategy(name, **setting.options)
    has_buffers = name != "all_reduce" or strategy.is_main  # elsewhere, replica 0's until the last forward
    assert_equals_oracle(strategy, setting, has_buffers=has_buffers, has_state=name != "local_sgd")


@world(3)
def test_averaging_every_fourth_step_reaches_the_loss() -> None:
    setting = Setting("mlp", "sgd", epochs=8, options={"every": 4})
    strategy = ddp.strategy("local_sgd", **setting.options)
    model, _, _ = train(strategy, setting)
    expected, _, _ = oracle(setting, strategy.replicas)
    assert whole_loss(model) < 1.25 * whole_loss(expected)


@world(3)
def test_losses_and_metrics_are_those_of_the_global_batch() -> None:
    """Weights, losses of tokens, unequal shares and every form of a value."""
    strategy = ddp.strategy("all_reduce")
    rank, replicas = strategy.replica, strategy.replicas
    check_mean(strategy)
    check_reduce(strategy)
    different: list[tuple[tuple[str, Any], str]] = [
        (("sum", torch.zeros(2 + rank)), r"replica 1 gives float32\[3\], replica 0 float32\[2\]"),
        (("sum", {f"loss{rank}": 1.0}), "all replicas must give values of the same form"),
        (("sum" if rank else "mean", 1.0), r"replica 0 calls reduce\('mean'\) where replica 1 calls reduce\('sum'\)"),
    ]
    for arguments, message in different:
        with pytest.raises(ArgumentError, match=message):
            strategy.reduce(*arguments)
    assert strategy.reduce("max", rank) == replicas - 1, "a refusal leaves nothing behind"
    big = torch.full((1000,), float(rank))  # more than fits into the first round
    assert torch.equal(strategy.reduce("sum", big), torch.full((1000,), float(sum(range(replicas)))))


@world(3)
def test_large_tensors_are_not_gathered() -> None:
    """Sums of large tensors and averages of gradients are all-reduced: what is gathered is small."""
    strategy = ddp.strategy("all_reduce")
    rank, replicas = strategy.replica, strategy.replicas
    gathered: list[Any] = []
    reduced: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:

        def counting(original: Callable[..., Any], calls: list[int], place: int) -> Callable[..., Any]:
            def counted(*given: Any, **options: Any) -> Any:
                calls.append(given[place].nbytes)
                return original(*given, **options)

            return counted

        patch.setattr(objects, "_all_gather", counting(objects._all_gather, gathered, 0))
        patch.setattr(dist, "all_reduce", counting(dist.all_reduce, reduced, -1))
        patch.setattr("ddp.comm.reduction._PIECE_NUMEL", 70_000)
        generator = torch.Generator().manual_seed(rank)
        every = [torch.rand(300, 400, generator=torch.Generator().manual_seed(each)) for each in range(replicas)]
        mine = {"a": [torch.rand(300, 400, generator=generator)], "count": rank}
        mean = strategy.reduce("mean", mine)
        assert torch.equal(mean["a"][0], torch.stack(every).double().mean(0).float())
        assert mean["count"] == (replicas - 1) / 2
        total = strategy.reduce("sum", torch.full((200_000,), rank == 1))
        assert (total.dtype, total.unique().tolist()) == (torch.int64, [1])
        assert torch.equal(strategy.reduce("mean", torch.full((100_000,), rank))[:2], torch.full((2,), mean["count"]))
        assert sum(reduced) == 8 * (120_000 + 200_000 + 100_000)
        assert len(reduced) == 2 + 3 + 2
        with pytest.raises(ArgumentError, match=r"replica 1 gives \{a large float32\[150, 801\]: a number"):
            strategy.reduce("sum", torch.zeros(150, 800 + min(rank, 1)))

        reduced.clear()
        net = nn.Sequential(nn.Linear(300, 400), nn.Linear(400, 2, dtype=torch.bfloat16), nn.Linear(2, 2))
        for parameter in net[:2].parameters():
            parameter.grad = torch.full_like(parameter, rank)
        net[0].bias.grad = torch.full((400,), 6.0) if rank == 0 else None
        average_gradients(strategy, net)
        assert net[2].weight.grad is None
        assert [each.grad.unique().tolist() for each in net[:2].parameters()] == [
            [mean["count"]], [6 / replicas], [mean["count"]], [mean["count"]]
        ]  # fmt: skip
        assert reduced == [4 * (300 * 400 + 400), 4 * (400 * 2 + 2)], "half precision in single"
        net[0].weight.grad = torch.zeros(400, 300).to_sparse() if rank == 1 else None
        with pytest.raises(UnsupportedError, match="a sparse gradient under strategy 'all_reduce'"):
            average_gradients(strategy, net)
        assert max(gathered) <= 1000


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    """Close the group that a strategy in this process has joined."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("DTRAIN_STRATEGY", raising=False)
    monkeypatch.delenv("DTRAIN_ROLES", raising=False)
    return monkeypatch


def test_the_variable_names_a_strategy_with_options(variables: pytest.MonkeyPatch) -> None:
    assert ddp.strategy().name == "all_reduce"
    variables.setenv("DTRAIN_STRATEGY", "parameter_server, mode=bounded, staleness=5,lost_after_s=2.5,encrypt=true")
    found: Any = ddp.strategy(staleness=7)
    assert found.name == "parameter_server"
    assert (found.options.mode, found.options.staleness) == ("bounded", 7), "an argument counts more"
    assert (found.options.lost_after_s, found.options.encrypt) == (2.5, True)
    assert ddp.strategy("local_sgd").name == "local_sgd", "a name as well"


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("mirrored", "no strategy 'mirrored'; there are 'all_reduce', 'parameter_server', 'central_storage'"),
        ("all_reduce,fast", "'fast' is no option; write name,option=value"),
        ("all_reduce,mode=async", "'all_reduce' has no option 'mode'; it has .*communication"),
        ("local_sgd,each=3", "has no option 'each'; it has after, communication, every"),
        ("parameter_server,model=async", "has no option 'model'; it has .*mode"),
        ("parameter_server,options=1", "has no option 'options'"),
        ("central_storage,self=1", "has no option 'self'"),
    ],
)
def test_unknown_strategies_and_options_are_named(variable: str, message: str, variables: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=message):
        ddp.strategy(variable)
    variables.setenv("DTRAIN_STRATEGY", variable)
    with pytest.raises(ArgumentError, match=message):
        ddp.strategy()


@pytest.mark.parametrize("name", ["all_reduce", "central_storage", "local_sgd"])
def test_servers_that_no_one_would_ask_are_refused(name: str, variables: pytest.MonkeyPatch) -> None:
    variables.setenv("DTRAIN_ROLES", "default:2,ps:2,evaluator:1")
    with pytest.raises(LaunchEnvironmentError, match="start it without --ps and --evaluator") as refused:
        ddp.strategy(name)
    assert "2 of role ps and 1 of role evaluator" in str(refused.value)


def test_what_cannot_be_prepared_is_refused(variables: pytest.MonkeyPatch) -> None:
    strategy = ddp.strategy("all_reduce")
    model, other = nn.Linear(2, 2), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ArgumentError, match=r"prepare\(SGD, Linear\): it takes a torch.nn.Module and"):
        strategy.prepare(optimizer, model)  # type: ignore[arg-type]  # that is what is tested
    with pytest.raises(ArgumentError, match="2 parameters that are not the model's, the first of shape"):
        strategy.prepare(model, torch.optim.SGD(other.parameters()))
    prepared, _ = strategy.prepare(model, optimizer)
    with pytest.raises(ArgumentError, match="is in a DistributedDataParallel already"):
        strategy.prepare(prepared, optimizer)
    assert strategy.unwrap(prepared) is model
    assert list(strategy.evaluations()) == []


class OneOf(Strategy):
    """One of several replicas, of which nothing is asked."""

    name = "one of several"

    def __init__(self, replicas: int) -> None:
        super().__init__(World(0, replicas, 0, replicas, 0, torch.device("cpu"), "none"))

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, optimizer


def test_the_mean_is_over_the_batch_that_was_handed_out() -> None:
    strategy = OneOf(3)
    losses = torch.tensor([1.0, 2.0], requires_grad=True)
    assert strategy.mean(losses).item() == 0.5, "of 2 times 3 samples, as nothing says otherwise"
    loader = strategy.loader(torch.utils.data.TensorDataset(torch.arange(10)), global_batch_size=7)
    sizes = [strategy.mean(torch.ones(len(x))).item() * whole for (x,), whole in zip(loader, (7, 3), strict=True)]
    assert sizes == pytest.approx([3, 1])
    loss = strategy.mean(losses, torch.tensor([0.0, 2.0]), global_batch_size=8)
    assert loss.item() == 0.5
    loss.backward()
    assert present(losses.grad).tolist() == [0.0, 2 / 8 * 3], "times the replicas, because strategies average"
    assert strategy.mean(torch.ones(0), global_batch_size=4).item() == 0.0


@pytest.mark.parametrize(
    ("losses", "arguments", "message"),
    [
        (torch.tensor(1.0), {}, 'reduction="none"'),
        (torch.ones(3), {"weights": torch.ones(2)}, r"3 losses, but weights of shape \(2,\)"),
        (torch.ones(3), {"global_batch_size": 2}, "3 losses of this replica, but a global batch of 2"),
    ],
)
def test_losses_that_cannot_be_averaged_are_refused(
    losses: torch.Tensor, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        OneOf(2).mean(losses, **arguments)


def test_alone_numbers_are_their_own(variables: pytest.MonkeyPatch) -> None:
    strategy = ddp.strategy("all_reduce")
    check_mean(strategy)
    check_reduce(strategy)


numbers = st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False, width=32)


def _reduced(operation: str, values: Sequence[Any]) -> list[Any]:
    payloads = [payload_of(operation, value) for value in values]
    return [combine(value, payloads) for value in values]


@given(st.lists(numbers, min_size=1, max_size=5))
def test_numbers_are_exact_and_the_same_everywhere(values: list[float]) -> None:
    for operation, expected in (
        ("sum", sum(values) if all(isinstance(v, int) for v in values) else math.fsum(values)),
        ("max", max(values)),
        ("min", min(values)),
    ):
        assert _reduced(operation, [{"x": (value,)} for value in values]) == [{"x": (expected,)}] * len(values)


@given(
    st.sampled_from(
        [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(1, 4),
)
def test_tensors_of_any_kind_are_reduced(dtype: torch.dtype, shape: list[int], replicas: int) -> None:
    values = [torch.randint(0, 2, shape).to(dtype) for _ in range(replicas)]
    stacked = torch.stack([value.double() for value in values])
    for operation, expected in (("sum", stacked.sum(0)), ("mean", stacked.mean(0)), ("max", stacked.amax(0))):
        for found in _reduced(operation, values):
            assert found.shape == expected.shape
            torch.testing.assert_close(found.double(), expected, rtol=2e-2 if dtype.itemsize == 2 else 1e-6, atol=0)
    if dtype.is_floating_point:
        assert _reduced("sum", values)[0].dtype == dtype


@pytest.mark.parametrize(
    ("operation", "value", "message"),
    [
        ("median", 1, r"reduce\('median'\): it must be one of 'sum', 'mean', 'max', 'min'"),
        ("sum", {"loss": [1, "two"]}, r"value\['loss'\]\[1\] is a str"),
        ("sum", None, "value is a NoneType"),
        ("sum", torch.ones(2, dtype=torch.complex64), "complex64"),
        ("sum", torch.eye(2).to_sparse(), "give a dense one"),
    ],
)
def test_what_cannot_be_reduced_is_named(operation: str, value: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        payload_of(operation, value)


def test_each_of_two_servers_on_a_host_is_a_world_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    world = world_of_role(ProcessRole("ps", index=1, workers=2, servers=2))
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (0, 1, 0, 1)
