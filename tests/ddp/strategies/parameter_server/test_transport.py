"""The parameter server's transport between real sockets: what it carries, whom it refuses, and what it survives."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from testbed.cable import Cable
from testbed.present import present
from testbed.processes import started, wait_until

from ddp.errors import ArgumentError, KeyRefusedError, ParameterServerError, VersionMismatchError
from ddp.strategies.parameter_server.endpoints import MAX_HALF_OPEN, ClientEndpoint, EndpointOptions, ServerEndpoint
from ddp.strategies.parameter_server.messages import Message
from ddp.strategies.parameter_server.packets import MAX_TENSORS, RunKey

ROOT = Path(__file__).resolve().parents[4]
KEY = secrets.token_bytes(32)
DEADLINE_S = 60.0
MB = 1 << 20


class Echo:
    """A server in a thread of its own that sends everything back; `seen` has what came, `peers` from whom."""

    def __init__(self, key: bytes = KEY, host: str = "127.0.0.1", **options: Any) -> None:
        self.server = ServerEndpoint(EndpointOptions(key, **options), host=host)
        self.seen: list[Message] = []
        self.peers: list[bytes] = []
        self._requests: list[Callable[[ServerEndpoint], object]] = []
        self._sent: list[bool] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "Echo":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def refused(self) -> dict[str, int]:
        return dict(self.server.refused)

    def do(self, request: Callable[[ServerEndpoint], object]) -> None:
        """Have the server's thread do something."""
        self._requests.append(request)

    def send(self, peer: bytes, kind: str) -> list[bool]:
        """Have the server's thread send something; return whether each one so far was sent."""
        self.do(lambda server: self._sent.append(server.send(peer, Message(kind))))
        return [*self._sent]

    def _serve(self) -> None:
        with self.server as server:
            while not self._is_over:
                while self._requests:
                    self._requests.pop(0)(server)
                if (got := server.receive(0.02)) is not None:
                    peer, message = got
                    self.peers.append(peer)
                    self.seen.append(message)
                    server.send(peer, message)


def connect(client: ClientEndpoint) -> None:
    """Wait until the server has let a client in."""
    deadline = time.monotonic() + DEADLINE_S
    while not session_of(client):
        assert client.receive(0.05) is None
        assert time.monotonic() < deadline, "no session"


def session_of(client: ClientEndpoint) -> bytes:
    """What the server calls a client; empty before it is let in."""
    return b"" if client._session is None else client._session.id


def endpoint_of(address: str, name: str, *, key: bytes = KEY, **options: Any) -> ClientEndpoint:
    return ClientEndpoint(EndpointOptions(key, **options), address, name=name)


@contextlib.contextmanager
def client_of(address: str, name: str = "worker 0", **options: Any) -> Iterator[ClientEndpoint]:
    with endpoint_of(address, name, **options) as client:
        connect(client)
        yield client


