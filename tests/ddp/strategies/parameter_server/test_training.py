# mypy: disable-error-code="assignment, index, operator"
"""Training with parameter servers: equal to one process where it is synchronous, as good where it is not.

Workers, servers and an evaluator are ranks of a test world, without a launcher; test_faults.py has one.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.one_training import (
    F64,
    Setting,
    assert_equals_oracle,
    build,
    check_mean,
    check_reduce,
    data,
    oracle,
    train,
    whole_loss,
)
from testbed.same import assert_same
from testbed.seeds import Seeds
from testbed.servers import KEY, in_roles, start, with_servers
from testbed.simulated_device import DEVICE, register, simulated_device
from testbed.worlds import world
from torch import nn
from torch.distributed import TCPStore
from torch.nn import functional as F

from ddp.errors import ArgumentError, BackwardError, KeyRefusedError, LayoutMismatchError, VersionMismatchError
from ddp.strategies.parameter_server import endpoints
from ddp.strategies.parameter_server.strategy import ParameterServer


def _await_workers(count: int) -> None:
    """Wait until so many are here: one that comes later would go on from where the others have come to."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    if store.add("workers here", 1) == count:
        store.set("all workers are here", "yes")
    store.wait(["all workers are here"])


def _await(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15  # less than the servers wait
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.002)


NETWORK = {"shared_memory": False}  # as between hosts
ROWS = {"chunk_mb": 64 / 2**20}  # of 64 bytes: every larger parameter is split
MORE_ROWS = {"chunk_mb": 1024 / 2**20}


@world(5)
@pytest.mark.parametrize(
    ("workers", "servers", "setting"),
    [
        (2, 1, Setting("mlp", "adamw")),
        (4, 1, Setting("mlp", "sgd", options=NETWORK)),
        (2, 3, Setting("odd", "sgd", groups=3, options={**NETWORK, **ROWS})),
        (3, 2, Setting("odd", "adamw", groups=3, options=ROWS)),
        (2, 2, Setting("norm", "sgd", batch=12, options=NETWORK)),
        (3, 2, Setting("words", "sgd")),
        (2, 2, Setting("words", "plain sgd", options=NETWORK)),
        (3, 1, Setting("bag", "sparse adam", options={**NETWORK, **MORE_ROWS})),
        (2, 1, Setting("mlp", "sgd", options={**NETWORK, "encrypt": True})),
    ],
)
def test_sync_equals_one_process_on_the_whole_batch(workers: int, servers: int, setting: Setting) -> None:
    def body() -> None:
        strategy = start(setting)
        assert_equals_oracle(strategy, setting)
        strategy.close()

    in_roles(workers, servers, body)


@pytest.mark.slow
@world(4)
@pytest.mark.parametrize(
    ("workers", "servers", "setting"),
    [
        (2, 1, Setting("mlp", "adamw")),
        (2, 2, Setting("odd", "sgd", groups=3, options={**NETWORK, **ROWS})),
        (3, 1, Setting("odd", "adamw", groups=3, options=ROWS)),
        (2, 2, Setting("norm", "sgd", batch=12, options=NETWORK)),
        (2, 1, Setting("mlp", "sgd", options={"mode": "async", "overlap": True})),
    ],
)
def test_copies_of_a_device_may_be_late(workers: int, servers: int, setting: Setting, seeds: Seeds) -> None:
    """The same with workers whose parameters are on the simulated device."""

    def body() -> None:
        with simulated_device(seeds(1)[0] + dist.get_rank()) as device:
            strategy = start(setting)
            model, _, losses = train(strategy, setting)
            found = {name: value.cpu() for name, value in model.state_dict().items()}
            assert next(model.parameters()).device == torch.device(DEVICE)
            assert any("copy" in call for call in device.calls)
            if setting.options.get("mode") != "async":
                expected, _, its_losses = oracle(setting, strategy.replicas)
                assert_same(strategy.reduce("sum", losses), its_losses, "losses")
                assert_same(found, dict(expected.state_dict()), "model")
            strategy.close()

    register()
    in_roles(workers, servers, body)


@world(1)
def test_alone_there_are_no_servers() -> None:
    setting = Setting("odd", "adamw", groups=2, options={"mode": "async"})
    strategy = start(setting)
    assert (strategy.replica, strategy.replicas, strategy.is_main) == (0, 1, True)
    assert_equals_oracle(strategy, setting)
    assert strategy.statistics() == {"worker": {}, "servers": []}
    strategy.close()


