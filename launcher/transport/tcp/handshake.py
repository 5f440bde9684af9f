"""The handshake by which node 0 and a node started by hand prove to each other that they know the run's token.

    joiner -> node 0   magic, nonce, X25519 key            80 bytes
    node 0 -> joiner   the same                            80 bytes
    joiner -> node 0   its proof                           32 bytes
    node 0 -> joiner   its proof, or WRONG                 32 bytes

Both derive keys by HKDF-SHA256 from the token and the shared secret of the two ephemeral keys, salted with the hash of
the two greetings: a key for each proof (HMAC-SHA256 of that hash), and one for each direction of encrypted_records.py.

Guarantees: neither the token nor anything that allows an eavesdropper to test tokens is sent; a peer without the token
learns nothing, changes nothing and is not admitted; recorded, reflected or relayed messages are not accepted, since the
key of each proof depends on both greetings; a token learned later does not decrypt earlier recordings (forward
secrecy). Not guaranteed: an impostor of node 0 gets one proof, and can test weak tokens against it offline, so tokens
must be long and random; anyone who knows the token can join the run; and anyone on the path can see, count, delay and
break connections.

Why not TLS: with the standard library's ssl, a certificate made for the run, and proofs that are an HMAC of the token
over both nonces and the certificate's digest, it would be no weaker. It was tried, and takes more code: 176 lines
against 151 here and in encrypted_records.py. Frames with a kind, the magic that distinguishes another version from
another program, the limit on bytes read from an unauthenticated peer, and the proofs all remain. In addition it needs
the certificate, its key in a file (ssl accepts nothing else), the memory BIOs, and a lock, since one thread receives
while others send. It also moved 51 MB/s where this moves 88, and an unauthenticated peer's bytes would reach a larger
parser.

Bytes in, bytes out: nothing here uses a socket.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, field
from enum import Enum

from launcher.errors import ProtocolError

_FAMILY = b"dtrain-join "
MAGIC = _FAMILY + b"0002"
GREETING_BYTES = len(MAGIC) + 32 + 32
PROOF_BYTES = 32
WRONG = b"dtrain: not the token of this run"[:PROOF_BYTES]
_PURPOSE = b"dtrain nodes started by hand"


class HandshakeError(ProtocolError):
    """The other end is rejected. `answer` is sent to it before the connection is closed."""

    answer = b""


class NotDtrain(HandshakeError):
    """The other end speaks another protocol."""


class OtherVersion(HandshakeError):
    """The other end is a dtrain with another handshake."""

    answer = MAGIC


class WrongToken(HandshakeError):
    answer = WRONG


class Side(Enum):
    LISTENER = b"listener"
    JOINER = b"joiner"

    @property
    def other(self) -> Side:
        return Side.JOINER if self is Side.LISTENER else Side.LISTENER


@dataclass(frozen=True)
class Keys:
    """The keys of one connection, for one end."""

    sending: bytes = field(repr=False)
    receiving: bytes = field(repr=False)


class Handshake:
    """An end of a handshake. The joiner sends `greeting` first; each end then feeds what it receives, and sends the
    result.

    `keys` is set once the other end is authenticated.
    """

    def __init__(self, side: Side, token: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey  # takes 40 ms

        self._side = side
        self._token = token
        self._private = X25519PrivateKey.generate()
        self.greeting = MAGIC + os.urandom(32) + self._private.public_key().public_bytes_raw()
        self._buffer = b""
        self._proofs: dict[Side, bytes] = {}
        self._keys: Keys | None = None
        self.keys: Keys | None = None

    @property
    def greeted(self) -> bool:
        """True if the other end has sent the greeting of a dtrain, real or not."""
        return bool(self._proofs)

    def feed(self, data: bytes) -> bytes:
        """Process the next bytes and return the bytes to send. Raises HandshakeError."""
        self._buffer += data[: GREETING_BYTES + PROOF_BYTES + 1]  # more is always an error
        if not self._proofs:
            self._check_magic()
            return self._greeted() if self._complete(GREETING_BYTES) else b""
        return self._proved() if self._complete(PROOF_BYTES) else b""

    def _complete(self, size: int) -> bool:
        """Return whether a message is complete; the other end must not send the next one before our answer."""
        if len(self._buffer) > size:
            raise NotDtrain("the other end sends more than this version of dtrain does")
        return len(self._buffer) == size

    def _check_magic(self) -> None:
        magic = self._buffer[: len(MAGIC)]
        if MAGIC.startswith(magic):
            return
        if magic.startswith(_FAMILY):
            if len(magic) < len(MAGIC):
                return
            raise OtherVersion("the other end's dtrain has another handshake; install the same version on both")
        text = "".join(map(chr, self._buffer[:40])).split("\n")[0].strip()
        raise NotDtrain(f"the other end is not dtrain; it sent {text!a}")

    def _greeted(self) -> bytes:
        theirs, self._buffer = self._buffer, b""
        if hmac.compare_digest(theirs, self.greeting):
            raise NotDtrain("the other end only echoes")
        self._derive(theirs)
        return self.greeting if self._side is Side.LISTENER else self._proofs[self._side]

    def _derive(self, theirs: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        greetings = {self._side: self.greeting, self._side.other: theirs}
        transcript = hashlib.sha256(greetings[Side.JOINER] + greetings[Side.LISTENER]).digest()
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(theirs[-32:]))
        except ValueError as error:  # a point of low order: anyone would know the secret
            raise NotDtrain("the other end's key is invalid") from error
        material = hashlib.sha256(self._token).digest() + shared
        derived = HKDF(algorithm=SHA256(), length=128, salt=transcript, info=_PURPOSE).derive(material)
        proofs = {Side.JOINER: derived[:32], Side.LISTENER: derived[32:64]}
        record_keys = {Side.JOINER: derived[64:96], Side.LISTENER: derived[96:]}
        self._proofs = {side: hmac.digest(key, side.value + transcript, "sha256") for side, key in proofs.items()}
        self._keys = Keys(sending=record_keys[self._side], receiving=record_keys[self._side.other])

    def _proved(self) -> bytes:
        if not hmac.compare_digest(self._buffer, self._proofs[self._side.other]):
            raise WrongToken("the other end has another token")
        self.keys = self._keys
        return self._proofs[self._side] if self._side is Side.LISTENER else b""