@contextlib.contextmanager
def stranger_at(address: str, *, password: bytes | None = None, route: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ socket that is none of ours; with the `password` it gets through the door, as who has seen one does."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        if password is not None:
            stranger.plain_username, stranger.plain_password = b"dtrain", password
        if route:
            stranger.routing_id = route
        stranger.connect(address)
        yield stranger


def echoed(client: ClientEndpoint, number: int, *tensors: torch.Tensor) -> Message:
    """Ask until there is an answer, as the layer above does."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        client.send(Message("echo", {"n": number}, tensors))
        while (answer := client.receive(0.5)) is not None:
            if answer.facts["n"] == number:
                return answer
    raise TimeoutError(f"no echo of {number} within {DEADLINE_S} s")


def assorted_tensors() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    whole = torch.randn(6, 10)
    return (
        whole,
        whole.t(),
        whole[::2, 1::3],
        whole.to(torch.bfloat16),
        whole.to(torch.float16),
        whole.to(torch.float64).requires_grad_(),
        whole.to(torch.float8_e5m2),
        torch.view_as_complex(whole.view(6, 5, 2)).conj(),
        torch.arange(7),
        torch.arange(3, dtype=torch.int8),
        whole > 0,
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.randn(5 * MB // 4 + 1),
    )


@pytest.mark.parametrize(("host", "encrypt"), [("127.0.0.1", False), ("localhost", True), ("::1", False)])
def test_messages_of_all_kinds_of_tensors_go_there_and_back(host: str, encrypt: bool) -> None:
    if host == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    sent = assorted_tensors()
    with Echo(host=host, encrypt=encrypt) as echo, client_of(echo.address, encrypt=encrypt) as client:
        assert client.send(Message("many", {"step": 3, "lr": [0.1, None]}, sent))
        assert client.send(Message("none"))
        answer = present(client.receive(DEADLINE_S))
        assert (answer.kind, answer.facts) == ("many", {"step": 3, "lr": [0.1, None]})
        for ours, theirs in zip(sent, answer.tensors, strict=True):
            assert theirs.dtype == ours.dtype
            assert theirs.shape == ours.shape
            assert theirs.is_contiguous()
            assert torch.equal(_bits(theirs), _bits(ours))
            theirs.zero_()  # its own memory, writable
        after = present(client.receive(DEADLINE_S))
        assert (after.kind, after.tensors) == ("none", ())
        assert client.receive(0.0) is None
        assert [peer.name for peer in echo.server.peers.values()] == ["worker 0"]
        assert (echo.refused, dict(client.refused)) == ({}, {})


def test_a_copied_message_may_be_changed_at_once() -> None:
    with Echo() as echo, client_of(echo.address) as client:
        tensor = torch.ones(2 * MB)
        assert client.send(Message("push", tensors=(tensor,)), copy=True)
        tensor.zero_()
        answer = present(client.receive(DEADLINE_S))
        assert answer.tensors[0].min() == 1


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_wrong_key_is_refused_at_once_and_the_others_are_served(encrypt: bool) -> None:
    wrong = secrets.token_bytes(32)
    with Echo(encrypt=encrypt) as echo, client_of(echo.address, encrypt=encrypt) as good:
        with endpoint_of(echo.address, "worker 7", key=wrong, encrypt=encrypt) as bad:
            began = time.monotonic()
            with pytest.raises(KeyRefusedError, match=r"refused the key of worker 7.*one `dtrain run`") as refused:
                connect(bad)
            assert time.monotonic() - began < DEADLINE_S / 3
        for text in (str(refused.value), repr(bad), repr(bad._key), repr(echo.server.peers)):
            assert wrong.hex()[:16] not in text
            assert KEY.hex()[:16] not in text
        wait_until(lambda: echo.refused.get("key", 0) >= 1, "it is counted")  # after the answer is on its way
        assert echoed(good, 1).kind == "echo"


@pytest.mark.parametrize("theirs", [False, True])
def test_encryption_on_one_side_only_is_said_so(theirs: bool) -> None:
    said = "does not encrypt and .* does:" if theirs else "encrypts and .* does not:"
    with Echo(encrypt=theirs) as echo, endpoint_of(echo.address, "w", encrypt=not theirs) as client:
        with pytest.raises(ParameterServerError, match=said):
            connect(client)
        with client_of(echo.address, encrypt=theirs) as good:
            assert echoed(good, 1).kind == "echo"


def test_another_version_is_refused_with_both_versions() -> None:
    said = r"runs dtrain 1\.2\.3 and worker 2 runs 1\.2\.4: install"
    with Echo(version="1.2.3") as echo:
        with (
            endpoint_of(echo.address, "worker 2", version="1.2.4") as client,
            pytest.raises(VersionMismatchError, match=said),
        ):
            connect(client)
        wait_until(lambda: echo.refused == {"version": 1}, "it is counted")
        with client_of(echo.address, version="1.2.3") as good:
            assert echoed(good, 1).kind == "echo"


def test_wrong_arguments_and_places_are_said_so() -> None:
    with pytest.raises(ArgumentError, match="31 bytes, not 32") as wrong_key:
        ServerEndpoint(EndpointOptions(b"k" * 31), host="127.0.0.1")
    assert "kkk" not in str(wrong_key.value)
    with pytest.raises(ParameterServerError, match=r"no parameter server can listen at '?192\.0\.2\.1"):
        ServerEndpoint(EndpointOptions(KEY), host="192.0.2.1")
    with pytest.raises(ParameterServerError, match="is no address of a parameter server"):
        endpoint_of("tcp://nowhere", "w")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with endpoint_of(address, "w") as client:
            assert client.receive(0.2) is None
            assert not client.send(Message("early"))
    with Echo(max_frame_bytes=MB) as echo, client_of(echo.address, max_frame_bytes=MB) as client:
        with pytest.raises(ArgumentError, match="tensor of 1048580 bytes"):
            client.send(Message("push", tensors=(torch.empty(MB // 4 + 1),)))
        for message in (
            Message("sparse", tensors=(torch.eye(2).to_sparse(),)),
            Message("meta", tensors=(torch.empty(2, device="meta"),)),
            Message("facts", {"x": torch.ones(1)}),
            Message("many", tensors=(torch.ones(1),) * (MAX_TENSORS + 1)),
        ):
            with pytest.raises(ArgumentError, match=message.kind):
                client.send(message)
        assert echoed(client, 1).kind == "echo"  # nothing of all that was sent


def test_strangers_get_no_message_in_and_the_others_are_served() -> None:
    with Echo(max_frame_bytes=MB) as echo, client_of(echo.address) as good:
        host, _, port = echo.address.removeprefix("tcp://").rpartition(":")
        random = secrets.token_bytes(9000)
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\0" + random, b"\x01\x00\xff" + bytes(99), b"\xff" + random):
            with socket.create_connection((host, int(port))) as connection:
                connection.settimeout(DEADLINE_S)
                with contextlib.suppress(ConnectionError):
                    connection.sendall(noise)
                    while connection.recv(4096):  # until it hangs up
                        pass
        idle = socket.create_connection((host, int(port)))
        with idle, stranger_at(echo.address) as without, stranger_at(echo.address, password=b"guess") as guessing:
            for stranger in (without, guessing):
                with contextlib.suppress(zmq.Again):  # it has been hung up on already
                    stranger.send_multipart([b"x" * 100, bytes(8 * MB)], zmq.NOBLOCK)
            wait_until(lambda: echo.refused.get("key", 0) >= 1, "the wrong password is counted")
            wait_until(lambda: echo.refused.get("handshake", 0) >= 1, "another mechanism is counted")
            assert echoed(good, 1).kind == "echo"
        assert {message.kind for message in echo.seen} == {"echo"}


def test_what_is_malformed_is_refused_with_the_right_password() -> None:
    run_key = RunKey(KEY)
    hello = run_key.hello("stranger", "0")
    message = b"dtps\x01\x10" + bytes(32) + (1).to_bytes(8, "little") + (3).to_bytes(4, "little")
    packets = [
        [b""],
        [b"x"],
        [b"", b"", b""],
        [b"dtps"],
        [b"dtps\x01\x01" + bytes(44)],
        [b"dtps\x01\x01" + bytes(44) + b"[" * 3000 + bytes(32)],
        [hello[:-1]],
        [hello[:60] + bytes(9000)],
        [b"dtps\x01\x03" + bytes(44)],
        [b"dtps\x01\x02" + bytes(44) + b"{}"],
        [b"dtps\x02\x10" + bytes(60)],
        [message],
        [message, b"", bytes(99)],
        [b"dtps\x01\x10" + bytes(60)] * (MAX_TENSORS + 9),
    ]
    with Echo(max_frame_bytes=MB) as echo, client_of(echo.address) as good:
        session = session_of(good)
        with stranger_at(echo.address, password=run_key.password()) as stranger:
            for packet in packets:
                stranger.send_multipart(packet)
            # In the living session's name: without tags, with fewer frames than tags, with tags that are wrong.
            for count, frames in ((3, []), (0, [b"x"]), (1, [bytes(64)]), (0, [])):
                prefix = b"dtps\x01\x10" + session + (9).to_bytes(8, "little") + count.to_bytes(4, "little")
                stranger.send_multipart([prefix, *frames])
                stranger.send_multipart([prefix + bytes(16 * count + 40), *frames])
            sent = len(packets) + 8
            wait_until(lambda: sum(echo.refused.values()) >= sent, "all are counted")
            stranger.send_multipart([b"x", bytes(2 * MB)])  # longer than allowed: it is hung up on
            assert echoed(good, 1).kind == "echo"
        assert session_of(good) == session
        assert len(echo.server._half_open) == 0
        assert set(echo.refused) <= {"malformed", "unknown session", "tag", "key", "version", "handshake"}


def test_half_open_sessions_are_few_and_do_not_keep_others_out() -> None:
    run_key = RunKey(KEY)
    with Echo(version="1") as echo, stranger_at(echo.address, password=run_key.password()) as stranger:
        for _ in range(3 * MAX_HALF_OPEN):
            stranger.send(run_key.hello("stranger", "1"))
        wait_until(lambda: echo.refused.get("half-open", 0) >= 2 * MAX_HALF_OPEN, "the oldest are dropped")
        assert len(echo.server._half_open) <= MAX_HALF_OPEN
        with client_of(echo.address, version="1") as good:
            assert echoed(good, 1).kind == "echo"
        assert len(echo.server.peers) == 1


def test_a_recorded_session_played_again_is_refused() -> None:
    with Echo() as echo, Cable(echo.address) as cable, client_of(cable.address) as client:
        tensor = torch.randn(3 * MB // 4)
        assert client.send(Message("echo", {"n": 1}, (tensor,)))  # once
        assert torch.equal(present(client.receive(DEADLINE_S)).tensors[0], tensor)
        host, _, port = echo.address.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as replay:
            replay.settimeout(DEADLINE_S)
            record = bytes(cable.recorded)
            greeted = 64 + 2 + record[65]  # ZMTP's greeting and its first command, which has the password
            initiated = greeted + 2 + record[greeted + 1]
            replay.sendall(record[:greeted])
            _read_until(replay, b"WELCOME")
            replay.sendall(record[greeted:initiated])
            _read_until(replay, b"READY")
            seen = len(echo.seen)
            replay.sendall(record[initiated:])  # the hello and what came in the session, as they were
            wait_until(lambda: echo.refused.get("replay", 0) == 1 + seen, "HERE and the messages are refused")
            assert len(echo.seen) == seen
            assert len(echo.server.peers) == 1
            assert echoed(client, 2).kind == "echo"  # its route has not moved


def test_a_forged_routing_id_takes_nothing_over() -> None:
    with Echo() as echo, client_of(echo.address) as client:
        assert echoed(client, 1).kind == "echo"
        route = next(iter(echo.server.peers.values())).route
        with stranger_at(echo.address, password=RunKey(KEY).password(), route=route) as stranger:
            stranger.send(b"dtps\x01\x10" + session_of(client) + bytes(60))
            for number in range(2, 6):
                assert echoed(client, number).kind == "echo"
            assert stranger.poll(100) == 0
        assert echoed(client, 6).kind == "echo"
        assert client.connections == 1


def test_a_changed_byte_loses_that_message_only() -> None:
    is_armed = False

    def flip(data: bytes) -> bytes:
        nonlocal is_armed
        if not is_armed or len(data) < 20000:
            return data
        is_armed = False
        return data[:9000] + bytes([data[9000] ^ 1]) + data[9001:]

    with Echo() as echo, Cable(echo.address, flip) as cable, client_of(cable.address) as client:
        is_armed = True
        assert client.send(Message("push", {"n": 1}, (torch.randn(MB // 4),)))
        wait_until(lambda: echo.refused.get("tag", 0) == 1, "the message is refused")
        assert echoed(client, 2).kind == "echo"
        assert {message.facts["n"] for message in echo.seen} == {2}


def test_a_connection_that_breaks_keeps_its_session() -> None:
    with Echo() as echo, Cable(echo.address) as cable, client_of(cable.address) as client:
        session = session_of(client)
        assert echoed(client, 1).kind == "echo"
        cable.cut()
        wait_until(lambda: client.receive() is None and not client._is_up, "the client sees the cut")
        for number in range(2, 12):
            assert client.send(Message("echo", {"n": number}, (torch.full((MB // 4,), number),)))
        cable.mend()
        for number in range(2, 12):
            answer = present(client.receive(DEADLINE_S))
            assert answer.facts["n"] == number
            assert answer.tensors[0].min() == number
        assert (session_of(client), client.connections) == (session, 2)
        # And the server finds a client that has nothing to say where it is now.
        cable.cut()
        cable.mend()
        wait_until(lambda: client.receive() is None and client.connections == 3, "the client is back")
        wait_until(lambda: any(echo.send(session, "news")), "the server reaches it")
        wait_until(lambda: (m := client.receive()) is not None and m.kind == "news", "the news come")


def test_a_message_cut_off_in_its_middle_is_dropped_whole() -> None:
    cable: Cable
    is_armed = False

    def snap(data: bytes) -> bytes:
        nonlocal is_armed
        if is_armed and len(data) >= 20000:
            is_armed = False
            cable.cut()
            cable.mend()
        return data

    with Echo() as echo, Cable(echo.address, snap) as cable, client_of(cable.address) as client:
        is_armed = True
        assert client.send(Message("push", {"n": 1}, (torch.randn(MB), torch.randn(MB))))
        wait_until(lambda: client.receive() is None and client.connections == 2, "the client is back")
        for number in range(2, 5):
            assert echoed(client, number, torch.randn(100)).kind == "echo"
        assert [*dict.fromkeys(m.facts["n"] for m in echo.seen if m.facts["n"] != 1)] == [2, 3, 4]
        assert session_of(client) in echo.server.peers
        assert set(echo.refused) <= {"handshake"}


def test_the_server_never_waits_for_a_client_that_does_not_read() -> None:
    with Echo(queue_messages=4) as echo, client_of(echo.address, queue_messages=4) as deaf:
        lazy = session_of(deaf)
        with client_of(echo.address) as good:
            took: list[float] = []
            sent: list[bool] = []

            def flood(server: ServerEndpoint) -> None:
                tensor = torch.zeros(MB // 4)
                began = time.monotonic()
                sent.extend(server.send(lazy, Message("news", {"n": n}, (tensor,))) for n in range(100))
                took.append(time.monotonic() - began)

            echo.do(flood)
            wait_until(lambda: took, "the server has sent all that it will")
            assert took[0] < DEADLINE_S / 3
            assert sent[0]
            assert sent.count(False) > 50
            assert echoed(good, 1).kind == "echo"
        numbers = [present(deaf.receive(DEADLINE_S)).facts["n"]]
        while (message := deaf.receive(0.5)) is not None:
            numbers.append(message.facts["n"])
        assert numbers == sorted(numbers)
        assert numbers[0] == 0
        assert echoed(deaf, 1000).kind == "echo"  # asked again, it gets its answer


def test_a_client_never_waits_for_a_server_that_is_away() -> None:
    with Echo() as echo, Cable(echo.address) as cable, client_of(cable.address, queue_messages=4) as client:
        cable.cut()
        wait_until(lambda: client.receive() is None and not client._is_up, "the client sees the cut")
        tensor = torch.zeros(MB // 4)
        sent = [client.send(Message("echo", {"n": n}, (tensor,))) for n in range(20)]
        assert sent[0]
        assert not sent[-1]
        cable.mend()
        assert echoed(client, 50).kind == "echo"
        arrived = [message.facts["n"] for message in echo.seen]
        assert arrived[: sum(sent)] == list(range(sum(sent)))


def test_a_forgotten_client_gets_a_new_session_by_itself() -> None:
    with Echo() as echo, client_of(echo.address) as client:
        first = session_of(client)
        wait_until(lambda: first in echo.server.peers, "the server has the first packet of the session")
        echo.do(lambda server: server.forget(first))
        wait_until(lambda: not echo.server.peers, "it is forgotten")
        assert echoed(client, 1).kind == "echo"
        assert session_of(client) not in (first, b"")
        assert list(echo.server.peers) == [session_of(client)]


_CLIENT = """
import sys, time, torch
from ddp.strategies.parameter_server.endpoints import ClientEndpoint, EndpointOptions
from ddp.strategies.parameter_server.messages import Message
options = EndpointOptions(bytes.fromhex(sys.stdin.readline()))
client = ClientEndpoint(options, sys.argv[1], name="worker 3")
while True:
    client.send(Message("echo", {"n": 1}, (torch.ones(1 << 18),)))
    client.receive(1)
"""


def test_a_client_that_was_killed_comes_back_with_a_new_session() -> None:
    with Echo() as echo:
        env = {"PYTHONPATH": str(ROOT)}
        with started(sys.executable, "-c", _CLIENT, echo.address, env=env, stdin=subprocess.PIPE) as process:
            present(process.stdin).write(KEY.hex().encode() + b"\n")
            present(process.stdin).flush()
            wait_until(lambda: len(echo.seen) > 5, "it is in the middle of something")
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        killed = echo.peers[0]
        with client_of(echo.address, name="worker 3") as successor:
            assert echoed(successor, 2).kind == "echo"
            assert set(echo.server.peers) == {killed, session_of(successor)}
            wait_until(lambda: not all(echo.send(killed, "news")), "the server sees that it is gone")
            echo.do(lambda server: server.forget(killed))
            wait_until(lambda: set(echo.server.peers) == {session_of(successor)}, "it is forgotten")
            assert echoed(successor, 3).kind == "echo"


def test_one_poll_waits_for_several_servers() -> None:
    with Echo() as one, Echo() as two, client_of(one.address) as first, client_of(two.address) as second:
        sockets = [*first.sockets, *second.sockets]

        def is_quiet() -> bool:  # once all has come that the handshakes have left
            began = time.monotonic()
            if zmq.select(sockets, [], [], 0.05)[0]:
                assert first.receive() is None
                assert second.receive() is None
                return False
            assert time.monotonic() - began >= 0.05
            return True

        wait_until(is_quiet, "nothing comes")
        second.send(Message("echo"))
        ready, _, _ = zmq.select(sockets, [], [], DEADLINE_S)
        assert ready
        assert {*ready} <= {*second.sockets}
        assert second.receive() is not None


def _read_until(connection: socket.socket, mark: bytes) -> None:
    got = b""
    while mark not in got:
        more = connection.recv(4096)
        assert more, f"hung up before {mark!r}"
        got += more


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def _has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False
