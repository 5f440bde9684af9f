"""Cross entropy is a mean over labels that count: the same for any number of replicas, under each strategy."""

from __future__ import annotations

import pytest
import torch
from testbed.nursery import Nursery
from testbed.seeds import Seeds
from torch import nn

from ddp.training.losses_and_metrics import Loss

CASES = "ddp_worlds.label_mean_cases"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_and_losses_are_those_of_the_global_batch(nursery: Nursery, world: int) -> None:
    strategies = [("all_reduce", {}), ("central_storage", {}), ("local_sgd", {"every": 1})]
    nursery.run(world, f"{CASES}:means_over_labels", deadline_s=200, strategies=strategies)


def test_soft_targets_are_averaged_over_samples(nursery: Nursery) -> None:
    nursery.run(3, f"{CASES}:probabilities_are_of_samples")


def test_labels_are_counted_without_a_collective_for_each_batch(nursery: Nursery) -> None:
    counts = nursery.run(2, f"{CASES}:collectives_of_its_own")[0]
    assert counts["all_reduce mean"] == counts["all_reduce none"], "they travel with the gradients"
    assert counts["central_storage mean"] == counts["central_storage none"] + 8, "one a step, of several batches"
    assert counts["local_sgd mean"] == counts["local_sgd none"], "a replica that steps by itself waits for no one"


@pytest.mark.parametrize("after", [0, 1])
def test_replicas_that_step_by_themselves_take_means_of_their_own(nursery: Nursery, after: int) -> None:
    nursery.run(2, f"{CASES}:own_steps_are_of_own_means", every=3, after=after)


def test_parameter_servers_refuse_labels_that_do_not_count(nursery: Nursery) -> None:
    nursery.run(3, f"{CASES}:servers_take_labels_that_all_count")


def test_a_step_of_ones_own_adds_to_the_mean(nursery: Nursery) -> None:
    nursery.run(3, f"{CASES}:labels_of_a_step_of_ones_own")


def test_compression_rounds_means_over_labels_no_more_than_others(nursery: Nursery) -> None:
    nursery.run(2, f"{CASES}:compressed_means_are_near", tolerances={"fp16": 0.002, "bf16": 0.01, "int8": 0.03})


def test_counting_labels_on_a_device_does_not_wait_for_it(nursery: Nursery, seeds: Seeds) -> None:
    nursery.run(1, f"{CASES}:labels_on_a_device_are_counted_without_a_wait", seed=seeds(1)[0])


def test_no_label_of_unsigned_numbers_is_ignored_by_default() -> None:
    weight = Loss(nn.CrossEntropyLoss()).weight(torch.tensor([0, 156, 2], dtype=torch.uint8))
    assert weight is not None
    assert weight.item() == 3
