"""The chunks of one server: received gradients, the steps made with them, and the values sent back.

Made and called by the server. `ddp.strategies.parameter_server.consistency` decides when a gradient makes a step, and
which workers wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ddp.comm.shared_memory import SharedSegment
from ddp.monitoring.progress import count_step
from ddp.strategies.parameter_server.consistency import Consistency
from ddp.strategies.parameter_server.endpoints import ServerEndpoint
from ddp.strategies.parameter_server.messages import MalformedError, Message, positions, read_gradient, write_values
from ddp.strategies.parameter_server.run_plan import RunPlan, check_groups, plain_groups
from ddp.strategies.parameter_server.statistics import Statistics
from ddp.strategies.sharding.chunk_gradient import ChunkGradient, Gradient, average_in_rows
from ddp.strategies.sharding.partition import Chunk
from ddp.strategies.sharding.shards import Shards

_Masks = list[torch.Tensor | None]  # one mask over the rows of each piece; None for all rows


class ChangedRows:
    """The rows, by chunk, that changed since one peer last got their values: for an embedding, only those are sent.

    In a chunk that the peer has not got yet, all rows count as changed.
    """

    def __init__(self) -> None:
        self._masks: dict[int, _Masks] = {}

    def forget(self, chunk: int) -> None:
        """Mark all rows of a chunk as changed."""
        self._masks.pop(chunk, None)

    def begin(self, chunk: Chunk) -> None:
        """Mark all rows of a chunk as unchanged: the peer has all values."""
        self._masks[chunk.index] = [
            torch.zeros(piece.shape[0] if piece.shape else 1, dtype=torch.bool, device="cpu") for piece in chunk.pieces
        ]

    def add(self, chunk: Chunk, changed: Sequence[torch.Tensor | None] | None) -> None:
        """Mark the rows that a step changed: the numbers of each piece's rows, None for all of them."""
        masks = self._masks.get(chunk.index, [])
        for position, numbers in enumerate([None] * len(masks) if changed is None else changed[: len(masks)]):
            mask = masks[position]
            if numbers is None:
                masks[position] = None
            elif mask is not None:
                mask[numbers] = True

    def numbers(self, chunk: Chunk) -> list[torch.Tensor | None] | None:
        """Return the changed rows of each piece, None for all of them; None if the whole chunk must be sent."""
        masks = self._masks.get(chunk.index)
        if not masks:
            return None
        return [None if mask is None else mask.nonzero().flatten() for mask in masks]


@dataclass
class Participant:
    """A server's record of a worker or the evaluator."""

    address: bytes
    role: str
    replica: int
    memory: SharedSegment | None  # with its gradients
    reads_memory: bool = False  # whether it reads the server's memory
    has_left: bool = False
    groups: list[dict[str, Any]] = field(default_factory=list)  # hyperparameters
    seen: dict[int, int] = field(default_factory=dict)  # the version of each chunk that it has
    rows: ChangedRows = field(default_factory=ChangedRows)


@dataclass(frozen=True)
class _Held:
    """A gradient that waits for others, and since when it waits."""

    peer: Participant
    gradient: Gradient
    groups: list[dict[str, Any]]
    since: float


