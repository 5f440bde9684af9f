"""A server's other requests, besides training: sums over replicas, buffers, optimizer state, statistics."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from ddp.comm.codec import encode
from ddp.errors import ArgumentError
from ddp.strategies.parameter_server.endpoints import ServerEndpoint
from ddp.strategies.parameter_server.messages import MalformedError, Message, decode_value
from ddp.strategies.parameter_server.steps import Participant, Steps


class Requests:
    """Handlers of messages, for the server. `gathered` is the number of completed rounds of "gather".

    `extras` are the model's buffers and frozen parameters, by name: replica 0's, if it has sent them.
    """

    def __init__(self, endpoint: ServerEndpoint, steps: Steps, extras: Mapping[str, torch.Tensor]) -> None:
        self._endpoint = endpoint
        self._steps = steps
        self.extras = {name: tensor.detach().cpu().clone() for name, tensor in extras.items()}
        self.gathered = 0
        self._waiting: dict[int, tuple[Participant, Message]] = {}  # in the current round, by replica
        self._last: list[tuple[torch.Tensor, ...]] = []  # the tensors of each replica in the last round

    def reply(
        self,
        peer: Participant,
        message: Message,
        kind: str,
        facts: Mapping[str, Any],
        tensors: tuple[torch.Tensor, ...] = (),
    ) -> None:
        """Answer a request, with its number, by which its sender matches it."""
        facts = {**facts, "request": message.facts.get("request")}
        self._endpoint.send(peer.address, Message(kind, facts, tensors), copy=True)

    def gather(self, peer: Participant, message: Message) -> None:
        """Add a replica's bytes, for `strategy.reduce`; all replicas are answered once all have sent theirs."""
        if message.facts["number"] < self.gathered:  # its answer was lost
            self._send_gathered(peer, message)
        else:
            self._waiting[peer.replica] = peer, message
            self.finish_gather()

    def finish_gather(self) -> None:
        """End the round if all active replicas have sent theirs."""
        active = {replica for replica, worker in enumerate(self._steps.consistency.workers) if worker.is_active}
        if not self._waiting or active - self._waiting.keys():
            return
        waiting, self._waiting = self._waiting, {}
        self._last = [waiting[replica][1].tensors for replica in sorted(waiting)]
        self.gathered += 1
        for peer, message in waiting.values():
            self._send_gathered(peer, message)

    def forget(self, replica: int) -> None:
        """Drop the data that a replica sent before its restart."""
        self._waiting.pop(replica, None)

    def _send_gathered(self, peer: Participant, message: Message) -> None:
        """Send the last round's result; it is lost if the server was restarted since."""
        lengths = [len(tensors) for tensors in self._last]
        facts = {"number": self.gathered - 1, "is_lost": not self._last, "lengths": lengths}
        self.reply(peer, message, "gathered", facts, tuple(itertools.chain.from_iterable(self._last)))

    def store_extras(self, peer: Participant, message: Message) -> None:
        names, tensors = message.facts["names"], message.tensors
        for name, tensor in itertools.zip_longest(names, tensors):
            mine = self.extras.get(name)
            if mine is None or tensor is None or (mine.shape, mine.dtype) != (tensor.shape, tensor.dtype):
                raise MalformedError(f"the model has no buffer or frozen parameter {name!r} like the tensor for it")
        if peer.replica == 0:
            self.extras.update(zip(names, tensors, strict=True))

    def send_extras(self, peer: Participant, message: Message) -> None:
        names = [name for name in message.facts["names"] if name in self.extras]
        self.reply(peer, message, "extras", {"names": names}, tuple(self.extras[name] for name in names))

    def send_state(self, peer: Participant, message: Message) -> None:
        chunk = self._steps.chunk(message.facts["chunk"])
        self.reply(peer, message, "state", {}, (encode(self._steps.shards.state_of(chunk.index)),))

    def load_state(self, peer: Participant, message: Message) -> None:
        chunk, states = self._steps.chunk(message.facts["chunk"]), decode_value(message, list[dict[str, Any]])
        try:
            self._steps.shards.load_state({chunk.index: states})
        except ArgumentError as error:
            raise MalformedError(str(error)) from error
        self.reply(peer, message, "loaded", {})

    def send_statistics(self, peer: Participant, message: Message) -> None:
        self.reply(peer, message, "statistics", {"counts": self._steps.statistics.as_dict()})
