"""A client's link to one server between two of its restarts: sends, receives, and keeps unanswered messages.

Made and called by the client, which handles the meaning of the messages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import torch

from ddp.comm.pinned_buffer import PinnedBuffer
from ddp.comm.shared_memory import SharedSegment
from ddp.errors import ParameterServerError
from ddp.strategies.parameter_server.endpoints import ClientEndpoint
from ddp.strategies.parameter_server.messages import Message, Residuals, write_gradient
from ddp.strategies.parameter_server.run_plan import RunPlan
from ddp.strategies.sharding.chunk_gradient import ChunkGradient, Gradient, flatten_gradients, start_flattening
from ddp.strategies.sharding.partition import Chunk, Partition

HEARTBEAT_S = 1.0
QUIET_S = 3.0  # after this time without a message, the client looks in the store for a restart of the server
_ASK_S = 2.0  # after this time without a message, a server that owes an answer is asked for its state
_WINDOW = 128  # chunks in flight to a server; its queue to one worker holds 256 messages
_WINDOW_BYTES = 32 << 20  # in flight, if tensors go over the network
_VALUES = 4  # received chunks that are copied to the device at the same time


@dataclass
class ServerLink:
    """See the module. `outstanding` has the unanswered messages, by chunk and step.

    `gradients` is this worker's memory, where a server on the same host reads its gradients; `values` is the server's.
    """

    index: int
    life: int
    endpoint: ClientEndpoint
    plan: RunPlan
    statistics: dict[str, float]
    gradients: SharedSegment | None
    outstanding: dict[tuple[int, int], Message] = field(default_factory=dict)
    values: SharedSegment | None = None
    has_joined: bool = False
    is_ready: bool = False  # joined, and the server has its values
    step: int = 0  # of the training, when it joined
    may_share: bool = False  # gradients through shared memory
    waits_for: list[int] = field(default_factory=list)  # replicas
    unsent: deque[Message] = field(default_factory=deque)
    arrived: deque[Message] = field(default_factory=deque)
    answers: dict[str, Message] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    _buffers: dict[int, torch.Tensor] = field(default_factory=dict)  # for gradients that are sent
    _joins: int = 0
    _connections: int = 0
    _touched: float = 0.0
    _is_asking: bool = False
    _is_closed: bool = False

    def __post_init__(self) -> None:
        largest = max((chunk.nbytes for chunk in self.plan.partition.chunks), default=1)
        self._far_window = min(_WINDOW, max(2, _WINDOW_BYTES // max(1, largest)))

    @property
    def contact(self) -> tuple[int, int, int]:
        """A value that changes whenever sent messages may have been lost."""
        return self.life, self._joins, self.endpoint.connections

    @property
    def has_room(self) -> bool:
        """Whether more may be sent without answers being dropped, or arriving late for everything else."""
        is_near = self.may_share and self.values is not None
        return len(self.outstanding) < (_WINDOW if is_near else self._far_window)

    def write(
        self,
        chunk: Chunk,
        gradients: Sequence[torch.Tensor | None],
        residuals: Residuals,
        copies: DeviceCopies | None = None,
    ) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
        """Return the facts and tensors of a chunk's gradient, which is in shared memory if the server can read it.

        With `copies`, it is read from there, where its copy was started.
        """
        memory = self.gradients if self.may_share else None
        if copies is not None:
            gradient = copies.gradient_of(chunk)
            if memory is not None:
                gradient = _moved(gradient, chunk.in_memory(memory.tensor))
        else:
            if memory is not None:
                out = chunk.in_memory(memory.tensor)
            else:
                if chunk.index not in self._buffers:
                    self._buffers[chunk.index] = torch.empty(chunk.numel, dtype=chunk.dtype, device="cpu")
                out = self._buffers[chunk.index]
            gradient = flatten_gradients(chunk, gradients, out)
        is_rows = isinstance(gradient, ChunkGradient) and (bool(gradient.sparse) or gradient.flat is None)
        if memory is None or is_rows:
            return write_gradient(chunk, gradient, self.plan.options.compression or "float32", residuals)
        if isinstance(gradient, ChunkGradient):
            return {"shared": True, "absent": sorted(gradient.absent)}, ()
        return {"shared": True}, ()

    def request_values(self, message: Message) -> None:
        """Send a message whose answer is a chunk's values; after a restart of the server it is sent again."""
        self.outstanding[message.facts["chunk"], message.facts["step"]] = message
        self.send(message)

    def send(self, message: Message) -> None:
        """Send a message, or keep it until it can be sent; drop it while this client has not joined."""
        if self._is_closed:
            raise ParameterServerError(f"{self.endpoint.name} has left the parameter servers (strategy.close())")
        if not self.has_joined:
            return  # what matters is sent again after joining
        self.statistics["bytes_out"] += sum(tensor.nbytes for tensor in message.tensors)
        if self.unsent or not self.endpoint.send(message):
            self.unsent.append(message)

    def send_unsent(self) -> None:
        """Send the messages that could not be sent before."""
        while self.unsent and self.endpoint.send(self.unsent[0]):
            self.unsent.popleft()

    def next_message(self) -> Message | None:
        """Return a received message, if there is one."""
        message = self.arrived.popleft() if self.arrived else self.endpoint.receive()
        if message is not None:
            self.heard = time.monotonic()
            self.statistics["bytes_in"] += sum(tensor.nbytes for tensor in message.tensors)
        return message

    def join(self, facts: Mapping[str, Any]) -> None:
        """Identify this client to the server, which answers "joined". May be repeated."""
        self.has_joined = self.is_ready = False
        self._connections = self.endpoint.connections
        ticket = None if self.gradients is None else self.gradients.ticket
        self.endpoint.send(Message("join", {**facts, "memory": ticket}))

    def on_joined(self, facts: Mapping[str, Any]) -> None:
        """Record that this client has joined the server."""
        self.has_joined = True
        self.may_share = self.gradients is not None and facts["reads_gradients"]
        self.step = facts["step"]
        if self.values is None and facts["memory"] is not None and self.plan.options.shared_memory:
            self.values = SharedSegment.open(facts["memory"])
        if self.values is not None:
            self.endpoint.send(Message("memory"))

    def on_ready(self) -> None:
        """Resume with a server that has its values: send again what it had not answered before its restart."""
        self.is_ready = True
        self._joins += 1
        for key, message in list(self.outstanding.items()):
            self.outstanding[key] = message if self.may_share else self._without_memory(message)
            self.send(self.outstanding[key])

    def on_asked(self, facts: Mapping[str, Any]) -> None:
        """Send again what the server did not receive, and ask again for answers that were lost."""
        self._is_asking = False
        self.waits_for = facts["waits_for"]
        # Its earlier answers arrived before this message, or are lost.
        for index, step in facts["missing"]:
            again = self.outstanding.get((index, step))
            if again is not None:
                self.send(again)
        for index, step in facts["answered"]:
            if (index, step) in self.outstanding:
                self.send(Message("again", {"chunk": index, "step": step}))

    def keep_in_touch(self, now: float) -> bool:
        """Send a heartbeat once a second; return whether this client has to join (again) instead.

        A quiet server is asked for what it has not answered. One question at a time: on a slow network, answers to
        several would delay the data that they ask for.
        """
        if self._connections != self.endpoint.connections:  # messages in flight may be lost, the question too
            self._connections = self.endpoint.connections
            self._is_asking = False
            self.has_joined = self.has_joined and self.is_ready
        if now - self._touched < HEARTBEAT_S:
            return False
        self._touched = now
        if not self.has_joined:
            return True
        if self.outstanding and not self._is_asking and now - self.heard > _ASK_S:
            outstanding = [list(key) for key in self.outstanding]
            self._is_asking = self.endpoint.send(Message("ask", {"outstanding": outstanding}))
        else:
            self.endpoint.send(Message("heartbeat"))
        return False

    def heartbeat(self) -> None:
        """Send a heartbeat and receive what has arrived; for another thread than the client's."""
        self.endpoint.send(Message("heartbeat"))
        while (message := self.endpoint.receive()) is not None:
            self.arrived.append(message)

    def close(self) -> None:
        """Close the connection and the server's memory."""
        self._is_closed = True
        self.endpoint.close()
        if self.values is not None:
            self.values.close()
            self.values = None

    def _without_memory(self, message: Message) -> Message:
        """Return a message that carries the gradient from shared memory."""
        if not message.facts.get("shared") or self.gradients is None:
            return message
        flat = self.plan.partition.chunks[message.facts["chunk"]].in_memory(self.gradients.tensor)
        facts = {key: value for key, value in message.facts.items() if key != "shared"}
        return Message(message.kind, {**facts, "flat": "float32"}, (flat,))