@with_servers(2, 1)
def test_only_touched_rows_travel() -> None:
    rows, steps = 20_000, 4
    strategy = start(Setting(options={"shared_memory": False}))
    model = nn.EmbeddingBag(rows, 16, mode="sum", sparse=True, dtype=F64)
    bag, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    table = model.weight.numel() * 8
    before = strategy.statistics()["worker"]
    for step in range(steps):
        words = torch.randint(rows, (8, 4), generator=torch.Generator().manual_seed(step * 2 + strategy.replica))
        strategy.mean(bag(words)).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = strategy.statistics()["worker"]
    for way in ("bytes_out", "bytes_in"):
        assert 0 < after[way] - before[way] < table / 50, (way, before, after)
    mine = model.weight.detach().clone()
    strategy.sync()  # every row
    assert torch.equal(mine, model.weight), "rows that the other replica touched came as well"
    strategy.close()


@with_servers(2, 1)
def test_another_key_version_or_model_is_refused() -> None:
    """A worker with another key, version or model is refused, and may come again when that is mended."""
    setting = Setting("mlp", "sgd", epochs=1)
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DTRAIN_RUN_KEY", "ab" * 32)
            with pytest.raises(KeyRefusedError, match="key") as refused:
                start(setting).prepare(*build(setting))
            assert KEY not in str(refused.value)
            assert "ab" * 32 not in str(refused.value)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(endpoints, "own_version", lambda: "0.0.1")
            with pytest.raises(VersionMismatchError, match=r"0\.0\.1"):
                start(setting).prepare(*build(setting))
        odd = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 4)).to(F64)
        with pytest.raises(LayoutMismatchError, match=r"worker 1 has another model .*2\.weight") as differs:
            start(setting).prepare(odd, torch.optim.SGD(odd.parameters(), lr=0.2, momentum=0.9, nesterov=True))
        assert (differs.value.entry, differs.value.rank) == ("2.weight", 1)
        with pytest.raises(LayoutMismatchError, match="'async'"):
            start(setting, mode="async").prepare(*build(setting))
    strategy = start(setting)
    assert_equals_oracle(strategy, setting)
    strategy.close()


@with_servers(1, 1)
def test_changes_after_prepare_are_refused() -> None:
    setting = Setting("mlp", "sgd")
    strategy = start(setting)
    model, users = build(setting)
    model, optimizer = strategy.prepare(model, users)
    x, y = data().tensors
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ArgumentError, match=r"call step\(\) of the one that prepare\(\) returned"):
        users.step()
    with pytest.raises(ArgumentError, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ArgumentError, match="twice"):
        strategy.prepare(*build(setting))
    with pytest.raises(ArgumentError, match="evaluator"):
        next(strategy.evaluations())
    weight = model[0].weight
    changes: list[tuple[Callable[[], object], Callable[[], object], str]] = [
        (lambda: setattr(model, "more", nn.Linear(2, 2)), lambda: delattr(model, "more"), "more"),
        (
            lambda: setattr(model[0], "weight", nn.Parameter(weight.detach().clone())),
            lambda: setattr(model[0], "weight", weight),
            "0.weight",
        ),
    ]
    place = weight.data
    changes.append(
        (
            lambda: setattr(weight, "data", place.clone()),
            lambda: setattr(weight, "data", place),
            "moved to other memory",
        )
    )
    for change, undo, what in changes:
        change()
        with pytest.raises(BackwardError, match=what) as refused:
            optimizer.step()
        assert "after prepare()" in str(refused.value)
        undo()
    optimizer.step()  # nothing was sent before
    hooked: list[object] = []
    optimizer.register_state_dict_pre_hook(hooked.append)
    state = optimizer.state_dict()
    assert len(hooked) == 1
    with pytest.raises(ArgumentError, match="other param groups"):
        optimizer.load_state_dict({**state, "param_groups": []})
    strategy.close()


@with_servers(3, 2)
def test_numbers_are_reduced_without_a_group() -> None:
    """mean and reduce, without a process group."""
    setting = Setting()
    strategy = start(setting)
    if strategy.role == "worker":
        with pytest.raises(ArgumentError, match=r"call prepare\(\) before reduce"):
            strategy.reduce("sum", 1)
    strategy.prepare(*build(setting))
    check_mean(strategy)
    check_reduce(strategy)
    with pytest.raises(ArgumentError, match=r"replica 1 gives .* all replicas must give values of the same"):
        strategy.reduce("sum", torch.zeros(2 + strategy.replica))
    big = torch.full((100_000,), float(strategy.replica))
    assert torch.equal(strategy.reduce("sum", big), torch.full((100_000,), 3.0))
    strategy.close()


