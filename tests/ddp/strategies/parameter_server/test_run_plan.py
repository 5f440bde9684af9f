"""Roles, options and optimizers that do not fit are refused before anything is sent."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import torch
from testbed.servers import KEY
from torch import nn

import ddp
from ddp.errors import ArgumentError, LaunchEnvironmentError, UnsupportedError
from ddp.strategies.parameter_server.run_plan import Options, make_plan
from ddp.strategies.parameter_server.strategy import ParameterServer


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"DTRAIN_ROLES": "default:2", "WORLD_SIZE": "2"}, "no parameter servers: start it with --ps N, for example"),
        ({"DTRAIN_ROLES": "ps:2", "ROLE_NAME": "ps"}, "2 parameter servers without workers: start some, for example"),
        ({"DTRAIN_ROLES": "default:2,ps:1", "DTRAIN_RUN_KEY": "short"}, "DTRAIN_RUN_KEY is not set or malformed"),
        ({"DTRAIN_ROLES": "default:2,ps:1", "DTRAIN_RUN_KEY": KEY}, "MASTER_ADDR and MASTER_PORT are not set"),
    ],
)
def test_roles_that_do_not_fit_are_refused(said: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "ROLE_RANK": "0", "WORLD_SIZE": "1", **said}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchEnvironmentError, match=message) as refused:
        ddp.strategy("parameter_server")
    assert KEY not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "asynchronous"}, "it must be one of 'sync', 'async', 'bounded'"),
        ({"compression": "fp8"}, "compression='fp8'; it must be one of"),
        ({"staleness": -1}, "staleness=-1"),
        ({"snapshot_every": 0}, "snapshot_every=0"),
        ({"mode": "async", "backup_workers": 1}, "backup_workers=1 is for mode='sync'"),
        ({"overlap": True}, "not possible in mode='sync'"),
        ({"chunk_mb": 0}, "chunk_mb=0"),
        ({"timeout_s": 0}, "times must be more than 0"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ddp.strategy("parameter_server", **options)


def test_the_strategy_takes_each_option_by_name_with_its_default() -> None:
    taken = inspect.signature(ParameterServer).parameters.values()
    assert {each.name: each.default for each in taken} == {each.name: each.default for each in fields(Options)}


def test_snapshots_of_a_wrong_type_are_refused_in_every_process() -> None:
    with pytest.raises(TypeError, match="PathLike"):
        ddp.strategy("parameter_server", snapshots=3)


def test_an_optimizer_that_servers_cannot_step_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="LBFGS"):
        make_plan(model, torch.optim.LBFGS(model.parameters()), Options(), workers=2, servers=1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ArgumentError, match="leaves none to wait for"):
        make_plan(model, optimizer, Options(backup_workers=2), workers=2, servers=1)
