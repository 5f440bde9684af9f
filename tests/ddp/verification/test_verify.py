"""`ddp.verify` on models with one reason to differ each: it finds that one, with evidence, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_worlds import verification_cases
from ddp_worlds.nursery import Nursery
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


@pytest.mark.parametrize("name", ["plain", "odd", "attention", "complex", "norm in eval", "float32"])
def test_what_trains_alike_is_said_to(verified: Verified, name: str) -> None:
    fields, report = verified[name]
    assert fields["ok"], report
    assert not fields["differences"]
    assert not fields["reasons"]
    assert fields["compared"] + len(fields["unused"]) == sum(
        p.requires_grad for p in verification_cases.made(name).parameters()
    )
    assert fields["dtype"] == (torch.float32 if name == "float32" else torch.float64)
    assert fields["unused"] == (("never",) if name == "odd" else ())
    assert "the same" in report


REASONS = {
    "batch norm": ["batch norm ('norm')"],
    "batch norm without running statistics": ["batch norm ('norm')"],
    "dropout": ["dropout ('1')"],
    "dropout as attributes": ["dropout ('attention', 'lstm')"],
    "dropout by function": ["random numbers that are drawn while the model trains"],
    "random in eval": ["random numbers are drawn, in eval mode too"],
    "sum": ["the loss is a sum over the samples"],
    "sum beside an unused norm": ["the loss is a sum over the samples"],
    "root": ["a constant factor"],
    "masked": ["the loss is a mean over something of which ranks have different numbers"],
    "place": ["data order: the loss depends on the place"],
    "contrastive": ["data order: the loss of a sample depends on the others"],
    "penalty": ["no treatment explains it"],
    "unseeded": ["not deterministic"],
    "rank": ["depends on the rank"],
    "length": ["only the loss differs"],
    "large batch only": ["'extra.bias', 'extra.weight'", "no treatment explains it"],
    "three at once": ["dropout ('drop')", "batch norm ('norm')", "different numbers"],
    "sum of batch norm": ["batch norm ('norm')", "the loss is a sum over the samples"],
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_is_found_and_no_other(verified: Verified, name: str) -> None:
    assert_reasons(name, *verified[name])


def assert_reasons(name: str, fields: dict[str, Any], report: str) -> None:
    assert not fields["ok"]
    assert len(fields["reasons"]) == len(REASONS[name]), report
    for reason, words in zip(fields["reasons"], REASONS[name], strict=True):
        assert words in reason
    assert bool(fields["differences"]) == (name != "length")
    assert len(report.splitlines()) <= 26
    assert max(map(len, report.splitlines())) <= 120


def test_evidence_has_the_numbers_in_a_world_of_three(nursery: Nursery) -> None:
    found = of_all_ranks(nursery, 3, ["plain", "sum", "masked", "root", "contrastive", "three at once"])
    fields, report = found.pop("plain")
    assert fields["ok"], report
    for name, each in found.items():
        assert_reasons(name, *each)
    fields, report = found["sum"]
    assert {round(each["ratio"], 9) for each in fields["differences"]} == {round(1 / 3, 9)}
    assert fields["loss_alone"] == pytest.approx(3 * fields["loss_distributed"])
    assert "is 1/3 of that alone" in fields["reasons"][0]
    assert "distributed / alone 0.333333" in report
    assert "their shares are 0.1111, 0.4444, 0.4444" in found["masked"][0]["reasons"][0]
    assert "their shares are 0.1111, 0.4444, 0.4444" in found["three at once"][0]["reasons"][2]
    assert f"is {3**-0.5:.6g} times" in found["root"][0]["reasons"][0]


def test_nothing_of_the_user_s_changes(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:nothing_of_the_users_changes")


def test_drifted_replicas_are_named(nursery: Nursery) -> None:
    for found in nursery.run(2, f"{CASES}:drifted_replicas_are_found"):
        assert not found.ok
        assert not found.differences
        assert "'2.bias' on rank 1" in found.reasons[0]


def test_batches_are_nested_and_dtypes_one_s_own(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:containers_and_dtypes")


def test_a_wrong_call_is_an_error_on_every_rank(nursery: Nursery) -> None:
    first, second = nursery.run(2, f"{CASES}:errors")
    expected = {
        "batches": "rank 1 has another batch than rank 0",
        "rows": "the batch has 23 samples, which 2 ranks cannot share equally: give 22",
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
