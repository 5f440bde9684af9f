"""`ddp.verify` on models with one reason to differ each, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_worlds import verification_cases
from testbed.nursery import Nursery
from testbed.once import once

CASES = "ddp_worlds.verification_cases"


Verified = dict[str, tuple[dict[str, Any], str]]


def of_all_ranks(nursery: Nursery, world_size: int, names: list[str]) -> Verified:
    first: Verified
    first, *others = nursery.run(world_size, f"{CASES}:verified", names=names)
    for name in names:
        assert all(other[name][1] == first[name][1] for other in others), f"the report of {name} differs between ranks"
    return first


@pytest.fixture(scope="module")
def verified(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Verified:
    return once(tmp_path_factory, "verified", lambda: of_all_ranks(nursery, 2, list(verification_cases.CASES)))


ALIKE = ["plain", "odd", "attention", "complex", "norm in eval", "float32"]


@pytest.mark.parametrize("name", ALIKE)
def test_what_trains_alike_is_said_to(verified: Verified, name: str) -> None:
    fields, report = verified[name]
    assert fields["ok"], report
    assert not fields["differences"]
    assert not fields["drifted"]
    assert fields["compared"] + len(fields["unused"]) == sum(
        p.requires_grad for p in verification_cases.made(name).parameters()
    )
    assert fields["dtype"] == (torch.float32 if name == "float32" else torch.float64)
    assert fields["unused"] == (("never",) if name == "odd" else ())
    assert "the same" in report


DIFFERENT = [name for name in verification_cases.CASES if name not in ALIKE]


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_does_not_train_alike_is_said_to_differ(verified: Verified, name: str) -> None:
    fields, report = verified[name]
    assert not fields["ok"]
    assert bool(fields["differences"]) == (name != "length")
    assert "NOT THE SAME" in report
    order = [each for each, _ in verification_cases.made(name).named_parameters()]
    names = [each["name"] for each in fields["differences"]]
    assert names == [each for each in order if each in names]
    assert f"{names[0]!r} is the first" in report if names else "parameters agree" in report
    assert len(report.splitlines()) <= 26
    assert max(map(len, report.splitlines())) <= 120


def test_the_table_has_the_numbers_in_a_world_of_three(nursery: Nursery) -> None:
    found = of_all_ranks(nursery, 3, ["plain", "sum", "large batch only"])
    fields, report = found["plain"]
    assert fields["ok"], report
    fields, report = found["sum"]
    assert {round(each["ratio"], 9) for each in fields["differences"]} == {round(1 / 3, 9)}
    assert fields["loss_alone"] == pytest.approx(3 * fields["loss_distributed"])
    assert "distributed / alone 0.333333" in report
    fields, report = found["large batch only"]
    assert {"extra.weight", "extra.bias"} <= {each["name"] for each in fields["differences"]}


def test_nothing_of_the_user_s_changes(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:nothing_of_the_users_changes")


def test_drifted_replicas_are_named(nursery: Nursery) -> None:
    for found in nursery.run(2, f"{CASES}:drifted_replicas_are_found"):
        assert not found.ok
        assert not found.differences
        assert "'2.bias' on rank 1" in found.drifted


def test_batches_are_nested_and_dtypes_one_s_own(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:containers_and_dtypes")


def test_a_wrong_call_is_an_error_on_every_rank(nursery: Nursery) -> None:
    first, second = nursery.run(2, f"{CASES}:errors")
    expected = {
        "batches": "rank 1 has another batch than rank 0",
        "rows": "the batch has 23 samples, which 2 ranks cannot share equally: pass 22",
        "lengths": "first dimensions 24, 23",
        "text": "batch holds a builtins.str",
        "fails": "rank 1: loss_fn(model, batch) failed: KeyError: 'no such column'",
        "vector": "one of shape (24,)",
        "constant": "without gradient",
        "other model": "no parameter got a gradient",
        "frozen": "nothing to compare",
    }
    assert first == second
    assert first.keys() == expected.keys()
    for name, words in expected.items():
        assert words in first[name]


def test_a_subgroup_verifies_by_itself(nursery: Nursery) -> None:
    nursery.run(3, f"{CASES}:a_subgroup_verifies_by_itself")


def test_one_rank_has_nothing_to_compare(nursery: Nursery) -> None:
    assert not torch.distributed.is_initialized()
    without_group = verification_cases.one_rank_has_nothing_to_compare()
    (in_a_world_of_one,) = nursery.run(1, f"{CASES}:one_rank_has_nothing_to_compare")
    assert without_group == in_a_world_of_one
    assert "nothing to compare" in without_group
