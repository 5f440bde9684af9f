"""A worker's (or the evaluator's) side of the parameter servers: gives gradients, takes values, and keeps in touch.

Made by the strategy. The thread that trains does all the work, between its own steps; ZeroMQ moves bytes meanwhile. A
second thread only says once a second that this worker lives.

A server that is started again is found by the store and joined again; what was not answered is sent again, and the
server knows what it has had. A break of the network of any length below `timeout_s` is bridged the same way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddp.comm.codec import encode
from ddp.comm.layout import Entry
from ddp.comm.shared_memory import SharedSegment
from ddp.errors import DdpError, ParameterServerError
from ddp.strategies.parameter_server.client_endpoint import ClientEndpoint
from ddp.strategies.parameter_server.gradient_codec import Losses, read_values, write_gradient
from ddp.strategies.parameter_server.message_fields import SERVER_MESSAGES, check_fields, decode_value
from ddp.strategies.parameter_server.messages import MalformedError, Message
from ddp.strategies.parameter_server.poller import Poller
from ddp.strategies.parameter_server.rendezvous import ProcessRole, ServerDirectory
from ddp.strategies.parameter_server.run_plan import RunPlan, raise_mismatch
from ddp.strategies.sharding.chunk_gradient import ChunkGradient, flatten_gradients
from ddp.strategies.sharding.partition import Chunk
from ddp.torch_internals import foreach_copy, version_of

__all__ = ["Client", "Training"]

_HEARTBEAT_S = 1.0
_ASK_S = 2.0  # after so long without a message, a server that owes an answer is asked for its state
_QUIET_S = 3.0  # after so long without a message, the store is asked whether the server has a new life
_LEAVE_S = 2.0
_SMALL_BYTES = 1 << 20
_PART_BYTES = 32 << 20
_WINDOW = 128  # chunks under way to a server; its queue to one worker takes 256 messages
_WINDOW_BYTES = 32 << 20
_NAMES = 256  # tensors beside the parameters in one message


@dataclass(frozen=True)
class Training:
    """Where the training stands: steps made so far, and whether all workers are through."""

    step: int
    is_over: bool


@dataclass(frozen=True)
class _Extra:
    """What was sent of a buffer or frozen parameter: its version and place, and its value if that is small."""

    version: tuple[int, int]
    value: torch.Tensor


@dataclass
class _Link:
    """The way to one server in its present life. `outstanding` has what was not answered, by chunk and step."""

    index: int
    life: int
    endpoint: ClientEndpoint
    values: SharedSegment | None = None
    has_joined: bool = False
    is_ready: bool = False  # and has its values
    step: int = 0
    joins: int = 0
    may_share: bool = False  # gradients by memory
    connections: int = 0
    outstanding: dict[tuple[int, int], Message] = field(default_factory=dict)
    unsent: deque[Message] = field(default_factory=deque)
    arrived: deque[Message] = field(default_factory=deque)
    answers: dict[str, Message] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)
    touched: float = 0.0
    is_asking: bool = False

    @property
    def contact(self) -> tuple[int, int, int]:
        """Changes whenever something that was sent before may have been lost."""
        return self.life, self.joins, self.endpoint.connections


class Client:
    """See the module. `step` is the number of the next step; `statistics` what this side has counted.

    All methods may block until the servers have answered, at most `timeout_s` of the settings without any progress;
    they raise ParameterServerError then.
    """

    def __init__(self, plan: RunPlan, process: ProcessRole, directory: ServerDirectory) -> None:
        self.plan = plan
        self.process = process
        self.step = 0
        self.statistics: dict[str, float] = {"steps": 0, "wait_s": 0.0, "bytes_out": 0, "bytes_in": 0}
        self._directory = directory
        self._settings = plan.settings
        self._name = f"{process.role} {process.index}" if process.role == "worker" else process.role
        self._chunks = {chunk.index: chunk for chunk in plan.partition.chunks}
        parts = [plan.partition.of(server) for server in range(process.servers)]
        self._last_of = {chunks[-1].index for chunks in parts if chunks}
        self._targets = {
            index: chunk.in_parameters([parameter.data for parameter in plan.parameters])
            for index, chunk in self._chunks.items()
        }
        shares = self._settings.shared_memory and SharedSegment.available and process.role == "worker"
        sizes = [plan.partition.bytes(server) for server in range(process.servers)]
        self._memories = [SharedSegment(size) if shares and size else None for size in sizes]  # gradients, by server
        largest = max((chunk.nbytes for chunk in plan.partition.chunks), default=1)
        self._window = min(_WINDOW, max(2, _WINDOW_BYTES // max(1, largest)))  # where tensors go by the network
        self._losses: Losses = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._failure: DdpError | None = None
        self._known_extras: dict[str, _Extra] = {}  # what of them the first server has
        self._made = -1  # the last step that a server has answered
        self._has_made = 0  # steps of this life
        self._pulls = 0
        self._gathers = 0
        self._has_filled = False
        self._requests = 0
        self._training = Training(0, False)
        self._waits_for: dict[int, list[int]] = {}
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._links: list[_Link] = []
        self._poller = Poller()
        self._heartbeats: threading.Thread | None = None

    # ---- coming and going ----

    def join(self) -> int:
        """Meet all servers; return the number of steps that the training has made. The values are taken over.

        The first replica's values are everybody's, unless the servers have a snapshot or train already. Raises
        LayoutMismatchError, KeyRefusedError, VersionMismatchError, and ParameterServerError if a server does not come.
        """
        with self._lock:
            for server in range(self.process.servers):
                address = self._directory.find(server, 1, wait_s=self._settings.timeout_s)
                if address is None:
                    raise ParameterServerError(
                        f"{self._name}: parameter server {server} has not come within {self._settings.timeout_s:g} s"
                    )
                life = 1
                while (newer := self._directory.find(server, life + 1)) is not None:
                    life, address = life + 1, newer
                self._links.append(self._open(server, life, address))
            for link in self._links:
                self._send_join(link)
            self._wait(lambda: all(link.is_ready for link in self._links))
            # A server without a chunk, where there are more servers than elements, counts no steps.
            self.step = min(link.step for link in self._links if self.plan.partition.of(link.index))
            self._heartbeats = threading.Thread(target=self._send_heartbeats, name="ddp-ps-beat", daemon=True)
            self._heartbeats.start()
            if not (self.process.role == "worker" and self.process.index == 0 and self._has_filled):
                self.fetch_extras()
            self.pull()
            return self.step

    def leave(self, error: str | None = None) -> None:
        """Say that this worker is through, or that it ends with an error; let go of everything."""
        if self._closing.is_set():
            return
        self._closing.set()
        with self._lock:
            message = Message("leave") if error is None else Message("fail", {"error": error[:500]})
            for link in self._links:
                if link.is_ready:
                    link.endpoint.send(message)
            deadline = time.monotonic() + (_LEAVE_S if error is None else 0.2)
            with contextlib.suppress(ParameterServerError, OSError):  # it is over, whatever a server says now
                while time.monotonic() < deadline and not all("left" in link.answers for link in self._links):
                    self._pump(0.1)
            for link in self._links:
                self._close(link)
            for memory in self._memories:
                if memory is not None:
                    memory.close()
        if self._heartbeats is not None:
            self._heartbeats.join(timeout=2 * _HEARTBEAT_S)

    def _open(self, server: int, life: int, address: str) -> _Link:
        endpoint = ClientEndpoint(
            self.process.key,
            address,
            name=self._name,
            encrypt=self._settings.encrypt,
            max_frame_bytes=self.plan.frame_bytes,
        )
        self._poller.add(endpoint)
        return _Link(server, life, endpoint)

    def _send_join(self, link: _Link) -> None:
        """Tell a server who this is; it answers "joined". May be said again."""
        memory = self._memories[link.index]
        link.has_joined = link.is_ready = False
        link.connections = link.endpoint.connections
        facts = {
            "role": self.process.role,
            "replica": self.process.index,
            "digest": self.plan.digest,
            "done": self.step if self._has_made else 0,
            "gathers": self._gathers,
            "memory": None if memory is None else memory.ticket,
        }
        link.endpoint.send(Message("join", facts))

    def _joined(self, link: _Link, facts: Mapping[str, Any]) -> None:
        """A server knows this worker now. If it has nothing yet, this is the first replica, and gives it its values."""
        link.has_joined = True
        link.may_share = self._memories[link.index] is not None and facts["reads_gradients"]
        link.step = facts["step"]
        if link.values is None and facts["memory"] is not None and self._settings.shared_memory:
            link.values = SharedSegment.open(facts["memory"])
        if link.values is not None:
            link.endpoint.send(Message("memory"))
        if link.index == 0:
            self._gathers = max(self._gathers, facts["gathered"])
        if facts["is_filled"]:
            self._is_known(link)
            return
        self._has_filled = True
        if link.index == 0:
            self._known_extras = {}
            self.give_extras()
        for chunk in self.plan.partition.of(link.index):
            self._send(link, self._value_of(chunk))
        self._send(link, Message("ready"))

    def _value_of(self, chunk: Chunk) -> Message:
        """What this replica has of a chunk."""
        flat = torch.empty(chunk.numel, dtype=chunk.dtype)
        foreach_copy(chunk.in_flat(flat), self._targets[chunk.index])
        return Message("value", {"chunk": chunk.index}, (flat,))

    def _is_known(self, link: _Link) -> None:
        """Go on with a server that has what it needs: give it what its earlier life has not answered."""
        link.is_ready = True
        link.joins += 1
        for key, message in list(link.outstanding.items()):
            link.outstanding[key] = message if link.may_share else self._without_memory(message)
            self._send(link, link.outstanding[key])

    def _close(self, link: _Link) -> None:
        self._poller.remove(link.endpoint)
        link.endpoint.close()
        if link.values is not None:
            link.values.close()
            link.values = None

    # ---- steps ----

    def push(self, gradients: Sequence[torch.Tensor | None], groups: list[dict[str, Any]]) -> None:
        """Give the servers the gradients of all parameters, None where there is none; they send the new values back.

        Does not wait for them (`finish` does). `groups` are the optimizer's hyperparameters.
        """
        with self._lock:
            for chunk in self.plan.partition.chunks:
                self._make_room(chunk.server)
                self._push(self._links[chunk.server], chunk, gradients, groups)
                self._pump(0.0)
            self.statistics["steps"] += 1

    def _push(
        self, link: _Link, chunk: Chunk, gradients: Sequence[torch.Tensor | None], groups: list[dict[str, Any]]
    ) -> None:
        facts: dict[str, Any] = {"chunk": chunk.index, "step": self.step, "groups": groups}
        if chunk.index in self._last_of:
            facts["is_last"] = True
        gradient = flatten_gradients(chunk, gradients, self._staging(chunk, shared=link.may_share))
        tensors: tuple[torch.Tensor, ...] = ()
        is_rows = isinstance(gradient, ChunkGradient) and (bool(gradient.sparse) or gradient.flat is None)
        if link.may_share and not is_rows:
            facts["shared"] = True
            if isinstance(gradient, ChunkGradient):
                facts["absent"] = sorted(gradient.absent)
        else:
            more, tensors = write_gradient(chunk, gradient, self._settings.compression or "float32", self._losses)
            facts.update(more)
        message = Message("push", facts, tensors)
        link.outstanding[chunk.index, self.step] = message
        self._send(link, message)

    def _make_room(self, server: int) -> None:
        """Wait while so much is under way that a server's answers would be dropped, or come late for all else."""

        def has_room() -> bool:
            link = self._links[server]
            is_near = link.may_share and link.values is not None
            return len(link.outstanding) < (_WINDOW if is_near else self._window)

        if not has_room():
            self._wait(has_room)

    def _staging(self, chunk: Chunk, *, shared: bool) -> torch.Tensor:
        """Where a gradient (numel,) waits until the server has it."""
        memory = self._memories[chunk.server]
        if shared and memory is not None:
            return chunk.in_memory(memory.tensor)
        if chunk.index not in self._buffers:
            self._buffers[chunk.index] = torch.empty(chunk.numel, dtype=chunk.dtype)
        return self._buffers[chunk.index]

    def finish(self) -> None:
        """Wait until all values have come that were asked for, and put them in place."""
        with self._lock:
            began = time.monotonic()
            self._wait(lambda: not any(link.outstanding or link.unsent for link in self._links))
            self.statistics["wait_s"] += time.monotonic() - began

    def next_step(self) -> None:
        """Count a step; a worker that was left behind goes on where the others are."""
        self.step = max(self.step, self._made) + 1
        self._has_made += 1

    def pull(self) -> None:
        """Take over the newest values of all parameters."""
        with self._lock:
            self.finish()
            self._pulls -= 1  # no step has a negative number
            for chunk in self.plan.partition.chunks:
                self._make_room(chunk.server)
                link = self._links[chunk.server]
                message = Message("pull", {"chunk": chunk.index, "step": self._pulls})
                link.outstanding[chunk.index, self._pulls] = message
                self._send(link, message)
                self._pump(0.0)
            self.finish()

    @property
    def training(self) -> Training:
        """Where the training stood at the last `pull`; for the evaluator."""
        return self._training

    # ---- things beside the parameters ----

    def give_extras(self) -> None:
        """Give the first server the buffers and frozen parameters of this replica, the first, that have changed."""
        changed = {}
        for name, tensor in self.plan.extras.items():
            known = self._known_extras.get(name)
            version = version_of(tensor), tensor.data_ptr()
            # Normalisation layers change their statistics without counting versions: small ones are compared.
            is_small = tensor.nbytes <= _SMALL_BYTES
            if (
                known is None
                or known.version != version
                or (is_small and not torch.equal(known.value, tensor.detach().cpu()))
            ):
                value = tensor.detach().to("cpu", copy=True).contiguous()
                self._known_extras[name] = _Extra(version, value if is_small else torch.empty(0))
                changed[name] = value
        with self._lock:
            for names in _batches(list(changed)):
                tensors = tuple(changed[name] for name in names)
                self._send(self._links[0], Message("extras", {"names": names}, tensors))

    def fetch_extras(self) -> None:
        """Take over the buffers and frozen parameters of the first replica."""
        with self._lock:
            for names in _batches(list(self.plan.extras)):
                message = self._request(0, Message("fetch", {"names": names}), "extras")
                for name, tensor in zip(message.facts["names"], message.tensors, strict=True):
                    self.plan.extras[name].data.copy_(tensor)

    def give_values(self) -> None:
        """Give the servers the values that this replica, the first, has: they replace theirs."""
        with self._lock:
            self.finish()
            self.give_extras()
            for chunk in self.plan.partition.chunks:
                self._request(chunk.server, self._value_of(chunk), "taken")

    def gather(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes that each replica gives, of those that train, in their order. Every one must call it."""
        with self._lock:
            parts = torch.split(payload, _PART_BYTES)
            answer = self._request(0, Message("gather", {"number": self._gathers}, parts), "gathered")
            if answer.facts["is_lost"]:
                raise ParameterServerError(f"{self._name}: the result of a reduce() was lost with parameter server 0")
            self._gathers = answer.facts["number"] + 1
            every = iter(answer.tensors)
            return [torch.cat([next(every) for _ in range(count)]) for count in answer.facts["parts"]]

    def optimizer_states(self) -> list[dict[str, Any]]:
        """Return what each server's optimizer keeps, as `ddp.strategies.sharding.shards.whole_state` takes it."""
        with self._lock:
            self.finish()
            states: list[dict[str, Any]] = [{"chunks": {}, "groups": []} for _ in self._links]
            for chunk in self.plan.partition.chunks:
                message = self._request(chunk.server, Message("state", {"chunk": chunk.index}), "state")
                states[chunk.server]["chunks"][chunk.index] = decode_value(message, list[dict[str, Any]])
            return states

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Give each server's optimizer a state, of `ddp.strategies.sharding.shards.split_state`."""
        with self._lock:
            self.finish()
            for server, state in enumerate(states):
                for index, chunk_state in state["chunks"].items():
                    self._request(server, Message("load", {"chunk": index}, (encode(chunk_state),)), "loaded")

    def server_statistics(self) -> list[dict[str, Any]]:
        """Return what each server has counted in its present life."""
        with self._lock:
            return [
                self._request(server, Message("statistics"), "statistics").facts["counts"]
                for server in range(self.process.servers)
            ]

    def _request(self, server: int, message: Message, kind: str) -> Message:
        """Ask a server for something that may be asked twice; ask again when the connection has become another one."""
        self._requests += 1
        number = self._requests
        message = Message(message.kind, {**message.facts, "request": number}, message.tensors)
        self._send(self._links[server], message)
        asked = self._links[server].contact

        def has_come() -> bool:
            nonlocal asked
            link = self._links[server]
            if link.is_ready and asked != link.contact:
                asked = link.contact
                self._send(link, message)
            answer = link.answers.get(kind)
            return answer is not None and answer.facts.get("request") == number

        self._wait(has_come)
        return self._links[server].answers.pop(kind)

    # ---- what goes out and comes in ----

    def _send(self, link: _Link, message: Message) -> None:
        if self._closing.is_set():
            raise ParameterServerError(f"{self._name} has left the parameter servers (strategy.close())")
        if not link.has_joined:
            return  # what matters is said again when it has
        self.statistics["bytes_out"] += sum(tensor.nbytes for tensor in message.tensors)
        if link.unsent or not link.endpoint.send(message):
            link.unsent.append(message)

    def _pump(self, wait_s: float) -> None:
        """Take what has come, waiting at most so long for the first of it; send what could not go before."""
        if self._failure is not None:
            raise self._failure
        if wait_s > 0 and not any(link.arrived for link in self._links):
            self._poller.wait(wait_s)
        for link in list(self._links):
            while link.unsent and link.endpoint.send(link.unsent[0]):
                link.unsent.popleft()
            while (message := link.arrived.popleft() if link.arrived else link.endpoint.receive()) is not None:
                try:
                    check_fields(message, SERVER_MESSAGES)
                    self._take(link, message)
                except MalformedError as error:
                    raise ParameterServerError(
                        f"{self._name}: a message of parameter server {link.index} is malformed: {error}"
                    ) from error

    def _take(self, link: _Link, message: Message) -> None:
        link.heard = time.monotonic()
        self.statistics["bytes_in"] += sum(tensor.nbytes for tensor in message.tensors)
        facts = message.facts
        if message.kind == "pushed":
            if link.outstanding.pop((facts["chunk"], facts["step"]), None) is not None:
                self._install(link, message)
        elif message.kind == "asked":
            link.is_asking = False
            self._waits_for[link.index] = facts["waits_for"]
            # What the server has answered came before this, or never comes.
            for index, step in facts["missing"]:
                again = link.outstanding.get((index, step))
                if again is not None:
                    self._send(link, again)
            for index, step in facts["answered"]:
                if (index, step) in link.outstanding:
                    self._send(link, Message("again", {"chunk": index, "step": step}))
        elif message.kind == "joined":
            self._joined(link, facts)
        elif message.kind == "filled":
            self._is_known(link)
        elif message.kind == "unknown":
            if link.has_joined:  # else it is about an earlier message
                link.unsent.clear()
                self._send_join(link)
        elif message.kind == "malformed":
            raise ParameterServerError(
                f"parameter server {link.index} refused a message of {self._name}: {facts['problem']}"
            )
        elif message.kind == "wait":
            self._waits_for[link.index] = [0]
        elif message.kind == "refused":
            entries = [Entry(*entry) for entry in decode_value(message, list[tuple[str, str, str]])]
            me, other = self._name, f"parameter server {link.index}"
            raise_mismatch(self.plan.entries, entries, rank=self.process.index, me=me, other=other)
        else:
            link.answers[message.kind] = message

    def _install(self, link: _Link, message: Message) -> None:
        facts = message.facts
        chunk = self._chunks[facts["chunk"]]
        targets = self._targets[chunk.index]
        if facts.get("made") is not None:
            self._made = max(self._made, facts["made"])
        if facts.get("training") is not None:
            self._training = Training(*facts["training"])
        if facts.get("shared"):
            assert link.values is not None
            foreach_copy(targets, chunk.in_flat(chunk.in_memory(link.values.tensor)))
        else:
            read_values(chunk, facts, message.tensors, targets)

    # ---- waiting, and what may happen meanwhile ----

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Wait until something is so, keeping in touch. Raises ParameterServerError when nothing moves for too long."""
        moved = time.monotonic()
        left = sum(len(link.outstanding) for link in self._links)
        while not is_done():
            self._pump(0.2)
            now = time.monotonic()
            if (still := sum(len(link.outstanding) for link in self._links)) != left:
                left, moved = still, now
            for link in list(self._links):
                self._keep_in_touch(link, now)
            if now - moved > self._settings.timeout_s:
                raise ParameterServerError(self._why(now, now - moved))

    def _keep_in_touch(self, link: _Link, now: float) -> None:
        """Once a second, say that this worker lives; when a server is quiet, ask for what it has not answered.

        One question at a time: on a slow network, answers to several would be in the way of what they ask for.
        """
        if link.connections != link.endpoint.connections:  # what was under way may be lost, the question too
            link.connections = link.endpoint.connections
            link.is_asking = False
            link.has_joined = link.has_joined and link.is_ready
        if now - link.touched >= _HEARTBEAT_S:
            link.touched = now
            if not link.has_joined:
                self._send_join(link)
            elif link.outstanding and not link.is_asking and now - link.heard > _ASK_S:
                outstanding = [list(key) for key in link.outstanding]
                link.is_asking = link.endpoint.send(Message("ask", {"outstanding": outstanding}))
            else:
                link.endpoint.send(Message("heartbeat"))
        if now - link.heard > _QUIET_S:
            address = self._directory.find(link.index, link.life + 1)
            if address is not None:
                self._reconnect(link, address)

    def _reconnect(self, link: _Link, address: str) -> None:
        """Go over to the next life of a server."""
        self._close(link)
        fresh = self._open(link.index, link.life + 1, address)
        fresh.outstanding = link.outstanding
        self._links[link.index] = fresh
        self._send_join(fresh)

    def _without_memory(self, message: Message) -> Message:
        """A message that carries the gradient that lies in shared memory."""
        if not message.facts.get("shared"):
            return message
        chunk = self._chunks[message.facts["chunk"]]
        facts = {key: value for key, value in message.facts.items() if key != "shared"}
        return Message(message.kind, {**facts, "flat": "float32"}, (self._staging(chunk, shared=True),))

    def _why(self, now: float, waited_s: float) -> str:
        quiet = [link for link in self._links if now - link.heard > 2 * _QUIET_S]
        start = f"{self._name}: nothing came back of step {self.step} for {waited_s:.0f} s"
        if quiet:
            servers = ", ".join(f"parameter server {link.index} at {link.endpoint.address}" for link in quiet)
            return f"{start}: {servers} did not answer for {now - quiet[0].heard:.0f} s"
        others = sorted({replica for waits in self._waits_for.values() for replica in waits})
        if others:
            what = (
                "has not made this step" if self._heartbeats is not None else "has not given its first values (prepare)"
            )
            return f"{start}: the servers wait for worker {', '.join(map(str, others))}, which {what}"
        return start

    def _send_heartbeats(self) -> None:
        """Say that this worker lives, while its own thread computes."""
        while not self._closing.wait(_HEARTBEAT_S):
            if self._lock.acquire(timeout=_HEARTBEAT_S):
                try:
                    if self._closing.is_set():
                        return
                    for link in self._links:
                        link.endpoint.send(Message("heartbeat"))
                        while (message := link.endpoint.receive()) is not None:
                            link.arrived.append(message)
                except DdpError as error:  # the thread that trains raises it
                    self._failure = error
                    return
                finally:
                    self._lock.release()


def _batches(names: list[str]) -> list[list[str]]:
    """Names in lists that one message can carry."""
    return [names[begin : begin + _NAMES] for begin in range(0, len(names), _NAMES)]
