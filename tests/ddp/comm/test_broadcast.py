"""Broadcasts between real ranks: what is large travels in pieces, through little memory."""

from __future__ import annotations

from testbed.nursery import Nursery


def test_large_tensors_and_buffers_travel_in_pieces(nursery: Nursery) -> None:
    cases = [
        "large_tensors_travel_in_pieces",
        "large_buffers_travel_in_turn",
    ]
    nursery.in_turn(3, "ddp_worlds.comm_cases", cases)
