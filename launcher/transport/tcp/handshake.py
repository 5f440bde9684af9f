"""How node 0 and a node that was started by hand prove to each other that they know the run's token.

    joiner -> node 0   magic, nonce, X25519 key            80 bytes
    node 0 -> joiner   the same                            80 bytes
    joiner -> node 0   its proof                           32 bytes
    node 0 -> joiner   its proof, or WRONG                 32 bytes

Both make HKDF-SHA256 of the token and of the shared secret of the two ephemeral keys, salted with the hash of the two
greetings: a key for each proof (HMAC-SHA256 of that hash), one for each direction of encrypted_records.py.

What it gives: the token never travels, neither does anything by which a listener could try tokens out; who does not
know it learns and changes nothing and gets no further; nothing recorded, reflected or moved to another connection is
accepted, since each proof has a key of its own that hangs on both greetings; and who learns the token later cannot read
what was recorded before (forward secrecy). What it does not give: who answers in node 0's place gets one proof, and can
try out weak tokens on it without hurry, so a token is long and random; whoever knows the token is a node of the run;
and connections can be seen, counted, delayed and broken by anybody on the way.

Why not TLS: with the standard library's ssl, a certificate made for the run, and proofs that are an HMAC of the token
over both nonces and the certificate's digest, it would be no weaker. It was tried, and takes more code: 176 lines
against 151 here and in encrypted_records.py. Frames with a kind, the magic that tells another version from another
program, the limit on what is read of a peer that has proved nothing, and the proofs all stay. What comes in addition is
the certificate, its key in a file (ssl takes no other), the memory BIOs, and a lock, since one thread receives while
others send. It also moved 51 MB/s where this moves 88, and an unproven peer's bytes would reach a larger parser.

Bytes in, bytes out: no socket is touched here.
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
    """The other end does not get in. `answer` is what it is sent before the connection is closed."""

    answer = b""


class NotDtrain(HandshakeError):
    """The other end speaks something else."""


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
    """The keys of one connection, as one end has them."""

    sending: bytes = field(repr=False)
    receiving: bytes = field(repr=False)


class Handshake:
    """One end of it. The joiner sends `greeting` first; then each end feeds in what arrives and sends what it gets.

    `keys` is set once the other end has proved itself.
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
        """Whether the other end has shown itself to be a dtrain, or something that plays one."""
        return bool(self._proofs)

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes and return what is to be sent now. Raises HandshakeError."""
        self._buffer += data[: GREETING_BYTES + PROOF_BYTES + 1]  # more can only be wrong
        if not self._proofs:
            self._check_magic()
            return self._greeted() if self._complete(GREETING_BYTES) else b""
        return self._proved() if self._complete(PROOF_BYTES) else b""

    def _complete(self, size: int) -> bool:
        """Say whether a message is there; nobody may send the next one before it was answered."""
        if len(self._buffer) > size:
            raise NotDtrain("the other end says more than this version of dtrain does")
        return len(self._buffer) == size

    def _check_magic(self) -> None:
        said = self._buffer[: len(MAGIC)]
        if MAGIC.startswith(said):
            return
        if said.startswith(_FAMILY):
            if len(said) < len(MAGIC):
                return
            raise OtherVersion("the other end's dtrain has another way of joining; install the same version on both")
        text = "".join(map(chr, self._buffer[:40])).split("\n")[0].strip()
        raise NotDtrain(f"the other end is no dtrain; it says {text!a}")

    def _greeted(self) -> bytes:
        theirs, self._buffer = self._buffer, b""
        if hmac.compare_digest(theirs, self.greeting):
            raise NotDtrain("the other end only repeats what it hears")
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
        except ValueError as error:  # a point of low order: the secret would be known to everybody
            raise NotDtrain("the other end's key is none") from error
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