@pytest.mark.slow
@with_servers(2, 1)
def test_no_size_is_too_large_for_a_message() -> None:
    """Frozen tensors and sums larger than a message, and more small tensors than one holds."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = torch.nn.Parameter(torch.full((18 << 20,), float(torch.rand(()))), requires_grad=False)
            self.small = torch.nn.ParameterList(torch.zeros(2) for _ in range(2000))

    strategy = ParameterServer(shared_memory=False)
    torch.manual_seed(strategy.replica)
    model = Model()
    plain = torch.optim.Adam(model.small.parameters(), 0.1)
    model, optimizer = strategy.prepare(model, plain)
    for parameter in model.small:
        parameter.grad = torch.ones(2)
    optimizer.step()
    assert model.small[1999][0].item() == pytest.approx(-0.1)
    state = optimizer.state_dict()["state"]
    assert len(state) == 2000
    assert torch.equal(state[1999]["exp_avg"], torch.full((2,), 1.0 - 0.9)), state[1999]
    ends = strategy.reduce("max", model.frozen)  # 75 MB of each
    assert torch.equal(ends, model.frozen), "it is replica 0's everywhere"
    strategy.close()


@with_servers(2, 1)
def test_a_scaler_leaves_out_one_gradient() -> None:
    """A GradScaler that finds an inf on one worker: that gradient counts as zeros, and no one waits."""
    strategy = ParameterServer()
    model, optimizer = strategy.prepare(*(lambda m: (m, torch.optim.SGD(m.parameters(), 1.0)))(torch.nn.Linear(1, 1)))
    before = model.bias.item()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    factor = torch.tensor(float("inf") if strategy.replica else 1.0)
    scaler.scale(model(torch.ones(1, 1)).sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    assert model.bias.item() == pytest.approx(before - 0.5), "zeros of the one that has none"
    strategy.close()


@with_servers(2, 2)
def test_a_state_of_torch_goes_on() -> None:
    """What torch has saved is taken over: weights before `prepare`, the optimizer's state after it."""
    whole = Setting("odd", "adamw", groups=2, decay=1.0)
    first = Setting("odd", "adamw", groups=2, decay=1.0, epochs=1)
    saved, its_optimizer, _ = oracle(first, 2)
    expected, whole_optimizer, _ = oracle(whole, 2)
    strategy = start(whole)
    model, optimizer = build(whole, seed=77)
    if strategy.replica == 0:
        model.load_state_dict(saved.state_dict())
    model, optimizer = strategy.prepare(model, optimizer)
    optimizer.load_state_dict(its_optimizer.state_dict())
    loader = strategy.loader(data(), global_batch_size=whole.batch, shuffle=True)
    loader.set_epoch(1)
    for _ in loader.epochs(whole.epochs):
        for x, y in loader:
            strategy.mean(F.cross_entropy(model(x), y, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(dict(model.state_dict()), dict(expected.state_dict()), "model")
    assert_same(optimizer.state_dict(), whole_optimizer.state_dict(), "optimizer")
    strategy.close()


@pytest.mark.slow
@world(4)
def test_modes_that_do_not_wait_reach_the_loss_within_a_fourth() -> None:
    modes: list[dict[str, Any]] = [
        {"mode": "async"},
        {"mode": "async", "overlap": True},
        {"mode": "bounded", "staleness": 1, "overlap": True, **NETWORK},
        {"backup_workers": 1},
    ]
    for options in modes:
        setting = Setting("mlp", "plain sgd", epochs=8, options=options)

        def body(setting: Setting = setting) -> None:
            strategy = start(setting)
            model, _, _ = train(strategy, setting, begin=lambda: _await_workers(3))
            expected, _, _ = oracle(setting, strategy.replicas)
            assert whole_loss(model) < 1.25 * whole_loss(expected), setting.options
            strategy.close()

        in_roles(3, 1, body)


@pytest.mark.slow
@world(3)
def test_short_numbers_reach_the_loss_within_a_tenth() -> None:
    """Half and quarter of the bytes; the loss is that of the oracle within a factor."""
    sent: dict[str | None, float] = {}
    for compression in (None, "fp16", "bf16", "int8"):
        options = {"compression": compression, "shared_memory": False}
        setting = Setting("mlp", "adamw", epochs=4, dtype=torch.float32, options=options)

        def body(setting: Setting = setting, compression: str | None = compression) -> None:
            strategy = start(setting)
            model, _, _ = train(strategy, setting)
            expected, _, _ = oracle(setting, strategy.replicas)
            loss, its_loss = whole_loss(model), whole_loss(expected)
            assert 1 / 1.1 < loss / its_loss < 1.1, (compression, loss, its_loss)
            if compression is None:
                assert_close = torch.testing.assert_close
                assert_close(dict(model.state_dict()), dict(expected.state_dict()), rtol=1e-3, atol=1e-4)
            if not strategy.is_main:  # replica 0 has sent its values as well
                sent[compression] = strategy.statistics()["worker"]["bytes_out"]
            strategy.close()

        in_roles(2, 1, body)
    if sent:
        assert sent["fp16"] == sent["bf16"] == sent[None] / 2
        assert sent["int8"] < sent[None] / 3


@world(5)
@pytest.mark.parametrize(("staleness", "servers"), [(2, 1), pytest.param(0, 2, marks=pytest.mark.slow)])
def test_clocks_drift_no_further_apart_than_the_staleness(staleness: int, servers: int, tmp_path: Path) -> None:
    """`begun` and `made` are of all workers, in memory that they share: counts of steps begun and made."""
    workers, steps = 3, 14
    counts = torch.from_file(str(tmp_path / "counts"), shared=True, size=2 * workers, dtype=torch.int64)
    begun, made = counts.view(2, workers)

    def body() -> int:
        setting = Setting(options={"mode": "bounded", "staleness": staleness})
        strategy = start(setting)
        model, optimizer = strategy.prepare(*build(setting))
        x, y = data().tensors
        strategy.reduce("sum", 0)  # all are there
        apart = 0
        for step in range(steps):
            if strategy.replica == 1 and step == 4:
                _await(lambda: int(made[[0, 2]].min()) >= step + staleness)  # noqa: B023  # it is called now
            F.cross_entropy(model(x), y).backward()
            begun[strategy.replica] = step + 1
            optimizer.step()
            optimizer.zero_grad()
            made[strategy.replica] = step + 1
            apart = max(apart, step + 1 - int(begun.min()))
        strategy.close()
        return apart

    apart = in_roles(workers, servers, body)
    if apart is not None:
        assert apart <= staleness, apart
        if dist.get_rank() != 1:
            assert apart == staleness, "it was let go on as far as it may"


@world(4)
def test_no_one_waits_for_a_slow_worker_beyond_those_needed(tmp_path: Path) -> None:
    workers, steps = 3, 12
    made = torch.from_file(str(tmp_path / "made"), shared=True, size=workers, dtype=torch.int64)

    def body() -> None:
        setting = Setting(options={"backup_workers": 1})
        strategy = start(setting)
        model, optimizer = strategy.prepare(*build(setting))
        x, y = data().tensors
        strategy.reduce("sum", 0)
        first = None
        for step in range(steps):
            if strategy.replica == 1 and step == 2:
                _await(lambda: int(made[[0, 2]].min()) == steps)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            first = loss.item() if first is None else first
            optimizer.step()
            optimizer.zero_grad()
            made[strategy.replica] = step + 1
        if strategy.replica == 1:
            assert sum(server["dropped"] for server in strategy.statistics()["servers"]) > 0
            assert strategy.step > steps, "it goes on where the others are"
        else:
            assert made[1] < steps // 2, "the slow one is far behind"
        assert loss.item() < 0.8 * first
        strategy.close()

    in_roles(workers, 1, body)


@world(4)
@pytest.mark.parametrize("options", [{"mode": "async"}, {"shared_memory": False}])
def test_an_evaluator_sees_the_training_to_its_end(tmp_path: Path, options: dict[str, Any]) -> None:
    """Workers wait in their first two steps until it has seen as many; the names of files are the steps that it saw."""

    def body() -> tuple[int, dict[str, Any]]:
        setting = Setting("norm", "sgd", batch=12, options=options)
        strategy = start(setting)
        steps = [0]
        if strategy.role == "evaluator":
            model, _ = strategy.prepare(*build(setting, seed=50))
            assert not strategy.is_main
            assert strategy.reduce("sum", 7) == 7, "its own: it is no replica"
            steps.clear()
            for step in strategy.evaluations(every_s=0.05):
                steps.append(step)
                Path(tmp_path, str(step)).touch()
            assert steps == sorted(steps)
        else:
            made = itertools.count(1)

            def wait_for_evaluator() -> None:
                count = min(next(made), 2)
                _await(lambda: len(os.listdir(tmp_path)) >= count)

            model, _, _ = train(strategy, setting, each_step=wait_for_evaluator)
            strategy.reduce("sum", 0)  # no one trains any more
            strategy.sync()
        strategy.close()
        return len(set(steps)), {name: value.clone() for name, value in model.state_dict().items()}

    seen = in_roles(2, 1, body, evaluator=True)
    ends: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ends, seen)
    assert ends[3][0] > 2, "more than the beginning and the end"
    for replica in (0, 1):
        assert_same(ends[3][1], ends[replica][1], f"worker {replica}")
