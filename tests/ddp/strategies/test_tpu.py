# mypy: disable-error-code="no-any-return"
"""Strategy "tpu" without torch_xla, and on two hosts with a stand-in; tests/full/test_tpu.py has the real one."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.one_training import F64, Setting, assert_equals_oracle, build, data, mlp, oracle
from testbed.same import assert_same
from testbed.worlds import world
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ddp
from ddp import rng
from ddp.comm.objects import gather_values
from ddp.errors import ArgumentError, DdpError, LaunchEnvironmentError, LayoutMismatchError, UnsupportedError

PER_PROCESS = 2


class StandIn:
    """As much of torch_xla as `ddp.strategies.tpu` uses."""

    def __init__(self, processes: int | None = None, *, first_device_is_first: bool = False) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.processes = self.size if processes is None else processes
        self.first_device_is_first = first_device_is_first
        self.flushes = 0
        self.seeds: list[int] = []

    def install(self) -> StandIn:
        xla, runtime, distributed, spmd, core, model = (
            ModuleType(f"torch_xla{name}")
            for name in ("", ".runtime", ".distributed", ".distributed.spmd", ".core", ".core.xla_model")
        )
        xla.__dict__.update(__version__="0", device=lambda: torch.device("cpu"), real_devices=self._devices)
        xla.__dict__.update(sync=self._sync, manual_seed=self.seeds.append)
        xla.__dict__.update(runtime=runtime, distributed=distributed, core=core)
        runtime.__dict__.update(is_spmd=lambda: True, process_count=lambda: self.processes)
        distributed.__dict__.update(spmd=spmd)
        spmd.__dict__.update(Mesh=self._mesh, mark_sharding=self._mark_sharding)
        core.__dict__.update(xla_model=model)
        model.__dict__.update(get_rng_state=lambda: self.seeds[-1], set_rng_state=self.seeds.append)
        sys.modules.update({module.__name__: module for module in (xla, runtime, distributed, spmd, core, model)})
        # Each process is on a host of its own.
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        return self

    def _of(self, rank: int) -> list[int]:
        first = rank * PER_PROCESS if self.first_device_is_first else (self.size - 1 - rank) * PER_PROCESS
        return list(range(first, first + PER_PROCESS))

    def _devices(self) -> list[str]:
        return [f"TPU:{number}" for number in self._of(self.rank)]

    def _sync(self) -> None:
        self.flushes += 1

    def _mesh(self, ids: list[int], shape: tuple[int, ...], names: tuple[str, ...]) -> SimpleNamespace:
        assert (len(ids),) == shape
        assert sorted(ids) == list(range(self.size * PER_PROCESS))
        return SimpleNamespace(ids=ids, names=names)

    def _mark_sharding(self, tensor: torch.Tensor, mesh: Any, spec: tuple[Any, ...]) -> None:
        assert spec == (*mesh.names, *[None] * (tensor.dim() - 1))
        each = -(-len(tensor) // len(mesh.ids))
        for rank in range(self.size):
            for device in self._of(rank):
                place = mesh.ids.index(device)
                dist.broadcast(tensor[place * each : (place + 1) * each], src=rank)


class WrongOrder(StandIn):
    """Deals rows out by the devices' numbers, whatever the mesh says."""

    def _mark_sharding(self, tensor: torch.Tensor, mesh: Any, spec: tuple[Any, ...]) -> None:
        super()._mark_sharding(tensor, SimpleNamespace(ids=sorted(mesh.ids), names=mesh.names), spec)


class Counted(torch.utils.data.Dataset[Any]):
    """Numbers, of which it notes which were asked for."""

    def __init__(self, loaded: list[int]) -> None:
        self._loaded = loaded

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self._loaded.append(index)
        return torch.tensor(float(index), dtype=F64), index


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


