"""Packets: every byte is authenticated, and a header that does not fit is malformed."""

import contextlib
import re
import secrets

import pytest
import torch
import zmq

from ddp.strategies.parameter_server.messages import MalformedError, Message
from ddp.strategies.parameter_server.packets import Packet, RefusedError, RunKey, decode, encode, read_prefix

KEY = secrets.token_bytes(32)


def test_every_byte_of_an_authenticated_packet_counts() -> None:
    key = RunKey(KEY)
    hello = key.hello("worker 0", "1")
    challenge, servers = key.challenge(hello, "1")
    clients = key.accept(hello, challenge)
    for other, said in ((RunKey(bytes(32)), hello), (key, key.hello("worker 0", "1"))):
        with pytest.raises(RefusedError, match="key"):
            other.accept(said, challenge)

    header, frames = encode(Message("push", {"n": 1}, (torch.arange(4), torch.ones(2))), copy=True)
    head = clients.outgoing.sign(Packet.MESSAGE, clients.id, header, frames)

    def opened(head: bytes, bodies: list[bytes]) -> bytes:
        return servers.incoming.verify(read_prefix(memoryview(head)), memoryview(head), [zmq.Frame(b) for b in bodies])

    bodies = [frame.bytes for frame in frames]
    parts = [head, *bodies]
    for index, part in enumerate(parts):
        for at in range(len(part)):
            bent = [*parts]
            bent[index] = part[:at] + bytes([part[at] ^ 0x10]) + part[at + 1 :]
            with contextlib.suppress(RefusedError):
                opened(bent[0], bent[1:])
                # Only the version of the protocol is left to the endpoint, which refuses it; the tags cover it too.
                pytest.fail(f"byte {at} of frame {index} may be changed")
    for wrong in (bodies[::-1], bodies[:1], [*bodies, b""], []):
        with pytest.raises(RefusedError):
            opened(head, wrong)
    assert opened(head, bodies) == header
    with pytest.raises(RefusedError, match="replay"):
        opened(head, bodies)
    with pytest.raises(RefusedError):  # nor back to who has sent it
        clients.incoming.verify(read_prefix(memoryview(head)), memoryview(head), frames)


def test_a_header_that_does_not_fit_is_malformed() -> None:
    good = b'["push",{},[["float32",[2]]]]'
    frame = zmq.Frame(bytes(8))
    assert torch.equal(decode(good, [frame]).tensors[0], torch.zeros(2))
    for header in (
        b"",
        b"\xff",
        b"{}",
        b"[]",
        b'["push",{}]',
        b'["push",[],[["float32",[2]]]]',
        b'[1,{},[["float32",[2]]]]',
        b'["push",{},[]]',
        b'["push",{},[["float32",[3]]]]',
        b'["push",{},[["float32",[-2]]]]',
        b'["push",{},[["float32",[2.0]]]]',
        b'["push",{},[["float32",[true,2]]]]',
        b'["push",{},[["float32",2]]]',
        b'["push",{},[["object",[1]]]]',
        b'["push",{},[[["float32"],[2]]]]',
        b'["push",{},[["float32",[2],1]]]',
        b"[" * 100_000,
    ):
        with pytest.raises(MalformedError):
            decode(header, [frame])
    text = repr(Message("push", {"n": 1}, (torch.ones(1000),)))
    assert re.fullmatch(r"Message\('push', \{'n': 1\}, \[float32\[1000\]\]\)", text)
