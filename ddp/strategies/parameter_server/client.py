"""A client of the parameter servers (a worker or the evaluator): sends gradients, receives values, reconnects.

Made by the strategy. The training thread does all the work, between its own steps; ZeroMQ moves bytes meanwhile. A
second thread only sends a heartbeat once a second.

A restarted server is found through the store and joined again; unanswered messages are sent again, and the server
recognizes those that it has already handled. Network outages shorter than `timeout_s` are handled the same way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import zmq

from ddp.comm.codec import encode
from ddp.comm.layout import Entry
from ddp.comm.pinned_buffer import device_with_stream
from ddp.comm.shared_memory import SharedSegment
from ddp.errors import DdpError, ParameterServerError
from ddp.monitoring.debuggers import debugged_until
from ddp.monitoring.interrupts import has_started
from ddp.strategies.parameter_server.endpoints import ClientEndpoint, EndpointOptions
from ddp.strategies.parameter_server.messages import (
    SERVER_MESSAGES,
    MalformedError,
    Message,
    Residuals,
    check_fields,
    decode_value,
    read_values,
)
from ddp.strategies.parameter_server.rendezvous import ProcessRole, ServerDirectory
from ddp.strategies.parameter_server.run_plan import RunPlan, raise_mismatch
from ddp.strategies.parameter_server.server_link import HEARTBEAT_S, QUIET_S, DeviceCopies, ServerLink
from ddp.strategies.sharding.optimizer_state import State
from ddp.strategies.sharding.partition import Chunk
from ddp.torch_internals import foreach_copy, version_of

_LEAVE_S = 2.0
_SMALL_BYTES = 1 << 20
_PAYLOAD_BYTES = 32 << 20  # of a gathered tensor, in one message
_NAMES = 256  # tensors beside the parameters in one message


class Client:
    """See the module. `step` is the number of the next step; `statistics` has this client's counts.

    For the evaluator, `trained` is the number of steps that were made at the last `pull`, and `is_over` whether all
    workers had finished.

    All methods may block until the servers have answered; they raise ParameterServerError after the options'
    `timeout_s` without any progress.
    """

    def __init__(self, plan: RunPlan, process: ProcessRole, directory: ServerDirectory) -> None:
        self.plan = plan
        self.process = process
        self.step = 0
        self.trained = 0
        self.is_over = False
        self.statistics: dict[str, float] = {"steps": 0, "wait_s": 0.0, "bytes_out": 0, "bytes_in": 0}
        self._directory = directory
        self._options = plan.options
        self._name = f"{process.role} {process.index}" if process.role == "worker" else process.role
        owned = [plan.partition.of(server) for server in range(process.servers)]
        self._last_of = {chunks[-1].index for chunks in owned if chunks}
        values = [parameter.data for parameter in plan.parameters]
        self._targets = [chunk.in_parameters(values) for chunk in plan.partition.chunks]
        shares = self._options.shared_memory and SharedSegment.available and process.role == "worker"
        sizes = [plan.partition.bytes(server) for server in range(process.servers)]
        self._memories = [SharedSegment(size) if shares and size else None for size in sizes]  # gradients, by server
        device = device_with_stream(plan.parameters)
        self._copies = None if device is None else DeviceCopies(plan.partition, device)
        self._residuals: Residuals = {}
        self._failure: DdpError | None = None
        # What the first server has: their version and memory, and the value if it is small.
        self._known_extras: dict[str, tuple[tuple[int, int], torch.Tensor | None]] = {}
        self._made = -1  # the last step that a server has answered
        self._pulls = 0
        self._gathers = 0
        self._has_filled = False
        self._requests = 0
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._links: list[ServerLink] = []
        self._heartbeats: threading.Thread | None = None

    def join(self) -> int:
        """Join all servers and load their values; return the number of steps that the training has made.

        All start from the first replica's values, unless the servers have a snapshot or train already. Raises
        LayoutMismatchError, KeyRefusedError, VersionMismatchError, and ParameterServerError if a server does not start.
        """
        with self._lock:
            for server in range(self.process.servers):
                address = self._directory.find(server, 1, wait_s=self._options.timeout_s)
                if address is None:
                    raise ParameterServerError(
                        f"{self._name}: parameter server {server} has not come within {self._options.timeout_s:g} s"
                    )
                life = 1
                while (newer := self._directory.find(server, life + 1)) is not None:
                    life, address = life + 1, newer
                self._links.append(self._open(server, life, address))
            for link in self._links:
                self._join(link)
            self._wait(lambda: all(link.is_ready for link in self._links))
            # A server without a chunk, where there are more servers than elements, counts no steps.
            self.step = min(link.step for link in self._links if self.plan.partition.of(link.index))
            self._heartbeats = threading.Thread(target=self._send_heartbeats, name="ddp-ps-beat", daemon=True)
            self._heartbeats.start()
            if not (self.process.role == "worker" and self.process.index == 0 and self._has_filled):
                self.load_extras()
            self.pull()
            return self.step

    def leave(self, error: str | None = None) -> None:
        """Report that this worker has finished, or that it ends with an error; release everything."""
        if self._closing.is_set():
            return
        self._closing.set()
        with self._lock:
            message = Message("leave") if error is None else Message("fail", {"error": error[:500]})
            for link in self._links:
                if link.is_ready:
                    link.endpoint.send(message)
            deadline = time.monotonic() + (_LEAVE_S if error is None else 0.2)
            with contextlib.suppress(ParameterServerError, OSError):  # at the end, errors of servers do not matter
                while time.monotonic() < deadline and not all("left" in link.answers for link in self._links):
                    self._pump(0.1)
            for link in self._links:
                link.close()
            for memory in self._memories:
                if memory is not None:
                    memory.close()
        if self._heartbeats is not None and has_started(self._heartbeats):
            self._heartbeats.join(timeout=2 * HEARTBEAT_S)

    def _open(self, server: int, life: int, address: str) -> ServerLink:
        key, encrypt = self.process.key, self._options.encrypt
        options = EndpointOptions(key, encrypt=encrypt, max_frame_bytes=self.plan.frame_bytes)
        endpoint = ClientEndpoint(options, address, name=self._name)
        return ServerLink(server, life, endpoint, self.plan, self.statistics, self._memories[server])

    def _join(self, link: ServerLink) -> None:
        facts = {
            "role": self.process.role,
            "replica": self.process.index,
            "digest": self.plan.digest,
            "done": self.step,
            "gathers": self._gathers,
        }
        link.join(facts)

    def _on_joined(self, link: ServerLink, facts: Mapping[str, Any]) -> None:
        """Handle the answer to joining. If the server needs values, this is the first replica, which sends its own."""
        link.on_joined(facts)
        if link.index == 0:
            self._gathers = max(self._gathers, facts["gathered"])
        if facts["is_filled"]:
            link.on_ready()
            return
        self._has_filled = True
        if link.index == 0:
            self._known_extras = {}
            self.send_extras()
        for chunk in self.plan.partition.of(link.index):
            link.send(self._value_of(chunk))
        link.send(Message("ready"))

    def _value_of(self, chunk: Chunk) -> Message:
        """Return a message with this replica's values of a chunk."""
        flat = torch.empty(chunk.numel, dtype=chunk.dtype, device="cpu")
        foreach_copy(chunk.in_flat(flat), self._targets[chunk.index])
        return Message("value", {"chunk": chunk.index}, (flat,))

    def push(self, gradients: Sequence[torch.Tensor | None], groups: list[dict[str, Any]]) -> None:
        """Send the gradients of all parameters (None: no gradient); the servers answer with the new values.

        Does not wait for them (`finish` does). `groups` are the optimizer's hyperparameters.
        """
        with self._lock:
            if self._copies is not None:
                self._copies.start(gradients)
            for chunk in self.plan.partition.chunks:
                link = self._link_with_room(chunk.server)
                facts: dict[str, Any] = {"chunk": chunk.index, "step": self.step, "groups": groups}
                if chunk.index in self._last_of:
                    facts["is_last"] = True
                more, tensors = link.write(chunk, gradients, self._residuals, self._copies)
                link.request_values(Message("push", {**facts, **more}, tensors))
                self._pump(0.0)
            self.statistics["steps"] += 1

    def _link_with_room(self, server: int) -> ServerLink:
        """Return the link to a server, once so little is in flight that more may be sent."""
        if not self._links[server].has_room:
            self._wait(lambda: self._links[server].has_room)
        return self._links[server]

    def finish(self) -> None:
        """Wait until all requested values have arrived, and write them to the parameters."""
        with self._lock:
            began = time.monotonic()
            self._wait(lambda: not any(link.outstanding or link.unsent for link in self._links))
            self.statistics["wait_s"] += time.monotonic() - began

    def next_step(self) -> None:
        """Count a step; a worker that was left behind continues at the others' step."""
        self.step = max(self.step, self._made) + 1

    def pull(self) -> None:
        """Load the newest values of all parameters."""
        with self._lock:
            self.finish()
            self._pulls -= 1  # no step has a negative number
            for chunk in self.plan.partition.chunks:
                link = self._link_with_room(chunk.server)
                link.request_values(Message("pull", {"chunk": chunk.index, "step": self._pulls}))
                self._pump(0.0)
            self.finish()

    def send_extras(self) -> None:
        """Send the first server the changed buffers and frozen parameters of this replica, which must be the first."""
        changed = {}
        for name, tensor in self.plan.extras.items():
            known, value = self._known_extras.get(name, (None, None))
            version = version_of(tensor), tensor.data_ptr()
            # Normalisation layers change their statistics without counting versions: small ones are compared.
            if known != version or (value is not None and not torch.equal(value, tensor.detach().cpu())):
                changed[name] = value = tensor.detach().to("cpu", copy=True).contiguous()
                self._known_extras[name] = version, value if tensor.nbytes <= _SMALL_BYTES else None
        with self._lock:
            for names in _batches(list(changed)):
                tensors = tuple(changed[name] for name in names)
                self._links[0].send(Message("extras", {"names": names}, tensors))

    def load_extras(self) -> None:
        """Load the buffers and frozen parameters of the first replica."""
        with self._lock:
            for names in _batches(list(self.plan.extras)):
                message = self._request(0, Message("fetch", {"names": names}), "extras")
                for name, tensor in zip(message.facts["names"], message.tensors, strict=True):
                    self.plan.extras[name].data.copy_(tensor)

    def send_values(self) -> None:
        """Replace the servers' values by those of this replica, which must be the first."""
        with self._lock:
            self.finish()
            self.send_extras()
            for chunk in self.plan.partition.chunks:
                self._request(chunk.server, self._value_of(chunk), "taken")

    def gather(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes of each training replica, in order. Every one must call it."""
        with self._lock:
            tensors = torch.split(payload, _PAYLOAD_BYTES)
            answer = self._request(0, Message("gather", {"number": self._gathers}, tensors), "gathered")
            if answer.facts["is_lost"]:
                raise ParameterServerError(f"{self._name}: the result of a reduce() was lost with parameter server 0")
            self._gathers = answer.facts["number"] + 1
            every = iter(answer.tensors)
            return [torch.cat([next(every) for _ in range(count)]) for count in answer.facts["lengths"]]

    def optimizer_states(self) -> dict[int, list[State]]:
        """Return the states of the servers' optimizers, by chunk."""
        with self._lock:
            self.finish()
            states = {}
            for chunk in self.plan.partition.chunks:
                message = self._request(chunk.server, Message("state", {"chunk": chunk.index}), "state")
                states[chunk.index] = decode_value(message, list[dict[str, Any]])
            return states

    def load_optimizer_states(self, states: Mapping[int, list[State]]) -> None:
        """Load the states of the servers' optimizers, by chunk."""
        with self._lock:
            self.finish()
            for chunk in self.plan.partition.chunks:
                message = Message("load", {"chunk": chunk.index}, (encode(states[chunk.index]),))
                self._request(chunk.server, message, "loaded")

    def server_statistics(self) -> list[dict[str, Any]]:
        """Return the counts of each server since its last start."""
        with self._lock:
            return [
                self._request(server, Message("statistics"), "statistics").facts["counts"]
                for server in range(self.process.servers)
            ]

    def _request(self, server: int, message: Message, kind: str) -> Message:
        """Send an idempotent request and return its answer; send it again if the connection was replaced."""
        self._requests += 1
        number = self._requests
        message = Message(message.kind, {**message.facts, "request": number}, message.tensors)
        self._links[server].send(message)
        asked = self._links[server].contact

        def has_come() -> bool:
            nonlocal asked
            link = self._links[server]
            if link.is_ready and asked != link.contact:
                asked = link.contact
                link.send(message)
            answer = link.answers.get(kind)
            return answer is not None and answer.facts.get("request") == number

        self._wait(has_come)
        return self._links[server].answers.pop(kind)

    def _pump(self, wait_s: float) -> None:
        """Handle received messages, waiting at most `wait_s` for the first; send what could not be sent before."""
        if self._failure is not None:
            raise self._failure
        if wait_s > 0 and not any(link.arrived for link in self._links):
            zmq.select([socket for link in self._links for socket in link.endpoint.sockets], [], [], wait_s)
        for link in list(self._links):
            link.send_unsent()
            while (message := link.next_message()) is not None:
                try:
                    check_fields(message, SERVER_MESSAGES)
                    self._handle(link, message)
                except MalformedError as error:
                    raise ParameterServerError(
                        f"{self._name}: a message of parameter server {link.index} is malformed: {error}"
                    ) from error

    def _handle(self, link: ServerLink, message: Message) -> None:
        facts = message.facts
        if message.kind == "pushed":
            if link.outstanding.pop((facts["chunk"], facts["step"]), None) is not None:
                self._install(link, message)
        elif message.kind == "asked":
            link.on_asked(facts)
        elif message.kind == "joined":
            self._on_joined(link, facts)
        elif message.kind == "filled":
            link.on_ready()
        elif message.kind == "unknown":
            if link.has_joined:  # else it is about an earlier message
                link.unsent.clear()
                self._join(link)
        elif message.kind == "malformed":
            raise ParameterServerError(
                f"parameter server {link.index} refused a message of {self._name}: {facts['problem']}"
            )
        elif message.kind == "wait":
            link.waits_for = [0]
        elif message.kind == "refused":
            entries = [Entry(*entry) for entry in decode_value(message, list[tuple[str, str, str]])]
            me, other = self._name, f"parameter server {link.index}"
            raise_mismatch(self.plan.entries, entries, rank=self.process.index, me=me, other=other)
        else:
            link.answers[message.kind] = message

    def _install(self, link: ServerLink, message: Message) -> None:
        facts = message.facts
        chunk = self.plan.partition.chunks[facts["chunk"]]
        targets = self._targets[chunk.index]
        if facts.get("made") is not None:
            self._made = max(self._made, facts["made"])
        if facts.get("training") is not None:
            self.trained, self.is_over = facts["training"]
        tensors = message.tensors
        if facts.get("shared"):
            assert link.values is not None
            tensors = (chunk.in_memory(link.values.tensor),)
        if self._copies is not None and facts.get("rows") is None:
            (values,) = tensors
            self._copies.install(chunk, values, targets)
        else:
            read_values(chunk, facts, tensors, targets)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """Handle messages until `is_done()`. Raises ParameterServerError if there is no progress for too long."""
        moved = time.monotonic()
        left = sum(len(link.outstanding) for link in self._links)
        while not is_done():
            self._pump(0.2)
            now = time.monotonic()
            if (still := sum(len(link.outstanding) for link in self._links)) != left:
                left, moved = still, now
            for link in list(self._links):
                if link.keep_in_touch(now):
                    self._join(link)
                if now - link.heard > QUIET_S:
                    address = self._directory.find(link.index, link.life + 1)
                    if address is not None:
                        self._reconnect(link, address)
            if now - moved > self._options.timeout_s and now - debugged_until() > self._options.timeout_s:
                raise ParameterServerError(self._why(now, now - moved))

    def _reconnect(self, link: ServerLink, address: str) -> None:
        """Switch to the next incarnation of a server."""
        link.close()
        fresh = self._open(link.index, link.life + 1, address)
        fresh.outstanding = link.outstanding
        self._links[link.index] = fresh
        self._join(fresh)

    def _why(self, now: float, waited_s: float) -> str:
        quiet = [link for link in self._links if now - link.heard > 2 * QUIET_S]
        start = f"{self._name}: nothing came back of step {self.step} for {waited_s:.0f} s"
        if quiet:
            servers = ", ".join(f"parameter server {link.index} at {link.endpoint.address}" for link in quiet)
            return f"{start}: {servers} did not answer for {now - quiet[0].heard:.0f} s"
        others = sorted({replica for link in self._links for replica in link.waits_for})
        if others:
            what = (
                "has not made this step" if self._heartbeats is not None else "has not given its first values (prepare)"
            )
            return f"{start}: the servers wait for worker {', '.join(map(str, others))}, which {what}"
        return start

    def _send_heartbeats(self) -> None:
        """Send heartbeats while the training thread computes."""
        while not self._closing.wait(HEARTBEAT_S):
            if self._lock.acquire(timeout=HEARTBEAT_S):
                try:
                    if self._closing.is_set():
                        return
                    for link in self._links:
                        link.heartbeat()
                except DdpError as error:  # the thread that trains raises it
                    self._failure = error
                    return
                finally:
                    self._lock.release()


def _batches(names: list[str]) -> list[list[str]]:
    """Split the names into lists that fit into one message."""
    return [names[begin : begin + _NAMES] for begin in range(0, len(names), _NAMES)]