class DeviceCopies:
    """Pinned memory for the gradients of all chunks, which are sent from there, and for the values of a few.

    The client has one if all parameters are on one device with asynchronous copies.
    """

    def __init__(self, partition: Partition, device: torch.device) -> None:
        self._partition = partition
        self._device = device
        self._gradients: dict[int, PinnedBuffer] = {}  # by chunk; an evaluator has none
        self._flattened: dict[int, Callable[[], Gradient]] = {}
        sizes: dict[torch.dtype, int] = {}
        for chunk in partition.chunks:
            sizes[chunk.dtype] = max(chunk.numel, sizes.get(chunk.dtype, 0))
        self._values = {
            dtype: cycle([PinnedBuffer(numel, dtype, device) for _ in range(_VALUES)]) for dtype, numel in sizes.items()
        }

    def start(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Start copying the gradients of all chunks, from those of all parameters, which may change afterwards."""
        for chunk in self._partition.chunks:
            if chunk.index not in self._gradients:
                self._gradients[chunk.index] = PinnedBuffer(chunk.numel, chunk.dtype, self._device)
            self._flattened[chunk.index] = start_flattening(chunk, gradients, self._gradients[chunk.index])

    def gradient_of(self, chunk: Chunk) -> Gradient:
        """Wait for a chunk's gradient; return it, in host memory that stays unchanged until the next start."""
        return self._flattened.pop(chunk.index)()

    def install(self, chunk: Chunk, values: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
        """Start copying a chunk's values (numel,) to the pieces of its parameters; `values` may change afterwards."""
        next(self._values[chunk.dtype]).start_sending(chunk.in_flat(values), into)


def _moved(gradient: Gradient, out: torch.Tensor) -> Gradient:
    """Return the gradient with its flat tensor copied to `out`."""
    if isinstance(gradient, torch.Tensor):
        return out.copy_(gradient)
    return replace(gradient, flat=None if gradient.flat is None else out.copy_(gradient.flat))
