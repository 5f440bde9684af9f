"""The connections of a group can be broken by another thread, and only those."""

from ddp_worlds.nursery import Nursery


def test_only_what_belongs_to_the_group_is_broken(nursery: Nursery) -> None:
    cases = ["others_connections_stay", "a_cloned_store_is_broken_and_the_store_is_not"]
    nursery.in_turn(2, "ddp_worlds.connection_cases", cases, group="gloo")
