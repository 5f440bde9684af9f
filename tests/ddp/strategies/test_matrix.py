"""Every way to average trains every kind of model: as exact as its numbers, with equal replicas, or it is refused.

Kinds of models: tied weights, unused parameters, BatchNorm, bfloat16 parameters, sparse gradients, and layers that are
frozen and unfrozen while it trains.
"""

from __future__ import annotations

import pytest
from ddp_worlds.matrix_cases import MODELS, Way
from testbed.nursery import Nursery

import ddp
from ddp.compression import PowerSGD

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
    nursery.run(world, "ddp_worlds.matrix_cases:every_model", deadline_s=250, way=way, models=list(MODELS))


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
