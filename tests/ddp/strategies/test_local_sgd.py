"""Steps of each rank by itself: equal to a simulation of all ranks, never out of count, never saved half averaged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from testbed.nursery import Nursery
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddp.compression import PowerSGD
from ddp.strategies.local_sgd.averaging import LocalSGD
from ddp.strategies.local_sgd.outer_optimizer import OuterOptimizer, Settings
from ddp.strategies.local_sgd.rank_state import cut_into_chunks

CASES = "ddp_worlds.local_sgd_cases"
# every, after, outer_lr, outer_momentum, nesterov
OUTERS = [
    (1, 0, 0.9),
    (2,),
    (3, 2),
    (4, 1, 0.7, 0.9),
    (3, 0, 1.0, 0.5, False),
    (2, 3, 0.5, 0.8, True),
]


@pytest.mark.parametrize(
    ("world_size", "inner", "wrapper", "parts", "outers"),
    [
        (1, "sgd", "ours", 1, OUTERS[3:5]),
        (2, "adamw", "ours", 3, OUTERS),
        (2, "sgd", "torch", 2, OUTERS[1:4]),
        (3, "sgd", "ours", 1, OUTERS),
        (4, "adamw", "torch", 1, OUTERS[3:4]),
    ],
)
def test_replicas_and_averages_equal_a_simulation_of_all_ranks(
    nursery: Nursery, world_size: int, inner: str, wrapper: str, parts: int, outers: list[tuple[float, ...]]
) -> None:
    nursery.run(
        world_size, f"{CASES}:equals_the_oracle", outers=outers, inner=inner, wrapper=wrapper, parts=parts, steps=10
    )


@pytest.mark.parametrize(("dtype", "outer"), [(torch.float32, (7, 5, 0.7, 0.9)), (torch.bfloat16, (8,))])
def test_replicas_are_bitwise_equal_after_100_steps(
    nursery: Nursery, dtype: torch.dtype, outer: tuple[float, ...]
) -> None:
    nursery.run(3, f"{CASES}:replicas_are_bitwise_equal_after", steps=101, outer=outer, dtype=dtype)


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (2, "every_step_is_ordinary_training"),
        (3, "a_step_that_one_rank_skips_loses_no_count"),
        (3, "ranks_with_less_data_wait_in_sync"),
        (3, "a_subgroup_averages_among_its_members"),
        (2, "misuse_is_warned_of_or_refused"),
        (2, "hooks_end_with_close_or_the_wrapper"),
        (2, "parameters_thawed_later_are_counted"),
        (1, "world_of_one_looks_ahead"),
    ],
)
def test_steps_of_each_rank_by_itself(nursery: Nursery, world_size: int, case: str) -> None:
    nursery.run(world_size, f"{CASES}:{case}")


@pytest.mark.parametrize("compression", ["bf16", "int8", PowerSGD(start_step=2, min_compression_rate=1.1)], ids=repr)
def test_compression_is_of_averaged_gradients(nursery: Nursery, compression: str | PowerSGD) -> None:
    nursery.run(2, f"{CASES}:compression_is_of_averaged_gradients", compression=compression)


def test_a_step_of_a_rank_by_itself_reads_nothing_on_the_host() -> None:
    """On the meta device, where to read a tensor raises. Averaging reads, so there is none."""
    model = Alone(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to("meta"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    local = LocalSGD(model, optimizer, every=100, outer_lr=0.7)
    for step in range(5):
        model(torch.empty(5, 4, device="meta")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert local.step == step
    assert local.has_diverged
    with pytest.raises((RuntimeError, NotImplementedError), match=r"meta|no pinned memory"):
        local.sync()


class Alone(nn.Module):
    """As a wrapper that reduces nothing."""

    process_group = None
    require_backward_grad_sync = broadcast_buffers = True
    steps_alone = False
    parameters_to_ignore = frozenset[str]()
    _join_config = SimpleNamespace(enable=False)

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.module(x)
        return y


def test_training_resumes_bitwise_and_in_another_world(nursery: Nursery, tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    nursery.run(2, f"{CASES}:training_resumes_from_a_state", path=path)
    nursery.run(3, f"{CASES}:a_state_fits_another_world", path=path)


def test_ranks_that_cannot_become_equal_are_an_error_on_all(nursery: Nursery) -> None:
    every = nursery.run(2, f"{CASES}:ranks_that_cannot_become_equal")
    assert every[0] == every[1]
    settings, momentum, start = every[0]
    assert "'every': 3" in settings
    assert "outer momentum of 'layers.2.bias' is another on rank 1" in momentum
    assert "starting point of the last steps of 'layers.4.bias' is another on rank 1" in start


def test_chunks_come_in_the_same_order_on_devices_of_other_numbers() -> None:
    orders = []
    for first in (0, 9):  # cuda:10 comes before cuda:9 in the alphabet
        with FakeTensorMode():  # the simulated device is one alone
            tensors = [torch.empty(2, device=f"cuda:{first + place}") for place in (0, 1, 0, 2, 1)]
            number_of = {id(tensor): number for number, tensor in enumerate(tensors)}
            orders.append([[number_of[id(tensor)] for tensor in chunk] for chunk in cut_into_chunks(tensors)])
    assert orders == [[[0, 2], [1, 4], [3]]] * 2


def test_parameters_that_are_renamed_between_two_averages_keep_theirs() -> None:
    outer = OuterOptimizer(Settings(every=2, after=0, outer_lr=0.5, outer_momentum=0.0, nesterov=True))
    outer.begin({name: nn.Parameter(torch.zeros(1)) for name in ("kept", "renamed")})
    averages = {name: nn.Parameter(torch.ones(1)) for name in ("kept", "as now")}
    with torch.no_grad():
        outer.step(averages)
    assert [each.item() for each in averages.values()] == [0.5, 1.0]