class StopsOnTheSecond(ddp.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        if dist.get_rank() == 1 and epoch == 1:
            self.trainer.stop()


class FailsOnTheSecond(ddp.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError("no space left")


@world(2)
def test_hosts_share_out_each_batch() -> None:
    """Batches of 11, of which the last is a single sample, to the numbers of one process on the whole batch."""
    stand_in = StandIn().install()
    strategy: Any = ddp.strategy("tpu")
    assert (strategy.replica, strategy.replicas, strategy.devices) == (0, 1, 4)
    assert strategy.is_main == (stand_in.rank == 0)
    loaded: list[int] = []
    for setting in (Setting("mlp", "sgd"), Setting("odd", "adamw", groups=3), Setting("norm", "sgd", batch=12)):
        assert_equals_oracle(strategy, setting)
    for x, y in strategy.loader(Counted(loaded), global_batch_size=11):
        assert len(x) == len(y)
        assert torch.equal(x, y.double()), "the rows of a sample stay together, in the order of the data set"
    mine = [*range(6), *range(11, 17), 22] if stand_in.rank == 0 else [*range(6, 11), *range(17, 22)]
    form = [] if stand_in.rank == 0 else [0]  # of the batch in which it has no sample
    assert loaded == mine + form, "each process loads the rows of its devices, 3 a device, and no others"


@world(2)
def test_shares_of_a_sampler_become_one_batch() -> None:
    stand_in = StandIn().install()
    strategy: Any = ddp.strategy("tpu")
    dataset = TensorDataset(torch.arange(16.0), torch.arange(16))
    sampler = ddp.DistributedSampler(dataset, shuffle=False)
    batches = [strategy.shard(batch) for batch in DataLoader(dataset, 4, sampler=sampler)]
    assert [x.tolist() for x, _ in batches] == [[0, 2, 4, 6, 1, 3, 5, 7], [8, 10, 12, 14, 9, 11, 13, 15]]
    assert all(torch.equal(x, y.float()) for x, y in batches)
    assert strategy.mean(torch.ones(8)).item() == 1.0
    with pytest.raises(
        ArgumentError,
        match=r"shape \(3,\), but 4 samples of this process"
        if (stand_in.rank == 0)
        else r"shape \(3,\), but 2 samples of this process",
    ):
        strategy.shard(torch.ones(3))


@world(2)
def test_processes_differ_only_where_they_may() -> None:
    rank = StandIn().install().rank
    strategy = ddp.strategy("tpu")
    equal = {"right": torch.tensor([3.0, 0.1]), "count": 7, "rate": 0.1}
    for operation in ("sum", "mean", "max", "min"):
        found = strategy.reduce(operation, equal)
        assert found["count"] == 7
        assert_same(found, {**equal, "count": found["count"]})
        assert type(found["count"]) is (float if operation == "mean" else int) or operation == "mean"
    assert strategy.reduce("max", rank) == 1
    assert strategy.reduce("min", rank) == 0
    assert strategy.reduce("sum", [True, rank == 1, float(rank)]) == [1.0, 0.5, 0.5]
    with pytest.raises(ArgumentError, match="must give values of the same form"):
        strategy.reduce("sum", [1] * (rank + 1))


@world(2)
def test_prepared_models_are_those_of_the_first_process() -> None:
    """Weights that are tied stay so, an optimizer keeps its parameters and state, and random numbers are the same."""
    stand_in = StandIn().install()
    strategy = ddp.strategy("tpu")
    torch.manual_seed(stand_in.rank)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    given = [*model.parameters()]
    prepared, same = strategy.prepare(model, optimizer)
    assert prepared is strategy.unwrap(model) is model
    assert same is optimizer
    assert model.first.weight is model.last.weight is optimizer.param_groups[0]["params"][0] is given[0]
    assert strategy.reduce("max", given[0].detach()).equal(strategy.reduce("min", given[0].detach()))
    assert stand_in.seeds == [0], "the first process's"
    before = stand_in.flushes
    F.mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 4)).backward()
    optimizer.step()
    assert stand_in.flushes == before + 1
    random = gather_values(rng.capture())[0]
    assert random["xla"] == 0
    rng.reseed(random, stand_in.rank)
    assert strategy.reduce("max", stand_in.seeds[-1] % 2**52) == strategy.reduce("min", stand_in.seeds[-1] % 2**52)
    other = nn.Linear(2, 2 + stand_in.rank)
    with pytest.raises(LayoutMismatchError, match=r"rank 1 wraps another module than rank 0.*'weight'"):
        strategy.prepare(other, torch.optim.SGD(other.parameters()))