class Steps:
    """See the module. The values are in shared `memory`, if the system has it, which workers on this host read.

    `participants` are the current ones, by address; the server changes them. `on_step` is called after each step in
    sync mode.
    """

    def __init__(
        self,
        plan: RunPlan,
        optimizer: torch.optim.Optimizer,
        index: int,
        endpoint: ServerEndpoint,
        on_step: Callable[[], None],
    ) -> None:
        options = self._options = plan.options
        self._endpoint = endpoint
        self._on_step = on_step
        self.participants: dict[bytes, Participant] = {}
        self.statistics = Statistics()
        self.consistency = Consistency(
            options.mode, plan.workers, staleness=options.staleness, backup_workers=options.backup_workers
        )
        self.chunks = {chunk.index: chunk for chunk in plan.partition.of(index)}
        chunks = list(self.chunks.values())
        size = max(1, plan.partition.bytes(index))
        can_share = options.shared_memory and SharedSegment.available
        self.memory = SharedSegment(size) if can_share else None
        memory = torch.zeros(size, dtype=torch.uint8, device="cpu") if self.memory is None else self.memory.tensor
        self.shards = Shards(optimizer, chunks, {chunk.index: chunk.in_memory(memory) for chunk in chunks})
        self._means = {  # used for one chunk at a time, so that the memory stays in the cache
            dtype: torch.empty(max(chunk.numel for chunk in chunks if chunk.dtype == dtype), dtype=dtype, device="cpu")
            for dtype in {chunk.dtype for chunk in chunks}
        }
        self._groups = plain_groups(optimizer)
        self._made = dict.fromkeys(self.chunks, -1)  # the last step made of each chunk; only in sync mode
        self._versions = dict.fromkeys(self.chunks, 0)
        self._pending: dict[int, dict[int, dict[int, _Held]]] = {index: {} for index in self.chunks}
        self._deferred: list[tuple[Participant, int, int, float]] = []
        self._sparse = set(plan.sparse) & set(self.chunks)  # chunks whose gradients are rows

    @property
    def count(self) -> int:
        """Number of steps made; in sync mode, of every chunk."""
        if self.consistency.mode == "sync":
            return min(self._made.values(), default=-1) + 1
        return self.consistency.step

    @property
    def are_between(self) -> bool:
        """Whether all chunks have made the same steps; only meaningful in sync mode."""
        return len(set(self._made.values())) == 1

    def begin_at(self, step: int) -> None:
        """Continue after `step` steps, those of a snapshot."""
        self.consistency.begin_at(step)
        self._made = dict.fromkeys(self.chunks, step - 1)

    def chunk(self, index: int) -> Chunk:
        """Return a chunk of this server; raises MalformedError if it is another's."""
        chunk = self.chunks.get(index)
        if chunk is None:
            raise MalformedError(f"chunk {index} is not here: these are {sorted(self.chunks)}")
        return chunk

    def forget(self, peer: Participant) -> None:
        """Drop a replica that was restarted. Its pushed gradients count: they belong to that step."""
        for by_step in self._pending.values():
            for held in by_step.values():
                kept = held.get(peer.replica)
                if kept is not None and peer.memory is not None:
                    held[peer.replica] = replace(kept, gradient=_own_copy(kept.gradient))
        self._deferred = [each for each in self._deferred if each[0] is not peer]

    def set_value(self, message: Message) -> None:
        """Store the values of a chunk."""
        chunk = self.chunk(message.facts["chunk"])
        if [(each.shape, each.dtype) for each in message.tensors] != [((chunk.numel,), chunk.dtype)]:
            raise MalformedError(f"the values are not those of chunk {chunk.index}")
        self.shards.values[chunk.index].copy_(message.tensors[0])
        for peer in self.participants.values():
            peer.rows.forget(chunk.index)  # all rows must be sent

    def push(self, peer: Participant, message: Message) -> None:
        """Add a worker's gradient of a chunk; the answer is sent when the worker may continue."""
        facts = message.facts
        chunk, step, is_last = self.chunk(facts["chunk"]), facts["step"], bool(facts.get("is_last"))
        gradient = self._gradient(peer, chunk, message)
        if not peer.groups or facts["groups"] != peer.groups:
            check_groups(facts["groups"], self._groups)
            # The same object as long as they are equal, which saves a comparison.
            peer.groups = [dict(group) for group in facts["groups"]]
        self.statistics.pushes += 1
        is_new = self.consistency.push(peer.replica, step, chunk.index)
        if is_last:
            self.consistency.complete(peer.replica, step)
        if self.consistency.mode == "sync":
            self._push_in_step(peer, chunk, step, gradient)
            return
        if is_new:
            version = self._versions[chunk.index]
            self.statistics.staleness[version - peer.seen.get(chunk.index, version)] += 1
            self._make(chunk, [gradient], peer.groups)
        if is_last and not self.consistency.may_go_on(peer.replica):
            self._deferred.append((peer, chunk.index, step, time.monotonic()))
            self.statistics.queue = max(self.statistics.queue, len(self._deferred))
        else:
            self.answer(peer, chunk.index, step)

    def _gradient(self, peer: Participant, chunk: Chunk, message: Message) -> Gradient:
        if message.facts.get("shared") and peer.memory is not None:
            flat = chunk.in_memory(peer.memory.tensor)
            self.statistics.bytes_shared += chunk.nbytes
            absent = message.facts.get("absent")
            return flat if absent is None else ChunkGradient(flat, positions(chunk, absent))
        return read_gradient(chunk, message.facts, message.tensors)

    def _push_in_step(self, peer: Participant, chunk: Chunk, step: int, gradient: Gradient) -> None:
        if step <= self._made[chunk.index]:
            self.statistics.dropped += 1
            self.answer(peer, chunk.index, step)
            return
        pending = self._pending[chunk.index].setdefault(step, {})
        if peer.replica not in pending or pending[peer.replica].peer is not peer:  # else a duplicate
            pending[peer.replica] = _Held(peer, gradient, peer.groups, time.monotonic())
        self.statistics.queue = max(self.statistics.queue, sum(map(len, self._pending[chunk.index].values())))
        self._make_due(chunk)

    def _make_due(self, chunk: Chunk) -> None:
        """Make the steps of a chunk that have all their gradients."""
        by_step = self._pending[chunk.index]
        while (step := self.consistency.due(by_step)) is not None:
            held = by_step.pop(step)
            now = time.monotonic()
            if chunk.index == max(self.chunks):  # of a step, one wait counts
                for replica, each in held.items():
                    self.statistics.add_wait(replica, now - each.since)
            self.statistics.staleness[0] += len(held)
            self._make(chunk, [held[replica].gradient for replica in sorted(held)], held[min(held)].groups)
            self._made[chunk.index] = step
            for each in held.values():
                if self.participants.get(each.peer.address) is each.peer:
                    self.answer(each.peer, chunk.index, step)
            for old in [other for other in by_step if other <= step]:
                del by_step[old]
            self._on_step()

    def _make(self, chunk: Chunk, gradients: Sequence[Gradient], groups: list[dict[str, Any]]) -> None:
        """Make one step of the optimizer on a chunk."""
        began = time.monotonic()
        gradient = average_in_rows(chunk, gradients, self._means[chunk.dtype][: chunk.numel])
        changed = self.shards.step({chunk.index: gradient}, groups=groups)[chunk.index]
        self._versions[chunk.index] += 1
        self.statistics.steps += 1
        count_step()
        if changed is not None and not isinstance(gradient, torch.Tensor) and gradient.sparse:
            self._sparse.add(chunk.index)
        if chunk.index in self._sparse:
            for peer in self.participants.values():
                peer.rows.add(chunk, changed)
        self.statistics.apply_s += time.monotonic() - began

    def let_continue(self) -> None:
        """Let workers continue where possible, after one has pushed, left or was lost."""
        if self.consistency.mode == "sync":
            for chunk in self.chunks.values():
                self._make_due(chunk)
            return
        deferred, self._deferred = self._deferred, []
        for peer, index, step, since in deferred:
            if self.consistency.may_go_on(peer.replica):
                self.statistics.add_wait(peer.replica, time.monotonic() - since)
                self.answer(peer, index, step)
            else:
                self._deferred.append((peer, index, step, since))

    def pull(self, peer: Participant, message: Message) -> None:
        """Send all rows: the peer may have none yet, or earlier answers may be lost."""
        self.answer(peer, self.chunk(message.facts["chunk"]).index, message.facts["step"], every_row=True)

    def answer(self, peer: Participant, index: int, step: int, *, every_row: bool = False) -> None:
        """Send a participant the values of a chunk."""
        chunk = self.chunks[index]
        rows = None if every_row or index not in self._sparse else peer.rows.numbers(chunk)
        facts: dict[str, Any] = {"chunk": index, "step": step}
        if self.consistency.mode == "sync":
            facts["made"] = self._made[index]
        elif peer.role == "worker":
            facts["made"] = self.consistency.workers[peer.replica].clock - 1
        if peer.role != "worker":
            facts["training"] = [self.count, self.consistency.is_over]
        tensors: tuple[torch.Tensor, ...] = ()
        if peer.reads_memory and rows is None:
            facts["shared"] = True
            self.statistics.bytes_shared += chunk.nbytes
        else:
            compression = self._options.compression if not peer.reads_memory else None
            more, tensors = write_values(chunk, self.shards.values[index], compression or "float32", rows)
            facts.update(more)
            self.statistics.bytes_out += sum(tensor.nbytes for tensor in tensors)
        peer.seen[index] = self._versions[index]
        if index in self._sparse:
            peer.rows.begin(chunk)
        # In sync mode without backup workers, the values do not change before all workers have them.
        is_still = self.consistency.waits_for_all and peer.role == "worker" and step >= 0
        self._endpoint.send(peer.address, Message("pushed", facts, tensors), copy=not is_still)

    def ask(self, peer: Participant, message: Message) -> None:
        """Report the state of gradients whose answers have not arrived."""
        workers = self.consistency.workers
        missing, answered = [], []
        waits: set[int] = set()
        for index, step in message.facts["outstanding"]:
            by_step = self._pending[self.chunk(index).index]
            if step < 0 or peer.role != "worker":  # a pull is answered at once, so it or the answer was lost
                missing.append([index, step])
            elif peer.replica in by_step.get(step, ()):
                waits.update(self.consistency.missing(step, by_step[step]))
            elif any(each[0] is peer and each[1] == index for each in self._deferred):
                slowest = min(worker.clock for worker in workers if worker.is_active)
                waits.update(r for r, worker in enumerate(workers) if worker.is_active and worker.clock == slowest)
            elif workers[peer.replica].pushed.get(index, -1) >= step or step <= self._made[index]:
                answered.append([index, step])
            else:
                missing.append([index, step])
        facts = {"missing": missing, "answered": answered, "waits_for": sorted(waits)}
        self._endpoint.send(peer.address, Message("asked", facts))


def _own_copy(gradient: Gradient) -> Gradient:
    """Copy a gradient out of a worker's memory."""
    if isinstance(gradient, torch.Tensor):
        return gradient.clone()
    return replace(gradient, flat=None if gradient.flat is None else gradient.flat.clone())
