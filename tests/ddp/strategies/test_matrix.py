"""Every way to average trains every kind of model: as exact as its numbers, with equal replicas, or it is refused.

Kinds of models: tied weights, unused parameters, BatchNorm, bfloat16 parameters, sparse gradients, and layers that are
frozen and unfrozen while it trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import Nursery
from testbed.one_training import Setting, build, oracle, train
from testbed.servers import in_roles
from torch import Tensor, nn

import ddp
from ddp.compression import PowerSGD
from ddp.strategies.parameter_server.strategy import ParameterServer

SETTING = Setting("mlp", "momentum", batch=12, epochs=2, decay=1.0)
SETTINGS = {
    "tied weights": replace(SETTING, model="tied"),
    "unused parameters": replace(SETTING, model="unused"),
    "BatchNorm": replace(SETTING, model="norm"),
    "bfloat16": replace(SETTING, dtype=torch.bfloat16),
    "sparse gradients": replace(SETTING, model="words"),
    "frozen and unfrozen": replace(SETTING, model="unfrozen"),
}


@dataclass(frozen=True)
class Way:
    strategy: str
    tolerance: float  # as a part of how far the parameters have moved
    options: dict[str, Any] = field(default_factory=dict)
    bfloat16: float = 0.1  # tolerance where the parameters themselves are rounded


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in model.parameters()])


def every_model(way: Way) -> None:
    """Compare each with the oracle, in parts of how far that has moved. A server comes after the workers."""
    for name in SETTINGS:
        if way.strategy == "parameter_server":
            in_roles(dist.get_world_size() - 1, 1, partial(_check, way, name))
        else:
            _check(way, name)


def _check(way: Way, name: str) -> None:
    setting = replace(SETTINGS[name], options=way.options)
    strategy = ddp.strategy(way.strategy, **setting.options)
    module, _, _ = train(strategy, setting)
    ours = flat(module)
    assert torch.equal(strategy.reduce("max", ours), strategy.reduce("min", ours)), f"{name}: replicas differ"
    expected, _, _ = oracle(setting, strategy.replicas, every=way.options.get("every", 0))
    distance = (flat(expected) - flat(build(setting)[0])).norm()
    assert distance > 0.05, name
    difference = ((ours - flat(expected)).norm() / distance).item()
    tolerance = way.bfloat16 if name == "bfloat16" else way.tolerance
    assert tolerance / (1e9 if tolerance < 1e-9 else 200) < difference < tolerance, (way, name, difference)
    if strategy.replica == 0:
        for (buffer, mine), its in zip(module.named_buffers(), expected.buffers(), strict=True):
            torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance, msg=f"{way} {name}: {buffer}")
    if isinstance(strategy, ParameterServer):
        strategy.close()


SERVERS = {"timeout_s": 20.0}
NETWORK = {**SERVERS, "shared_memory": False}  # between hosts, where numbers are short
EXACT = 1e-11
WAYS = [
    Way("all_reduce", EXACT),
    Way("all_reduce", 0.002, {"compression": "fp16"}),
    Way("all_reduce", 0.01, {"compression": "bf16"}),
    Way("all_reduce", 0.03, {"compression": "int8"}),
    Way("all_reduce", 0.6, {"compression": PowerSGD(start_step=3, rank=1)}, bfloat16=0.6),
    Way("central_storage", EXACT),
    Way("local_sgd", EXACT, {"every": 2}, bfloat16=0.15),
    Way("parameter_server", EXACT, SERVERS),
    # Values come back short too, which shows in those that have hardly moved.
    Way("parameter_server", 0.05, {**NETWORK, "compression": "fp16"}),
    Way("parameter_server", 0.3, {**NETWORK, "compression": "bf16"}),
    Way("parameter_server", 0.3, {**NETWORK, "compression": "int8"}),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.strategy}-{way.options.get('compression')}")
def test_each_kind_of_model_is_trained_as_in_one_process(nursery: Nursery, way: Way) -> None:
    world = 4 if way.strategy == "parameter_server" else 3
    nursery.run(world, every_model, deadline_s=250, way=way)


@pytest.mark.parametrize(
    ("name", "compression", "message"),
    [
        ("central_storage", "int8", "strategy 'central_storage' has no option 'compression'"),
        ("local_sgd", "bf16", "strategy 'local_sgd' has no option 'compression'"),
        ("parameter_server", "powersgd", "compression='powersgd'; it must be one of"),
    ],
)
def test_compression_that_a_strategy_does_not_have_is_refused(name: str, compression: str, message: str) -> None:
    with pytest.raises(ddp.errors.ArgumentError, match=message):
        ddp.strategy(name, compression=compression)
