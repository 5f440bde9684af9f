"""Training with parameter servers: equal to one process where it is synchronous, as good where it is not.

Workers, servers and an evaluator are ranks of a test world, without a launcher; test_faults.py has one.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from ddp_worlds.parameter_server_cases import KEY
from ddp_worlds.strategy_cases import Setting
from testbed.nursery import Nursery
from testbed.seeds import Seeds
from torch import nn

import ddp
from ddp.strategies.parameter_server.run_plan import Options, make_plan
from ddp.strategies.parameter_server.strategy import ParameterServer

CASES = "ddp_worlds.parameter_server_cases"
NETWORK = {"shared_memory": False}  # as between hosts
ROWS = {"chunk_mb": 64 / 2**20}  # of 64 bytes: every larger parameter is split
MORE_ROWS = {"chunk_mb": 1024 / 2**20}


def test_sync_equals_one_process_on_the_whole_batch(nursery: Nursery) -> None:
    runs = [
        (2, 1, Setting("mlp", "adamw")),
        (4, 1, Setting("mlp", "sgd", options=NETWORK)),
        (2, 3, Setting("odd", "sgd", groups=3, options={**NETWORK, **ROWS})),
        (3, 2, Setting("odd", "adamw", groups=3, options=ROWS)),
        (2, 2, Setting("norm", "sgd", batch=12, options=NETWORK)),
        (3, 2, Setting("words", "sgd")),
        (2, 2, Setting("words", "plain sgd", options=NETWORK)),
        (3, 1, Setting("bag", "sparse adam", options={**NETWORK, **MORE_ROWS})),
        (2, 1, Setting("mlp", "sgd", options={**NETWORK, "encrypt": True})),
    ]
    nursery.run(5, f"{CASES}:sync_equals_one_process", runs=runs)


def test_copies_of_a_device_may_be_late(nursery: Nursery, seeds: Seeds) -> None:
    runs = [
        (2, 1, Setting("mlp", "adamw")),
        (2, 2, Setting("odd", "sgd", groups=3, options={**NETWORK, **ROWS})),
        (3, 1, Setting("odd", "adamw", groups=3, options=ROWS)),
        (2, 2, Setting("norm", "sgd", batch=12, options=NETWORK)),
        (2, 1, Setting("mlp", "sgd", options={"mode": "async", "overlap": True})),
    ]
    nursery.run(4, f"{CASES}:a_late_device_equals_one_process", runs=runs, seed=seeds(1)[0])


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        (1, "alone_there_are_no_servers"),
        (3, "only_touched_rows_travel"),
        (3, "another_key_version_or_model_is_refused"),
        (2, "changes_after_prepare_are_refused"),
        (5, "numbers_are_reduced_without_a_group"),
        (3, "no_size_is_too_large_for_a_message"),
        (3, "a_scaler_leaves_out_one_gradient"),
        (4, "a_state_of_torch_goes_on"),
    ],
)
def test_training(nursery: Nursery, world_size: int, case: str) -> None:
    nursery.run(world_size, f"{CASES}:{case}")


def test_modes_that_do_not_wait_for_all_reach_the_same_loss_within_a_fourth(nursery: Nursery) -> None:
    modes = [
        {"mode": "async"},
        {"mode": "async", "overlap": True},
        {"mode": "bounded", "staleness": 1, "overlap": True, **NETWORK},
        {"backup_workers": 1},
    ]
    nursery.run(4, f"{CASES}:loose_modes_reach_the_loss", modes=modes, factor=1.25)


def test_short_numbers_between_hosts_reach_the_same_loss_within_a_tenth(nursery: Nursery) -> None:
    nursery.run(3, f"{CASES}:short_numbers_reach_the_loss", factor=1.1)


@pytest.mark.parametrize(("staleness", "servers"), [(2, 1), (0, 2)])
def test_clocks_never_drift_further_apart_than_the_staleness(
    nursery: Nursery, staleness: int, servers: int, tmp_path: Path
) -> None:
    case = f"{CASES}:fast_workers_wait_at_the_bound"
    nursery.run(3 + servers, case, folder=str(tmp_path), staleness=staleness, servers=servers)


def test_no_one_waits_for_a_slow_worker_beyond_those_needed(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(4, f"{CASES}:no_one_waits_for_a_backup_worker", folder=str(tmp_path))


@pytest.mark.parametrize("options", [{"mode": "async"}, {"shared_memory": False}])
def test_an_evaluator_sees_the_training_to_its_end(
    nursery: Nursery, tmp_path: Path, options: dict[str, object]
) -> None:
    nursery.run(4, f"{CASES}:an_evaluator_sees_it_all", folder=str(tmp_path), options=options)


def test_a_run_that_is_started_again_goes_on_from_its_snapshots(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(4, f"{CASES}:a_run_goes_on_from_its_snapshots", folder=str(tmp_path))


def test_servers_begin_with_snapshots_of_one_and_the_same_step(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(3, f"{CASES}:a_broken_snapshot_is_not_mixed_with_others", folder=str(tmp_path))


# ---- what is wrong before anything is sent ----


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
    with pytest.raises(ddp.errors.LaunchEnvironmentError, match=message) as refused:
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
    with pytest.raises(ddp.errors.ArgumentError, match=message):
        ddp.strategy("parameter_server", **options)


def test_the_strategy_takes_each_option_by_name_with_its_default() -> None:
    taken = inspect.signature(ParameterServer).parameters.values()
    assert {each.name: each.default for each in taken} == {each.name: each.default for each in fields(Options)}


def test_snapshots_of_a_wrong_type_are_refused_in_every_process() -> None:
    with pytest.raises(TypeError, match="PathLike"):
        ddp.strategy("parameter_server", snapshots=3)


def test_an_optimizer_that_servers_cannot_step_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ddp.errors.UnsupportedError, match="LBFGS"):
        make_plan(model, torch.optim.LBFGS(model.parameters()), Options(), workers=2, servers=1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ddp.errors.ArgumentError, match="leaves none to wait for"):
        make_plan(model, optimizer, Options(backup_workers=2), workers=2, servers=1)
