"""The simulated device of the tests: late, with values, and it notices what does not wait."""

import pytest
from testbed.nursery import Nursery
from testbed.seeds import Seeds

CASES = "ddp_worlds.simulated_device_cases"


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("output_has_no_value_until_it_has_run", 20),
        ("training_equals_the_cpu", 4),
        ("a_pinned_copy_that_nothing_waited_for_has_the_old_bytes", 20),
        ("streams_that_do_not_wait_and_memory_that_is_not_kept_are_noticed", 40),
        ("planted_faults_are_noticed", 20),
    ],
)
def test_alone(nursery: Nursery, seeds: Seeds, case: str, count: int) -> None:
    nursery.run(1, f"{CASES}:{case}", seeds=seeds(count))


def test_the_host_waits_where_a_device_has_it_wait(nursery: Nursery) -> None:
    nursery.run(1, f"{CASES}:the_host_waits_where_a_device_has_it_wait")


def test_collectives_are_in_order_and_seen_after_a_wait(nursery: Nursery, seeds: Seeds) -> None:
    nursery.run(2, f"{CASES}:collectives_are_in_order_and_seen_after_a_wait", seeds=seeds(8))


def test_a_peer_that_does_not_come_is_waited_for_until_an_abort(nursery: Nursery, seeds: Seeds) -> None:
    waited_s, _ = nursery.run(2, f"{CASES}:a_peer_that_does_not_come_is_waited_for_until_an_abort", seed=seeds(1)[0])
    assert waited_s > 0.4
