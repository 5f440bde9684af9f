"""A parameter server: holds its chunks of the model, takes gradients, makes steps, and gives values back.

`serve` is called by the strategy in a process of role "ps", and returns when all workers are through. One thread, one
loop; when a gradient makes a step, and who waits, is decided by `ddp.strategies.parameter_server.consistency`.

The messages are listed in `ddp.strategies.parameter_server.message_fields`. One that does not fit is refused: its
sender gets the reason, and the others are served.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch

from ddp.comm.codec import encode
from ddp.comm.shared_memory import SharedSegment
from ddp.errors import ArgumentError, ParameterServerError
from ddp.monitoring.progress import count_step
from ddp.strategies.parameter_server.changed_rows import ChangedRows
from ddp.strategies.parameter_server.consistency import Consistency
from ddp.strategies.parameter_server.gather_rounds import GatherRounds
from ddp.strategies.parameter_server.gradient_codec import positions, read_gradient, write_values
from ddp.strategies.parameter_server.message_fields import CLIENT_MESSAGES, check_fields, decode_value
from ddp.strategies.parameter_server.messages import MalformedError, Message
from ddp.strategies.parameter_server.poller import Poller, Wakeup
from ddp.strategies.parameter_server.rendezvous import ServerDirectory
from ddp.strategies.parameter_server.run_plan import RunPlan, check_groups, plain_groups
from ddp.strategies.parameter_server.server_endpoint import ServerEndpoint
from ddp.strategies.parameter_server.snapshot import Snapshots
from ddp.strategies.parameter_server.statistics import Statistics
from ddp.strategies.sharding.chunk_gradient import ChunkGradient, Gradient, average
from ddp.strategies.sharding.partition import Chunk
from ddp.strategies.sharding.shards import Shards

__all__ = ["Server"]

_TICK_S = 0.5
_LINGER_S = 0.3  # at the end, for workers that ask once more
_OF_WORKERS = frozenset({"push", "value", "ready", "gather", "extras", "load"})


@dataclass
class _Peer:
    """One connected worker or evaluator."""

    address: bytes
    role: str
    replica: int
    memory: SharedSegment | None
    reads_memory: bool = False
    has_left: bool = False
    groups: list[dict[str, Any]] = field(default_factory=list)  # hyperparameters
    seen: dict[int, int] = field(default_factory=dict)  # the version of each chunk that it has
    rows: ChangedRows = field(default_factory=ChangedRows)


@dataclass(frozen=True)
class _Held:
    """A gradient that waits for others, and since when."""

    peer: _Peer
    gradient: Gradient
    groups: list[dict[str, Any]]
    since: float


class Server:
    """See the module. `values` are in shared memory where the system has it, which workers of this host read."""

    def __init__(
        self, plan: RunPlan, optimizer: torch.optim.Optimizer, endpoint: ServerEndpoint, *, index: int, life: int
    ) -> None:
        self.plan = plan
        self.name = f"parameter server {index}"
        self._settings = plan.settings
        self._endpoint = endpoint
        self._index = index
        self._life = life
        self._chunks = {chunk.index: chunk for chunk in plan.partition.of(index)}
        self._last = next(reversed(self._chunks.values()), None)
        size = max(1, plan.partition.bytes(index))
        can_share = self._settings.shared_memory and SharedSegment.available
        self._memory = SharedSegment(size) if can_share else None
        memory = self._memory.tensor if self._memory is not None else torch.zeros(size, dtype=torch.uint8)
        self._groups = plain_groups(optimizer)
        chunks = list(self._chunks.values())
        values = {chunk.index: chunk.in_memory(memory) for chunk in chunks}
        self._shards = Shards(optimizer, plan.parameters, chunks, values)
        self._means = {  # of one chunk at a time: memory that stays in the cache
            dtype: torch.empty(max(c.numel for c in self._chunks.values() if c.dtype == dtype), dtype=dtype)
            for dtype in {chunk.dtype for chunk in self._chunks.values()}
        }
        self.consistency = Consistency(
            self._settings.mode,
            plan.workers,
            staleness=self._settings.staleness,
            backup_workers=self._settings.backup_workers,
        )
        self.statistics = Statistics()
        self._snapshots = Snapshots(self._settings.snapshots, index) if self._settings.snapshots else None
        self._snapshot_step = 0
        self._peers: dict[bytes, _Peer] = {}
        self._workers: dict[int, _Peer] = {}
        self._is_filled = False  # whether the values are those of the training, not this process's own
        self._waiting_to_join: list[tuple[_Peer, Message]] = []
        self._made = dict.fromkeys(self._chunks, -1)  # the last step made of each chunk; only in sync mode
        self._versions = dict.fromkeys(self._chunks, 0)
        self._pending: dict[int, dict[int, dict[int, _Held]]] = {index: {} for index in self._chunks}
        self._deferred: list[tuple[_Peer, int, int, float]] = []
        self._extras = {name: tensor.detach().cpu().clone() for name, tensor in plan.extras.items()}
        self._gathers = GatherRounds()
        self._stop = self._is_warned = False
        self._ticked = 0.0
        self._sparse = set(plan.sparse) & set(self._chunks)  # chunks of which gradients are rows

    # ---- the loop ----

    def begin(self, directory: ServerDirectory) -> None:
        """Take over a snapshot, if there is one: the newest, or at the run's beginning the newest that all have."""
        if self._snapshots is None or not self._chunks:
            return
        steps = self._snapshots.whole_steps()
        step = max(steps, default=None)
        if self._life == 1:
            parts = range(self.plan.partition.servers)
            step = directory.agree_on_step(self._index, [s for s in parts if self.plan.partition.of(s)], steps)
        if step is not None:
            self.restore(step)
            self._log(f"goes on from the snapshot of step {step}")
        elif self._life > 1:
            self._log("there is no snapshot: it goes on from worker 0's values, and the optimizer's state is lost")

    def restore(self, step: int) -> None:
        """Take over the snapshot of `step`. Raises ParameterServerError if it is of another model."""
        assert self._snapshots is not None
        state = self._snapshots.load(step)
        if state is None or state["digest"] != _layout(self.plan, self._chunks):
            problem = "cannot be read" if state is None else "is of another model, number of servers or settings"
            raise ParameterServerError(
                f"{self.name}: the snapshot of step {step} in {self._snapshots.folder} {problem}: choose another "
                "folder, or remove it"
            )
        for index, values in state["values"].items():
            self._shards.values[index].copy_(values)
        self._shards.load_state(state["state"])
        self._extras = dict(state["extras"])
        self._is_filled = True
        self._snapshot_step = int(state["step"])
        self.consistency.begin_at(self._snapshot_step)
        self._made = dict.fromkeys(self._chunks, self._snapshot_step - 1)

    def serve(self) -> None:
        """Serve until every worker has left, or SIGTERM comes. Raises ParameterServerError if no worker ever comes."""
        began = time.monotonic()
        with contextlib.closing(Wakeup()) as wakeup, _on_signals(self._take_signal, wakeup):
            poller = Poller(self._endpoint, wakeup)
            while not self._stop and not self.consistency.is_over:
                poller.wait(_TICK_S)
                self._receive_all()
                if self._is_warned or time.monotonic() - self._ticked > _TICK_S / 5:
                    self._tick(began)
            self._finish(poller)
        for line in self.statistics.lines(name=self.name, ran_s=time.monotonic() - began):
            print(line, flush=True)

    def close(self) -> None:
        """Finish writing, let go of all memory."""
        if self._snapshots is not None:
            self._snapshots.wait()
        for peer in self._peers.values():
            if peer.memory is not None:
                peer.memory.close()

    def _take_signal(self, signum: int) -> None:
        """TERM: nobody needs this server any more. USR1: the job's time is nearly up, so what is here is saved now."""
        if signum == signal.SIGTERM:
            self._stop = True
        else:
            self._is_warned = True

    def _receive_all(self) -> None:
        while (received := self._endpoint.receive()) is not None:
            address, message = received
            try:
                check_fields(message, CLIENT_MESSAGES)
                self._handle(address, message)
            except MalformedError as error:
                self._endpoint.refused["malformed"] += 1
                name = self._endpoint.peers[address].name
                self._log(f"refused a message of {name}: {error}")
                self._endpoint.send(address, Message("malformed", {"problem": str(error)}))

    def _tick(self, began: float) -> None:
        now = self._ticked = time.monotonic()
        heard = {address: peer.heard_s for address, peer in self._endpoint.peers.items()}
        for replica, peer in self._workers.items():
            worker = self.consistency.workers[replica]
            silent_s = now - heard.get(peer.address, began)
            if worker.is_active and silent_s > self._settings.lost_after_s and not self.consistency.waits_for_all:
                worker.is_lost = True
                self._log(f"nothing was heard of worker {replica} for {silent_s:.0f} s; nobody waits for it")
        self._go_on()
        if self._is_warned:
            self._snapshot_when_due()
        if self._life > 1 and now - began > self._settings.lost_after_s and not self.consistency.waits_for_all:
            for worker in self.consistency.workers:  # those that were left out in an earlier life never come
                worker.is_lost = worker.is_lost or not worker.has_joined
        if not self._workers and now - began > self._settings.timeout_s:
            raise ParameterServerError(f"{self.name}: no worker has come within {self._settings.timeout_s:g} s")

    def _finish(self, poller: Poller) -> None:
        """Answer those that ask once more, because an answer was lost; write what the training has come to."""
        self._is_warned = True
        self._snapshot_when_due()
        deadline = time.monotonic() + _LINGER_S
        while not self._stop and (time.monotonic() < deadline or self._is_watched()):
            poller.wait(0.1)
            self._receive_all()

    def _is_watched(self) -> bool:
        """Whether an evaluator still wants the values."""
        heard = {address: peer.heard_s for address, peer in self._endpoint.peers.items()}
        watching = [peer for peer in self._peers.values() if peer.role == "evaluator" and not peer.has_left]
        limit = time.monotonic() - self._settings.lost_after_s
        return any(heard.get(peer.address, 0.0) > limit for peer in watching)

    def _log(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    # ---- who is there ----

    def _join(self, address: bytes, message: Message) -> None:
        facts = message.facts
        if facts["digest"] != self.plan.digest:
            entries = (encode([[entry.kind, entry.name, entry.facts] for entry in self.plan.entries]),)
            self._endpoint.send(address, Message("refused", {}, entries))
            return
        if address in self._peers:  # it says so again, because it has not heard the answer
            self._peers[address].rows.forget()
            if any(peer.address == address for peer, _ in self._waiting_to_join):
                self._endpoint.send(address, Message("wait"))
            else:
                self._welcome(self._peers[address], message)
            return
        role, replica, ticket = facts["role"], facts["replica"], facts.get("memory")
        if role not in ("worker", "evaluator") or replica not in range(
            self.plan.workers if role == "worker" else 1 << 16
        ):
            raise MalformedError(f"there is no {role} {replica} in a run of {self.plan.workers} workers")
        memory = SharedSegment.open(ticket) if ticket is not None and self._memory is not None else None
        if memory is not None and memory.tensor.numel() < self.plan.partition.bytes(self._index):
            raise MalformedError(f"the shared memory of {memory.tensor.numel()} bytes is too small for the chunks here")
        peer = _Peer(address, role, replica, memory)
        if peer.role == "worker":
            self._replace(replica)
            self._workers[replica] = peer
        self._peers[address] = peer
        if self._is_filled or (peer.role == "worker" and replica == 0):
            self._welcome(peer, message)
        else:
            self._waiting_to_join.append((peer, message))

    def _replace(self, replica: int) -> None:
        """Forget the earlier life of a replica. What it has pushed counts: it was made for that step."""
        old = self._workers.pop(replica, None)
        if old is None:
            return
        self._peers.pop(old.address, None)
        for by_step in self._pending.values():
            for held in by_step.values():
                if replica in held and old.memory is not None:
                    kept = held[replica]
                    held[replica] = replace(kept, gradient=_own_copy(kept.gradient))
        self._deferred = [each for each in self._deferred if each[0] is not old]
        self._waiting_to_join = [each for each in self._waiting_to_join if each[0] is not old]
        self._gathers.forget(replica)
        self._endpoint.forget(old.address)
        if old.memory is not None:
            old.memory.close()

    def _welcome(self, peer: _Peer, message: Message) -> None:
        step = self.consistency.step
        self._gathers.count = max(self._gathers.count, message.facts["gathers"])
        if peer.role == "worker":
            step = self.consistency.join(
                peer.replica, done=message.facts["done"], sync_step=min(self._made.values(), default=-1) + 1
            )
        facts = {
            "step": step,
            "is_filled": self._is_filled,
            "gathered": self._gathers.count,
            "memory": None if self._memory is None else self._memory.ticket,
            "reads_gradients": peer.memory is not None,
        }
        self._endpoint.send(peer.address, Message("joined", facts))
        self._go_on()

    def _fill(self, peer: _Peer, _: Message) -> None:
        """The first replica's values are here: let the others in."""
        self._is_filled = True
        if self._snapshots is not None:
            self._snapshot(self.consistency.step)
        for other in self._peers.values():
            other.rows.forget()
        self._endpoint.send(peer.address, Message("filled"))
        waiting, self._waiting_to_join = self._waiting_to_join, []
        for other, message in waiting:
            self._welcome(other, message)

    def _leave(self, peer: _Peer, _: Message) -> None:
        peer.has_left = True
        if peer.role == "worker":
            self.consistency.workers[peer.replica].has_finished = True
        self._endpoint.send(peer.address, Message("left"))
        self._go_on()

    def _fail(self, peer: _Peer, message: Message) -> None:
        """A worker ends with an exception: the others need not wait until it is missed."""
        if peer.role == "worker":
            self.consistency.workers[peer.replica].is_lost = not self.consistency.waits_for_all
            self._log(f"worker {peer.replica} ends with {message.facts['error']}")
            self._go_on()

    # ---- messages ----

    def _handle(self, address: bytes, message: Message) -> None:
        """Act on a message whose fields have the right types. Raises MalformedError if they do not fit this server."""
        if message.kind == "join":
            self._join(address, message)
            return
        peer = self._peers.get(address)
        if peer is None:
            self._endpoint.send(address, Message("unknown"))  # of an earlier life of ours: it has to join again
            return
        if peer.role == "worker":
            self.consistency.hear(peer.replica)
        elif message.kind in _OF_WORKERS:
            raise MalformedError(f"message {message.kind!r} is for workers, not for role {peer.role!r}")
        self.statistics.bytes_in += sum(tensor.nbytes for tensor in message.tensors)
        handlers: Mapping[str, Callable[[_Peer, Message], None]] = {
            "heartbeat": lambda *_: None,
            "memory": self._read_memory,
            "fail": self._fail,
            "push": self._push,
            "pull": self._pull,
            "ask": self._ask,
            "again": self._pull,
            "value": self._take_value,
            "ready": self._fill,
            "gather": self._gather,
            "extras": self._take_extras,
            "fetch": self._give_extras,
            "state": self._give_state,
            "load": self._load_state,
            "statistics": self._give_statistics,
            "leave": self._leave,
        }
        handlers[message.kind](peer, message)

    def _chunk(self, index: int) -> Chunk:
        chunk = self._chunks.get(index)
        if chunk is None:
            raise MalformedError(f"chunk {index} is not here: these are {sorted(self._chunks)}")
        return chunk

    def _read_memory(self, peer: _Peer, _: Message) -> None:
        peer.reads_memory = True

    def _take_value(self, peer: _Peer, message: Message) -> None:
        if peer.role != "worker" or peer.replica != 0:
            return
        chunk = self._chunk(message.facts["chunk"])
        if [(each.shape, each.dtype) for each in message.tensors] != [((chunk.numel,), chunk.dtype)]:
            raise MalformedError(f"the values are not those of chunk {chunk.index}")
        self._shards.values[chunk.index].copy_(message.tensors[0])
        for other in self._peers.values():
            other.rows.forget(chunk.index)  # they have to be given all
        if self._is_filled:
            self._reply(peer, message, "taken", {})

    def _push(self, peer: _Peer, message: Message) -> None:
        facts = message.facts
        chunk, step, is_last = self._chunk(facts["chunk"]), facts["step"], bool(facts.get("is_last"))
        gradient = self._gradient(peer, chunk, message)
        if (
            facts["groups"] != peer.groups or not peer.groups
        ):  # the same object as long as they are equal, which spares a comparison
            check_groups(facts["groups"], self._groups)
            peer.groups = [dict(group) for group in facts["groups"]]
        self.statistics.pushes += 1
        is_new = self.consistency.push(peer.replica, step, chunk.index)
        if is_last:
            self.consistency.complete(peer.replica, step)
        if self.consistency.mode == "sync":
            self._push_in_step(peer, chunk, step, gradient)
        else:
            if is_new:
                version = self._versions[chunk.index]
                self.statistics.staleness[version - peer.seen.get(chunk.index, version)] += 1
                self._make(chunk, [gradient], peer.groups)
            self._answer_when_allowed(peer, chunk.index, step, is_last=is_last)
        if is_last:
            self._go_on()

    def _push_in_step(self, peer: _Peer, chunk: Chunk, step: int, gradient: Gradient) -> None:
        if step <= self._made[chunk.index]:
            self.statistics.dropped += 1
            self._answer(peer, chunk.index, step)
            return
        pending = self._pending[chunk.index].setdefault(step, {})
        if peer.replica not in pending or pending[peer.replica].peer is not peer:  # else it came twice
            pending[peer.replica] = _Held(peer, gradient, peer.groups, time.monotonic())
        self.statistics.queue = max(self.statistics.queue, sum(map(len, self._pending[chunk.index].values())))
        self._make_due(chunk)

    def _gradient(self, peer: _Peer, chunk: Chunk, message: Message) -> Gradient:
        if message.facts.get("shared") and peer.memory is not None:
            flat = chunk.in_memory(peer.memory.tensor)
            self.statistics.bytes_shared += chunk.nbytes
            absent = message.facts.get("absent")
            return flat if absent is None else ChunkGradient(flat, positions(chunk, absent))
        return read_gradient(chunk, message.facts, message.tensors)

    def _make_due(self, chunk: Chunk) -> None:
        """Make the steps of a chunk that have all their gradients."""
        by_step = self._pending[chunk.index]
        last = self._last
        while (step := self.consistency.due(by_step)) is not None:
            held = by_step.pop(step)
            now = time.monotonic()
            if chunk is last:  # of a step, one wait counts
                for replica, each in held.items():
                    self.statistics.add_wait(replica, now - each.since)
            self.statistics.staleness[0] += len(held)
            self._make(chunk, [held[replica].gradient for replica in sorted(held)], held[min(held)].groups)
            self._made[chunk.index] = step
            for replica in held:
                peer = self._workers.get(replica)
                if peer is held[replica].peer:
                    self._answer(peer, chunk.index, step)
            for old in [other for other in by_step if other <= step]:
                del by_step[old]
            self._snapshot_when_due()

    def _make(self, chunk: Chunk, gradients: Sequence[Gradient], groups: list[dict[str, Any]]) -> None:
        """Make one step of the optimizer on a chunk."""
        began = time.monotonic()
        gradient = average(chunk, gradients, self._means[chunk.dtype][: chunk.numel])
        changed = self._shards.step({chunk.index: gradient}, groups=groups)[chunk.index]
        self._versions[chunk.index] += 1
        self.statistics.steps += 1
        count_step()
        if changed is not None and not isinstance(gradient, torch.Tensor) and gradient.sparse:
            self._sparse.add(chunk.index)
        if chunk.index in self._sparse:
            for peer in self._peers.values():
                peer.rows.add(chunk, changed)
        self.statistics.apply_s += time.monotonic() - began

    def _answer_when_allowed(self, peer: _Peer, chunk: int, step: int, *, is_last: bool) -> None:
        if is_last and not self.consistency.may_go_on(peer.replica):
            self._deferred.append((peer, chunk, step, time.monotonic()))
            self.statistics.queue = max(self.statistics.queue, len(self._deferred))
        else:
            self._answer(peer, chunk, step)

    def _go_on(self) -> None:
        """Let go on who may, now that somebody has pushed, left or was given up."""
        self._finish_gather()
        if self.consistency.mode == "sync":
            for chunk in self._chunks.values():
                self._make_due(chunk)
            return
        deferred, self._deferred = self._deferred, []
        for peer, index, step, since in deferred:
            if self.consistency.may_go_on(peer.replica):
                self.statistics.add_wait(peer.replica, time.monotonic() - since)
                self._answer(peer, index, step)
            else:
                self._deferred.append((peer, index, step, since))
        self._snapshot_when_due()

    def _pull(self, peer: _Peer, message: Message) -> None:
        """Give all rows: it may have nothing yet, or what it was given may be lost."""
        self._answer(peer, self._chunk(message.facts["chunk"]).index, message.facts["step"], every_row=True)

    def _answer(self, peer: _Peer, index: int, step: int, *, every_row: bool = False) -> None:
        """Give a peer the values of a chunk."""
        chunk = self._chunks[index]
        values = self._shards.values[index]
        rows = None if every_row or index not in self._sparse else peer.rows.numbers(chunk)
        facts: dict[str, Any] = {"chunk": index, "step": step}
        if self.consistency.mode == "sync":
            facts["made"] = self._made[index]
        elif peer.role == "worker":
            facts["made"] = self.consistency.workers[peer.replica].clock - 1
        if peer.role != "worker":
            step_made = min(self._made.values()) + 1 if self.consistency.mode == "sync" else self.consistency.step
            facts["training"] = [step_made, self.consistency.is_over]
        tensors: tuple[torch.Tensor, ...] = ()
        if peer.reads_memory and rows is None:
            facts["shared"] = True
            self.statistics.bytes_shared += chunk.nbytes
        else:
            wire = self._settings.compression or "float32"
            more, tensors = write_values(chunk, values, "float32" if peer.reads_memory else wire, rows)
            facts.update(more)
            self.statistics.bytes_out += sum(tensor.nbytes for tensor in tensors)
        peer.seen[index] = self._versions[index]
        if index in self._sparse:
            peer.rows.begin(chunk)
        # In sync mode without backup workers nobody changes the values before all workers have them.
        is_still = self.consistency.waits_for_all and peer.role == "worker" and step >= 0
        self._endpoint.send(peer.address, Message("pushed", facts, tensors), copy=not is_still)

    def _ask(self, peer: _Peer, message: Message) -> None:
        """Say what became of gradients whose answers have not come."""
        missing, answered = [], []
        waits: set[int] = set()
        for index, step in message.facts["outstanding"]:
            by_step = self._pending[self._chunk(index).index]
            if step < 0 or peer.role != "worker":  # a question is answered at once, so it or the answer was lost
                missing.append([index, step])
            elif peer.replica in by_step.get(step, ()):
                waits.update(self.consistency.missing(step, by_step[step]))
            elif any(each[0] is peer and each[1] == index for each in self._deferred):
                slowest = min(m.clock for m in self.consistency.workers if m.is_active)
                waits.update(r for r, m in enumerate(self.consistency.workers) if m.is_active and m.clock == slowest)
            elif self.consistency.workers[peer.replica].pushed.get(index, -1) >= step or step <= self._made[index]:
                answered.append([index, step])
            else:
                missing.append([index, step])
        facts = {"missing": missing, "answered": answered, "waits_for": sorted(waits)}
        self._endpoint.send(peer.address, Message("asked", facts))

    # ---- things beside the parameters ----

    def _gather(self, peer: _Peer, message: Message) -> None:
        if self._gathers.add(peer.replica, message):
            self._finish_gather()
        else:
            self._reply(peer, message, "gathered", *self._gathers.result())

    def _finish_gather(self) -> None:
        active = [replica for replica, worker in enumerate(self.consistency.workers) if worker.is_active]
        for replica, message in self._gathers.finish(active).items():
            if replica in self._workers:
                self._reply(self._workers[replica], message, "gathered", *self._gathers.result())

    def _take_extras(self, peer: _Peer, message: Message) -> None:
        names, tensors = message.facts["names"], message.tensors
        for name, tensor in itertools.zip_longest(names, tensors):
            mine = self._extras.get(name)
            if mine is None or tensor is None or (mine.shape, mine.dtype) != (tensor.shape, tensor.dtype):
                raise MalformedError(f"the model has no buffer or frozen parameter {name!r} like the tensor for it")
        if peer.replica == 0:
            self._extras.update(zip(names, tensors, strict=True))

    def _give_extras(self, peer: _Peer, message: Message) -> None:
        names = [name for name in message.facts["names"] if name in self._extras]
        self._reply(peer, message, "extras", {"names": names}, tuple(self._extras[name] for name in names))

    def _give_state(self, peer: _Peer, message: Message) -> None:
        self._reply(
            peer, message, "state", {}, (encode(self._shards.state_of(self._chunk(message.facts["chunk"]).index)),)
        )

    def _load_state(self, peer: _Peer, message: Message) -> None:
        chunk, states = self._chunk(message.facts["chunk"]), decode_value(message, list[dict[str, Any]])
        try:
            self._shards.load_state_of(chunk.index, states)
        except ArgumentError as error:
            raise MalformedError(str(error)) from error
        self._reply(peer, message, "loaded", {})

    def _give_statistics(self, peer: _Peer, message: Message) -> None:
        self._reply(peer, message, "statistics", {"counts": self.statistics.as_dict()})

    def _reply(
        self, peer: _Peer, message: Message, kind: str, facts: dict[str, Any], tensors: tuple[torch.Tensor, ...] = ()
    ) -> None:
        """Answer a request, with its number, by which its sender knows it."""
        facts["request"] = message.facts.get("request")
        self._endpoint.send(peer.address, Message(kind, facts, tensors), copy=True)

    # ---- snapshots ----

    def _snapshot_when_due(self) -> None:
        """Write a snapshot after so many steps, or if one was asked for: in sync mode only between two steps."""
        if self._snapshots is None or not self._is_filled or not self._chunks:
            return
        step = self.consistency.step
        if self.consistency.mode == "sync":
            made = set(self._made.values())
            if len(made) > 1:
                return
            step = made.pop() + 1
        every = self._settings.snapshot_every
        if step // every > self._snapshot_step // every or (self._is_warned and step != self._snapshot_step):
            self._is_warned = False
            self._snapshot(step)

    def _snapshot(self, step: int) -> None:
        assert self._snapshots is not None
        state = {
            "step": step,
            "digest": _layout(self.plan, self._chunks),
            "values": self._shards.values,
            "state": self._shards.state(),
            "extras": self._extras,
        }
        self._snapshots.write(step, state)
        self._snapshot_step = step
        self.statistics.snapshots += 1


def _layout(plan: RunPlan, chunks: Mapping[int, Chunk]) -> str:
    """A text that is the same for snapshots that fit: the model and the partition."""
    shapes = [(entry.kind, entry.name, entry.facts) for entry in plan.entries if entry.kind != "setting"]
    return hashlib.sha256(repr((shapes, sorted(chunks.items()))).encode()).hexdigest()


def _own_copy(gradient: Gradient) -> Gradient:
    """A gradient that does not lie in a worker's memory any more."""
    if isinstance(gradient, torch.Tensor):
        return gradient.clone()
    return replace(gradient, flat=None if gradient.flat is None else gradient.flat.clone())


@contextlib.contextmanager
def _on_signals(act: Callable[[int], None], wakeup: Wakeup) -> Iterator[None]:
    """Call `act` at SIGTERM and SIGUSR1, and end the wait that is under way."""

    def handle(signum: int, _: FrameType | None) -> None:
        act(signum)
        wakeup.set()

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
