"""Node 0's listener: the nodes of the run get in and get their slots; all others get and cost nothing."""

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from testbed.present import present
from testbed.processes import wait_until

from launcher.errors import HostError, StreamError, UsageError
from launcher.transport.tcp import connection, listener
from launcher.transport.tcp.connection import dead
from launcher.transport.tcp.dial import Joined, JoinError, Signals, dial
from launcher.transport.tcp.encrypted_records import Decryptor, Encryptor, Kind, Record
from launcher.transport.tcp.greeting import Greeting, RunEnd, encode
from launcher.transport.tcp.handshake import GREETING_BYTES, MAGIC, PROOF_BYTES, WRONG, Handshake, Side
from launcher.transport.tcp.joined_node import HOLD_BYTES
from launcher.transport.tcp.listener import Listener
from launcher.transport.tcp.rendezvous import Endpoint

TOKEN = b"a token that is long enough"
COMMAND = {"command": "train.py --lr 1", "nnodes": "3"}


class Lab:
    """A listener, what it has shown, and nodes that are this test."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.listener = Listener(
            "127.0.0.1",
            0,
            TOKEN,
            expected=COMMAND,
            nodes=["alpha", "beta", "gamma"],
            notify=self.shown.append,
        )
        self.joined: list[Joined] = []
        self.sockets: list[socket.socket] = []
        self.signals = Signals()

    def dial(self, greeting: Greeting, *, token: bytes = TOKEN, within_s: float = 60.0) -> Joined | RunEnd:
        """Dial as a node does."""
        endpoint = Endpoint("127.0.0.1", self.listener.port, token.decode())
        deadline = time.monotonic() + within_s
        found = dial(endpoint, greeting, deadline=deadline, signals=self.signals)
        if isinstance(found, Joined):
            found.connection.sock.settimeout(60.0)
            self.joined.append(found)
        return found

    def join(self, rank: int | None = 1, **changes: Any) -> "Node":
        joined = self.dial(replace(Greeting.ours(rank, COMMAND), **changes))
        assert isinstance(joined, Joined)
        return Node(joined)

    def raw(self, said: bytes = b"") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.listener.port), 60.0)
        self.sockets.append(sock)
        sock.sendall(said)
        return sock

    def wait_for(self, place: str, within_s: float = 60.0) -> Any:
        return self.listener.wait(place, time.monotonic() + within_s)

    def close(self) -> None:
        for joined in self.joined:
            joined.connection.sock.close()
        for sock in self.sockets:
            sock.close()
        self.listener.close(0, linger_s=0.0)


class Node:
    """The other end of a connection, which speaks as the test says."""

    def __init__(self, joined: Joined) -> None:
        self.connection = joined.connection
        self.sock = joined.connection.sock
        self.rank = joined.welcome.node_rank

    def receive(self) -> Record:
        return self.connection.receive(time.monotonic() + 60.0)

    def encrypted(self, kind: Kind, data: bytes = b"") -> bytes:
        return present(self.connection._encryptor).encrypt(kind, data)

    def send(self, kind: Kind, data: bytes = b"") -> None:
        self.sock.sendall(self.encrypted(kind, data))

    def ended(self, status: int | None = 0, words: str = "") -> None:
        self.send(Kind.ENDED, json.dumps({"status": status, "words": words}).encode())


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    with lab.signals:
        try:
            yield lab
        finally:
            lab.close()
    wait_until(
        lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("listener")],
        "its threads have ended",
    )


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        assert more
        data += more
    return data


def _peers() -> int:
    return sum(thread.name == "listener's peer" for thread in threading.enumerate())


def _in_thread(action: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(action())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


# ---- streams -------------------------------------------------------------------------------------------------


def test_a_stream_carries_what_both_say_and_how_the_agent_ended(lab: Lab) -> None:
    node = lab.join(1)
    assert node.rank == 1
    stream = lab.wait_for("beta")
    assert stream.our_address == "127.0.0.1"
    assert node.receive().kind is Kind.START
    long = os.urandom(200_000)
    stream.write(long)
    records = [node.receive() for _ in range(4)]
    assert [record.kind for record in records] == [Kind.PART] * 3 + [Kind.DATA]
    assert b"".join(record.data for record in records) == long
    node.send(Kind.DATA, b"one")
    assert stream.read() == b"one"
    stream.end()
    assert node.receive().kind is Kind.END
    node.send(Kind.DATA, b"last words")
    node.ended(3, "it said so")
    assert (stream.read(), stream.read(), stream.read()) == (b"last words", b"", b"")
    assert stream.finish(60.0) == stream.finish(60.0) == (3, "it said so")
    with pytest.raises(StreamError):
        stream.write(b"late")
    again = lab.wait_for("beta")  # the node stays, for another agent
    assert node.receive().kind is Kind.START
    assert again is not stream


def test_nodes_get_in_in_either_order(lab: Lab) -> None:
    thread, results = _in_thread(lambda: lab.wait_for("gamma"))
    node = lab.join(2)
    assert node.receive().kind is Kind.START
    thread.join(60.0)
    node.send(Kind.DATA, b"of gamma")
    assert results[0].read() == b"of gamma"


def test_a_missing_node_is_an_error_that_says_what_to_type(lab: Lab) -> None:
    with pytest.raises(HostError, match=r"no node joined as node rank 1 .* the same command there, with --node-rank 1"):
        lab.wait_for("beta", 0.05)
    node = lab.join(1)  # the one that no one waits for any more gets no agent
    lab.wait_for("beta")
    assert node.receive().kind is Kind.START
    node.send(Kind.PONG)
    assert not node.connection._records


def test_a_broken_connection_is_an_error_after_what_had_arrived(lab: Lab) -> None:
    node = lab.join(1)
    stream = lab.wait_for("beta")
    assert node.receive().kind is Kind.START
    node.send(Kind.DATA, b"the last")
    node.sock.close()
    assert stream.read() == b"the last"
    with pytest.raises(StreamError, match="the other end closed it"):
        stream.read()
    assert stream.finish(60.0) == (None, "the other end closed it")


def test_an_agent_that_is_given_up_is_ended_and_its_node_kept(lab: Lab) -> None:
    node = lab.join(1)
    stream = lab.wait_for("beta")
    thread, results = _in_thread(stream.read)
    assert stream.finish(0.0) == (None, "")
    thread.join(60.0)
    assert results == [b""]  # a blocked read returns
    assert [node.receive().kind for _ in range(2)] == [Kind.START, Kind.END]
    thread, results = _in_thread(lambda: lab.wait_for("beta"))
    node.send(Kind.DATA, b"still something")
    node.ended()
    assert node.receive().kind is Kind.START
    thread.join(60.0)
    node.send(Kind.DATA, b"new")
    assert results[0].read() == b"new"


def test_what_no_one_reads_stays_with_the_node(lab: Lab) -> None:
    node = lab.join(1)
    stream = lab.wait_for("beta")
    node.sock.settimeout(0.3)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 64 * HOLD_BYTES:
            node.send(Kind.DATA, bytes(1 << 16))
            sent += 1 << 16
    assert sent < 16 * HOLD_BYTES
    assert stream._unread_bytes <= HOLD_BYTES + (1 << 17)
    received = 0
    while received < sent:
        received += len(stream.read())


def test_writing_ends_when_the_connection_does(lab: Lab) -> None:
    node = lab.join(1)
    stream = lab.wait_for("beta")
    thread, results = _in_thread(lambda: stream.write(bytes(64 << 20)))
    wait_until(lambda: node.sock.recv(1 << 16), "the write has begun")
    node.sock.close()
    thread.join(60.0)
    assert isinstance(results[0], StreamError)


# ---- places --------------------------------------------------------------------------------------------------


def test_nodes_without_a_rank_take_free_places_and_keep_them(lab: Lab) -> None:
    first = Greeting.ours(None, COMMAND)
    joined = lab.dial(first)
    assert isinstance(joined, Joined)
    assert joined.welcome.node_rank == 1
    assert lab.join(None).rank == 2
    with pytest.raises(JoinError, match="all 3 nodes of the run have joined already"):
        lab.join(None)
    joined.connection.sock.close()
    again = lab.dial(first)
    assert isinstance(again, Joined)
    assert again.welcome.node_rank == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"node_rank": 0}, r"node rank 0 is alpha, where the run was started"),
        ({"node_rank": 3}, r"the run has 3 nodes, so there is no node rank 3"),
        ({"node_rank": -1}, r"no node rank -1"),
        ({"version": "9.9"}, r"has dtrain 9\.9, node 0 has .*pip install "),
        (
            {"command": {"command": "train.py --lr 2", "nnodes": "3"}},
            r"train\.py --lr 1 on node 0, train\.py --lr 2 on",
        ),
    ],
)
def test_why_a_node_does_not_belong_is_reported_on_both_ends(lab: Lab, changes: dict[str, Any], why: str) -> None:
    for _ in range(3):
        with pytest.raises(JoinError, match=why):
            lab.join(1, **changes)
    wait_until(lambda: lab.shown, "node 0 shows it")
    assert len(lab.shown) == 1  # once
    assert lab.join(1).rank == 1  # the right one gets in


def test_a_second_node_for_a_place_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "CHALLENGE_S", 50.0)
    first = lab.join(1, hostname="beta-host", pid=4711)
    thread, results = _in_thread(first.receive)
    began = time.monotonic()

    def answer() -> None:
        thread.join()
        first.send(Kind.PONG)

    answering, _ = _in_thread(answer)
    with pytest.raises(JoinError, match=r"node rank 1 is already taken by beta-host \(pid 4711\)"):
        lab.join(1)
    answering.join(60.0)
    assert results[0].kind is Kind.PING
    assert time.monotonic() - began < listener.CHALLENGE_S
    assert "cannot join: node rank 1 is already taken" in lab.shown[0]


def test_a_node_that_does_not_answer_loses_its_place_to_the_next(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "CHALLENGE_S", 0.3)
    lab.join(1)
    stream = lab.wait_for("beta")
    second = lab.join(1, hostname="second")
    with pytest.raises(StreamError, match="did not answer"):
        stream.read()
    lab.wait_for("beta")
    assert second.receive().kind is Kind.START


def test_a_node_that_dials_again_replaces_its_connection(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "CHALLENGE_S", 50.0)
    greeting = Greeting.ours(1, COMMAND)
    lab.dial(greeting)
    stream = lab.wait_for("beta")
    began = time.monotonic()
    assert isinstance(lab.dial(greeting), Joined)
    with pytest.raises(StreamError, match="dialled again"):
        stream.read()
    assert time.monotonic() - began < listener.CHALLENGE_S
    lab.wait_for("beta")


def test_a_node_with_unread_output_keeps_its_slot(lab: Lab) -> None:
    greeting = Greeting.ours(1, COMMAND)
    joined = lab.dial(greeting)
    assert isinstance(joined, Joined)
    node, stream = Node(joined), lab.wait_for("beta")
    node.sock.settimeout(0.3)
    with contextlib.suppress(TimeoutError):
        while True:
            node.send(Kind.DATA, bytes(1 << 16))
    wait_until(lambda: stream.full, "no more is taken")
    with pytest.raises(JoinError, match="already taken"):
        lab.join(1)
    assert isinstance(lab.dial(greeting), Joined)
    assert stream.finish(60.0) == (None, "its node dialled again")
    lab.wait_for("beta")


# ---- the end -------------------------------------------------------------------------------------------------


def test_every_node_learns_how_the_run_ended(lab: Lab) -> None:
    greeting = Greeting.ours(1, COMMAND)
    idle = lab.join(2)
    broken = lab.dial(greeting)
    assert isinstance(broken, Joined)
    stream = lab.wait_for("gamma")
    broken.connection.sock.close()
    wait_until(lambda: lab.listener._slots.named("beta").connection is None, "node 0 has seen it")
    thread, results = _in_thread(lambda: lab.wait_for("beta", 60.0))
    closing, _ = _in_thread(lambda: lab.listener.close(7, "it failed", linger_s=60.0))
    assert idle.receive().kind is Kind.START
    run_end = idle.receive()
    assert (run_end.kind, json.loads(run_end.data)) == (Kind.RUN_END, {"exit_code": 7, "text": "it failed"})
    with pytest.raises(JoinError, match="node 0 was not found in time"):
        lab.dial(Greeting.ours(1, COMMAND), within_s=0.2)  # of the next run, perhaps: this one's end is not its own
    assert lab.dial(greeting) == RunEnd(7, "it failed")  # it dialled again, a moment too late
    idle.sock.close()
    began = time.monotonic()
    closing.join(60.0)
    assert time.monotonic() - began < 40  # everybody knows it, so it does not linger
    thread.join(60.0)
    assert isinstance(results[0], HostError)
    with pytest.raises(StreamError, match="the run is over"):
        stream.read()
    with pytest.raises(HostError, match="the run is over"):
        lab.wait_for("beta")
    lab.listener.close(0)  # only the first one counts
    with pytest.raises(ConnectionRefusedError):
        lab.raw()


# ---- all others --------------------------------------------------------------------------------------------


def test_two_hundred_silent_connections_keep_no_one_out(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "JOIN_S", 50.0)
    for _ in range(200):
        lab.raw(MAGIC[:5])
    began = time.monotonic()
    lab.join(1)
    assert time.monotonic() - began < listener.JOIN_S / 2  # it did not wait for any of them
    wait_until(lambda: _peers() <= listener.JOINING + 1, "those that had to go have no thread any more")
    open_files = len(os.listdir("/proc/self/fd"))
    assert open_files < 200 + listener.JOINING + 60  # 200 are our own ends
    assert lab.shown == []


def test_a_slow_peer_is_rejected_after_its_time(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "JOIN_S", 0.4)
    sock = lab.raw()
    greeting = Handshake(Side.JOINER, TOKEN).greeting
    sent = 0
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for byte in greeting:
            sock.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.05)
    assert sent < len(greeting)


def test_foreign_protocols_and_tokens_are_named_once(lab: Lab) -> None:
    for _ in range(3):
        sock = lab.raw(b"GET / HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(100) == b""
        with pytest.raises(JoinError, match="another token"):
            lab.dial(Greeting.ours(1, COMMAND), token=b"a token of somebody else")
    assert lab.raw(b"dtrain-join 0009" + bytes(64)).recv(100) == MAGIC
    wait_until(lambda: len(lab.shown) == 3, "each is shown once")
    assert "connected to the control port" in lab.shown[0]
    assert "GET / HTTP/1.0" in lab.shown[0]
    assert "a node at 127.0.0.1 has another token" in lab.shown[1]
    assert "another handshake" in lab.shown[2]
    lab.listener.close(0, linger_s=0.0)
    assert "2 that were not dtrain" in lab.shown[3]
    assert TOKEN.decode() not in "".join(lab.shown)


def test_a_recorded_join_lets_no_one_in_and_tells_nothing(lab: Lab) -> None:
    handshake = Handshake(Side.JOINER, TOKEN)
    real = lab.raw(handshake.greeting)
    proof = handshake.feed(_exactly(real, GREETING_BYTES))
    real.sendall(proof)
    handshake.feed(_exactly(real, PROOF_BYTES))
    greeting = Encryptor(present(handshake.keys).sending).encrypt(Kind.GREETING, encode(Greeting.ours(1, COMMAND)))
    real.sendall(greeting)
    assert Decryptor(present(handshake.keys).receiving).feed(real.recv(1000))[0].kind is Kind.WELCOME

    sock = lab.raw(handshake.greeting)
    _exactly(sock, GREETING_BYTES)
    sock.sendall(proof + greeting)
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(1000) == b""  # too much at once
    sock = lab.raw(handshake.greeting)
    _exactly(sock, GREETING_BYTES)
    sock.sendall(proof)
    assert _exactly(sock, PROOF_BYTES) == WRONG
    assert sock.recv(1000) == b""
    lab.wait_for("beta")  # the real one is still there


def test_a_node_that_turns_bad_loses_its_place_and_nothing_else(lab: Lab) -> None:
    other = lab.join(2)
    for said in (b"garbage after the handshake", None, Kind.RUN_END, Kind.ENDED):
        node = lab.join(1)
        stream = lab.wait_for("beta")
        if isinstance(said, Kind):
            node.send(said, b"[1]")
        elif said is None:
            encrypted = bytearray(node.encrypted(Kind.DATA, b"text"))
            encrypted[6] ^= 4
            node.sock.sendall(encrypted)
        else:
            node.sock.sendall(said + bytes(1 << 17))
        with pytest.raises(StreamError):
            stream.read()
    lab.wait_for("gamma")
    assert other.receive().kind is Kind.START


_SAID = st.lists(
    st.one_of(
        st.binary(max_size=100),
        st.just(MAGIC),
        st.builds(lambda tail: MAGIC + tail, st.binary(min_size=64, max_size=64)),
        st.binary(min_size=32, max_size=32),
    ),
    max_size=4,
)


def test_no_foreign_peer_harms_the_listener(lab: Lab) -> None:
    node = lab.join(1)

    @settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(_SAID, st.booleans())
    def foreign(said: list[bytes], abruptly: bool) -> None:
        with socket.create_connection(("127.0.0.1", lab.listener.port), 60.0) as sock:
            if abruptly:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for data in said:
                    sock.sendall(data)

    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=40)), max_size=4))
    def insider(said: list[tuple[Kind, bytes]]) -> None:
        """One that knows the token, and nothing of how to behave."""
        joined = lab.dial(replace(Greeting.ours(2, COMMAND), id="insider"))
        assert isinstance(joined, Joined)
        with contextlib.closing(joined.connection.sock), contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for kind, data in said:
                Node(joined).send(kind, data)

    foreign()
    insider()
    lab.wait_for("beta")
    assert node.receive().kind is Kind.START
    assert len(lab.shown) < 40


def test_a_listener_without_descriptors_left_accepts_again(lab: Lab) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    socks = [socket.socket() for _ in range(4)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(sock.fileno() for sock in socks) + 1, limits[1]))
        assert highest
        for sock in socks:
            sock.connect(("127.0.0.1", lab.listener.port))
        time.sleep(0.3)  # nothing to wait for: it must do nothing wrong meanwhile
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for sock in socks:
            sock.close()
    lab.join(1)


# ---- where it listens ----------------------------------------------------------------------------------------


def test_it_listens_on_its_address_only_and_says_why_it_cannot(lab: Lab) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", lab.listener.port), 60.0)

    def open_at(address: str, port: int) -> Listener:
        return Listener(address, port, TOKEN, expected={}, nodes=["a"], notify=print)

    with pytest.raises(
        UsageError, match=rf"port {lab.listener.port} on 127\.0\.0\.1 is in use by pid {os.getpid()} \("
    ):
        open_at("127.0.0.1", lab.listener.port)
    with pytest.raises(UsageError, match=r"no interface here has the address 192\.0\.2\.99"):
        open_at("192.0.2.99", 0)
    with pytest.raises(UsageError, match="means all interfaces"):
        open_at("0.0.0.0", 0)
    with pytest.raises(UsageError, match=r"DNS lookup of no-such-host\.invalid failed"):
        open_at("no-such-host.invalid", 0)


# ---- the connection ------------------------------------------------------------------------------------------


def test_a_connection_is_dead_if_silent_not_if_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as stack:
        full, silent = (stack.enter_context(socket.create_connection(listening.getsockname())) for _ in range(2))
        for _ in range(2):
            stack.enter_context(listening.accept()[0])
        full.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                full.send(bytes(1 << 16))
        assert not dead(silent)
        # Shorter than the pause of the keepalives, which say that one lives.
        monkeypatch.setattr(connection, "SILENCE_S", 0.3)
        wait_until(lambda: dead(silent), "it was silent for too long")
        assert not dead(full)
