"""Strategy "tpu" without torch_xla, and on two hosts with a stand-in; tests/full/test_tpu.py has the real one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from testbed.nursery import Nursery

import ddp

CASES = "ddp_worlds.tpu_cases"


@pytest.mark.parametrize(
    "case",
    [
        "hosts_share_out_each_batch",
        "shares_of_a_sampler_become_one_batch",
        "processes_differ_only_where_they_may",
        "prepared_models_are_those_of_the_first_process",
        "a_callback_that_fails_on_one_process_ends_all",
        "devices_that_are_no_mesh_are_refused",
        "models_that_cannot_be_trained_are_refused",
    ],
)
def test_two_hosts(nursery: Nursery, case: str) -> None:
    nursery.run(2, f"{CASES}:{case}")


def test_two_hosts_fit_and_a_process_alone_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, f"{CASES}:a_trainer_fits_saves_and_goes_on", folder=tmp_path)


def test_without_torch_xla_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    message = (
        f"strategy 'tpu' needs torch_xla, built for the same version of torch (here {torch.__version__}): "
        "pip install torch=="
    )
    try:
        with pytest.raises(ddp.errors.UnsupportedError, match=re.escape(message)):
            ddp.strategy("tpu")
    finally:
        dist.destroy_process_group()
