"""A parameter server: holds its chunks of the model, receives gradients, makes steps, and sends values back.

`serve` is called by the strategy in a process of role "ps", and returns when all workers have finished. One thread,
one loop; this module handles membership, `steps` the training and `requests` all other requests.

The messages are listed in `ddp.strategies.parameter_server.messages`. An invalid one is refused: its sender gets the
reason, and the others are still served.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

import torch

from ddp.comm.codec import encode
from ddp.comm.shared_memory import SharedSegment
from ddp.errors import ParameterServerError
from ddp.strategies.parameter_server.endpoints import ServerEndpoint
from ddp.strategies.parameter_server.messages import CLIENT_MESSAGES, MalformedError, Message, check_fields
from ddp.strategies.parameter_server.rendezvous import ServerDirectory
from ddp.strategies.parameter_server.requests import Requests
from ddp.strategies.parameter_server.run_plan import RunPlan
from ddp.strategies.parameter_server.snapshot import Snapshots
from ddp.strategies.parameter_server.steps import ChangedRows, Participant, Steps

_TICK_S = 0.1
_LINGER_S = 0.3  # at the end, for workers that ask once more
_OF_WORKERS = frozenset({"push", "value", "ready", "gather", "extras", "load"})


class Server:
    """See the module."""

    def __init__(
        self, plan: RunPlan, optimizer: torch.optim.Optimizer, endpoint: ServerEndpoint, *, index: int, life: int
    ) -> None:
        self.name = f"parameter server {index}"
        self._plan = plan
        self._options = plan.options
        self._endpoint = endpoint
        self._index = index
        self._life = life
        self._steps = steps = Steps(plan, optimizer, index, endpoint, self._snapshot_when_due)
        self._requests = requests = Requests(endpoint, steps, plan.extras)
        self._consistency, self._statistics, self._peers = steps.consistency, steps.statistics, steps.participants
        self._workers: dict[int, Participant] = {}
        self._waiting_to_join: list[tuple[Participant, Message]] = []
        self._is_filled = False  # whether the values are the training's, not this process's initial ones
        self._snapshots: Snapshots | None = None
        if self._options.snapshots is not None and steps.chunks:
            self._snapshots = Snapshots(self._options.snapshots, index, _layout(plan, index))
        self._stop = self._is_warned = False
        self._handlers: Mapping[str, Callable[[Participant, Message], None]] = {
            "heartbeat": lambda *_: None,
            "memory": self._read_memory,
            "fail": self._fail,
            "push": self._push,
            "pull": steps.pull,
            "again": steps.pull,
            "ask": steps.ask,
            "value": self._set_value,
            "ready": self._fill,
            "gather": requests.gather,
            "extras": requests.store_extras,
            "fetch": requests.send_extras,
            "state": requests.send_state,
            "load": requests.load_state,
            "statistics": requests.send_statistics,
            "leave": self._leave,
        }

    def begin(self, directory: ServerDirectory) -> None:
        """Load a snapshot, if there is one: the newest, or at the start of the run the newest that all servers have.

        Raises ParameterServerError if it is of another model.
        """
        if self._snapshots is None:
            return
        steps = self._snapshots.whole_steps()
        step = max(steps, default=None)
        if self._life == 1:
            servers = [other for other in range(self._plan.partition.servers) if self._plan.partition.of(other)]
            step = directory.agree_on_step(self._index, servers, steps)
        if step is not None:
            state = self._snapshots.load(step)
            for index, values in state["values"].items():
                self._steps.shards.values[index].copy_(values)
            self._steps.shards.load_state(state["state"]["chunks"])
            self._steps.begin_at(step)
            self._requests.extras = dict(state["extras"])
            self._is_filled = True
            self._log(f"continues from the snapshot of step {step}")
        elif self._life > 1:
            self._log("there is no snapshot: it continues from worker 0's values, and the optimizer's state is lost")

    def serve(self) -> None:
        """Serve until every worker has left or SIGTERM arrives. Raises ParameterServerError if no worker ever joins."""
        began = ticked = time.monotonic()
        with _on_signals(self._on_signal):
            while not self._stop and not self._consistency.is_over:
                self._receive_all(_TICK_S)
                if self._is_warned or time.monotonic() - ticked >= _TICK_S:
                    ticked = time.monotonic()
                    self._tick(ticked, began)
            self._finish()
        for line in self._statistics.lines(name=self.name, ran_s=time.monotonic() - began):
            print(line, flush=True)

    def close(self) -> None:
        """Finish writing and release all memory."""
        if self._snapshots is not None:
            self._snapshots.wait()
        for peer in self._peers.values():
            if peer.memory is not None:
                peer.memory.close()

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        """Handle a signal. TERM: the server is no longer needed. USR1: the job's time is nearly up, so save now."""
        if signum == signal.SIGTERM:
            self._stop = True
        else:
            self._is_warned = True

    def _receive_all(self, timeout_s: float) -> None:
        """Handle all messages that have arrived, waiting at most `timeout_s` for the first."""
        while (received := self._endpoint.receive(timeout_s)) is not None:
            timeout_s = 0.0
            address, message = received
            try:
                check_fields(message, CLIENT_MESSAGES)
                self._handle(address, message)
            except MalformedError as error:
                self._endpoint.refused["malformed"] += 1
                name = self._endpoint.peers[address].name
                self._log(f"refused a message of {name}: {error}")
                self._endpoint.send(address, Message("malformed", {"problem": str(error)}))

    def _tick(self, now: float, began: float) -> None:
        heard = {address: peer.heard_s for address, peer in self._endpoint.peers.items()}
        for replica, peer in self._workers.items():
            worker = self._consistency.workers[replica]
            silent_s = now - heard.get(peer.address, began)
            if worker.is_active and silent_s > self._options.lost_after_s and not self._consistency.waits_for_all:
                worker.is_lost = True
                self._log(f"worker {replica} has been silent for {silent_s:.0f} s; the others no longer wait for it")
        self._let_continue()
        if self._life > 1 and now - began > self._options.lost_after_s and not self._consistency.waits_for_all:
            for worker in self._consistency.workers:  # those left out before a restart of the server never join
                worker.is_lost = worker.is_lost or not worker.has_joined
        if not self._workers and now - began > self._options.timeout_s:
            raise ParameterServerError(f"{self.name}: no worker has joined within {self._options.timeout_s:g} s")

    def _finish(self) -> None:
        """Answer repeated requests whose answers were lost; write the final state of the training."""
        self._is_warned = True
        self._snapshot_when_due()
        deadline = time.monotonic() + _LINGER_S
        while not self._stop and (time.monotonic() < deadline or self._is_watched()):
            self._receive_all(_TICK_S)

    def _is_watched(self) -> bool:
        """Return whether an evaluator still needs the values."""
        heard = {address: peer.heard_s for address, peer in self._endpoint.peers.items()}
        watching = [peer for peer in self._peers.values() if peer.role == "evaluator" and not peer.has_left]
        limit = time.monotonic() - self._options.lost_after_s
        return any(heard.get(peer.address, 0.0) > limit for peer in watching)

    def _log(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def _join(self, address: bytes, message: Message) -> None:
        facts = message.facts
        if facts["digest"] != self._plan.digest:
            entries = (encode([[entry.kind, entry.name, entry.facts] for entry in self._plan.entries]),)
            self._endpoint.send(address, Message("refused", {}, entries))
            return
        if address in self._peers:  # repeated, because the answer was lost
            self._peers[address].rows = ChangedRows()
            if any(peer.address == address for peer, _ in self._waiting_to_join):
                self._endpoint.send(address, Message("wait"))
            else:
                self._welcome(self._peers[address], message)
            return
        role, replica, ticket = facts["role"], facts["replica"], facts.get("memory")
        if role not in ("worker", "evaluator") or replica not in range(
            self._plan.workers if role == "worker" else 1 << 16
        ):
            raise MalformedError(f"there is no {role} {replica} in a run of {self._plan.workers} workers")
        memory = SharedSegment.open(ticket) if ticket is not None and self._steps.memory is not None else None
        if memory is not None and memory.tensor.numel() < self._plan.partition.bytes(self._index):
            raise MalformedError(f"the shared memory of {memory.tensor.numel()} bytes is too small for the chunks here")
        peer = Participant(address, role, replica, memory)
        if peer.role == "worker":
            self._replace(replica)
            self._workers[replica] = peer
        self._peers[address] = peer
        if self._is_filled or (peer.role == "worker" and replica == 0):
            self._welcome(peer, message)
        else:
            self._waiting_to_join.append((peer, message))

    def _replace(self, replica: int) -> None:
        """Drop the state of a replica before its restart. Its pushed gradients count: they belong to that step."""
        old = self._workers.pop(replica, None)
        if old is None:
            return
        self._peers.pop(old.address, None)
        self._steps.forget(old)
        self._waiting_to_join = [each for each in self._waiting_to_join if each[0] is not old]
        self._requests.forget(replica)
        self._endpoint.forget(old.address)
        if old.memory is not None:
            old.memory.close()

    def _welcome(self, peer: Participant, message: Message) -> None:
        step = self._consistency.step
        self._requests.gathered = max(self._requests.gathered, message.facts["gathers"])
        if peer.role == "worker":
            step = self._consistency.join(peer.replica, done=message.facts["done"], sync_step=self._steps.count)
        facts = {
            "step": step,
            "is_filled": self._is_filled,
            "gathered": self._requests.gathered,
            "memory": None if self._steps.memory is None else self._steps.memory.ticket,
            "reads_gradients": peer.memory is not None,
        }
        self._endpoint.send(peer.address, Message("joined", facts))
        self._let_continue()

    def _fill(self, peer: Participant, _: Message) -> None:
        """Admit the other workers, once the first replica's values are here."""
        self._is_filled = True
        if self._snapshots is not None:
            self._snapshot(self._snapshots, self._consistency.step)
        for other in self._peers.values():
            other.rows = ChangedRows()
        self._endpoint.send(peer.address, Message("filled"))
        waiting, self._waiting_to_join = self._waiting_to_join, []
        for other, message in waiting:
            self._welcome(other, message)

    def _leave(self, peer: Participant, _: Message) -> None:
        peer.has_left = True
        if peer.role == "worker":
            self._consistency.workers[peer.replica].has_finished = True
        self._endpoint.send(peer.address, Message("left"))
        self._let_continue()

    def _fail(self, peer: Participant, message: Message) -> None:
        """Handle a worker that ends with an exception, so that the others need not wait for a timeout."""
        if peer.role == "worker":
            self._consistency.workers[peer.replica].is_lost = not self._consistency.waits_for_all
            self._log(f"worker {peer.replica} ends with {message.facts['error']}")
            self._let_continue()

    def _handle(self, address: bytes, message: Message) -> None:
        """Handle a message whose fields have the right types. Raises MalformedError if they do not fit this server."""
        if message.kind == "join":
            self._join(address, message)
            return
        peer = self._peers.get(address)
        if peer is None:
            self._endpoint.send(address, Message("unknown"))  # from before our restart: it must join again
            return
        if peer.role == "worker":
            self._consistency.hear(peer.replica)
        elif message.kind in _OF_WORKERS:
            raise MalformedError(f"message {message.kind!r} is for workers, not for role {peer.role!r}")
        self._statistics.bytes_in += sum(tensor.nbytes for tensor in message.tensors)
        self._handlers[message.kind](peer, message)

    def _read_memory(self, peer: Participant, _: Message) -> None:
        peer.reads_memory = True

    def _set_value(self, peer: Participant, message: Message) -> None:
        if peer.replica == 0:
            self._steps.set_value(message)
            if self._is_filled:
                self._requests.reply(peer, message, "taken", {})

    def _push(self, peer: Participant, message: Message) -> None:
        self._steps.push(peer, message)
        if message.facts.get("is_last"):
            self._let_continue()

    def _let_continue(self) -> None:
        """Let workers continue where possible, after one has pushed, left or was lost."""
        self._requests.finish_gather()
        self._steps.let_continue()
        self._snapshot_when_due()

    def _snapshot_when_due(self) -> None:
        """Write a snapshot every `snapshot_every` steps, or on request; in sync mode only between two steps."""
        if self._snapshots is None or not self._is_filled or not self._steps.are_between:
            return
        step, last, every = self._steps.count, self._snapshots.step, self._options.snapshot_every
        if step // every > last // every or (self._is_warned and step != last):
            self._is_warned = False
            self._snapshot(self._snapshots, step)

    def _snapshot(self, snapshots: Snapshots, step: int) -> None:
        shards = self._steps.shards
        state = {"values": shards.values, "state": {"chunks": shards.state()}, "extras": self._requests.extras}
        snapshots.write(step, state)
        self._statistics.snapshots += 1


def _layout(plan: RunPlan, index: int) -> str:
    """Return a digest of the model and the partition, which is the same for compatible snapshots."""
    shapes = [(entry.kind, entry.name, entry.facts) for entry in plan.entries if entry.kind != "setting"]
    chunks = [(chunk.index, chunk) for chunk in plan.partition.of(index)]
    return hashlib.sha256(repr((shapes, chunks)).encode()).hexdigest()


@contextlib.contextmanager
def _on_signals(act: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `act` on SIGTERM and SIGUSR1."""
    before = {signum: signal.signal(signum, act) for signum in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
