"""Rounds in which the first server gathers bytes of all replicas, for `strategy.reduce`. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ddp.strategies.parameter_server.messages import Message

__all__ = ["GatherRounds"]


class GatherRounds:
    """`count` is the number of rounds that are over."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: dict[int, Message] = {}
        self._last: list[tuple[torch.Tensor, ...]] = []

    def add(self, replica: int, message: Message) -> bool:
        """Take a replica's bytes; whether they are new. If not, its answer was lost: give it the last result again."""
        is_new = bool(message.facts["number"] >= self.count)
        if is_new:
            self._waiting[replica] = message
        return is_new

    def forget(self, replica: int) -> None:
        """Drop what an earlier life of a replica has sent."""
        self._waiting.pop(replica, None)

    def finish(self, active: Collection[int]) -> dict[int, Message]:
        """End the round if all `active` replicas have sent theirs; return the requests to answer, by replica."""
        if not self._waiting or set(active) - self._waiting.keys():
            return {}
        requests, self._waiting = self._waiting, {}
        self._last = [requests[replica].tensors for replica in sorted(requests)]
        self.count += 1
        return requests

    def result(self) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
        """Return the facts and tensors of the last round; it is lost if it was with an earlier life of the server."""
        facts = {
            "number": self.count - 1,
            "is_lost": not self._last,
            "parts": [len(tensors) for tensors in self._last],
        }
        return facts, tuple(part for tensors in self._last for part in tensors)