@world(2)
def test_a_callback_that_fails_on_one_process_ends_all() -> None:
    StandIn().install()
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ddp.Trainer(model.double(), sgd, nn.CrossEntropyLoss(), strategy="tpu", callbacks=[FailsOnTheSecond()])
    what = ": OSError: no space left" if dist.get_rank() == 1 else ", on rank 1: see its output"
    with pytest.raises(DdpError, match=f"the callback FailsOnTheSecond failed in on_epoch_end, at .*{what}"):
        trainer.fit(data(), epochs=2, global_batch_size=11)


@world(2)
def test_devices_that_are_no_mesh_are_refused() -> None:
    stand_in = StandIn(processes=1).install()
    with pytest.raises(LaunchEnvironmentError, match=r"has 2 processes, but the runtime .* devices of 1"):
        ddp.strategy("tpu")
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(stand_in.rank))
    ddp.world._world = None
    with pytest.raises(LaunchEnvironmentError, match=r"2 processes were started on this host.*-node 1"):
        ddp.strategy("tpu")
    ddp.world._world = None
    WrongOrder().install()
    with pytest.raises(LaunchEnvironmentError, match="in another order than this version of ddp expects"):
        ddp.strategy("tpu")


@world(2)
def test_models_that_cannot_be_trained_are_refused() -> None:
    StandIn().install()
    strategy = ddp.strategy("tpu")
    bag = nn.EmbeddingBag(5, 3, sparse=True)
    with pytest.raises(UnsupportedError, match=r"'weight' gets sparse gradients.*sparse=False"):
        strategy.prepare(bag, torch.optim.SGD(bag.parameters()))
    elsewhere = nn.Linear(2, 2, device="meta")
    with pytest.raises(ArgumentError, match="'weight' is on meta: make the model on the CPU"):
        strategy.prepare(elsewhere, torch.optim.SGD(elsewhere.parameters()))


@world(2)
def test_two_hosts_fit_and_a_process_alone_goes_on(tmp_path: Path) -> None:
    """With accumulated and clipped gradients; a world of one, without torch_xla, goes on from the file."""
    StandIn().install()
    strategy = ddp.strategy("tpu")
    setting = Setting("mlp", "adamw", epochs=2)
    model, optimizer = build(setting)
    trainer = ddp.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        strategy=strategy,
        metrics=["accuracy"],
        callbacks=[ddp.callbacks.ModelCheckpoint(tmp_path), StopsOnTheSecond()],
        max_grad_norm=1e9,
    )
    history = trainer.fit(data(), epochs=5, validation=data(), global_batch_size=11)
    assert trainer.epoch == 2, "a stop that the second process asked for is one for both"
    expected, _, losses = oracle(Setting("mlp", "adamw", epochs=2, decay=1.0), 1)
    assert_same(dict(model.state_dict()), dict(expected.state_dict()))
    weights = torch.tensor([11.0] * 4 + [1.0], dtype=F64)
    assert_same(history["loss"][0], (torch.tensor(losses[:5], dtype=F64) @ weights / 45).item())
    x, y = data().tensors
    assert_same(history["val_accuracy"][-1], (expected(x).argmax(1) == y).double().mean().item())
    assert_same(trainer.predict(data(), global_batch_size=11), expected(x).detach())
    plain, its_optimizer = build(setting, seed=99)
    restored = torch.load(sorted(tmp_path.glob("*.pt"))[-1], weights_only=True)
    plain.load_state_dict(restored["model"])
    its_optimizer.load_state_dict(restored["optimizer"])
    assert_same(dict(plain.state_dict()), dict(expected.state_dict()))


def test_without_torch_xla_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    message = (
        f"strategy 'tpu' needs torch_xla, built for the same version of torch (here {torch.__version__}): "
        "pip install torch=="
    )
    try:
        with pytest.raises(UnsupportedError, match=re.escape(message)):
            ddp.strategy("tpu")
    finally:
        dist.destroy_process_group()
