"""Node 0 and a node started by hand prove that they share a token; nothing else gets in, or changes what is said."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testbed.present import present

from launcher.errors import ProtocolError
from launcher.transport.tcp.encrypted_records import MAX_DATA_BYTES, Decryptor, Encryptor, Kind, Record
from launcher.transport.tcp.greeting import Greeting, differences, encode
from launcher.transport.tcp.handshake import (
    GREETING_BYTES,
    MAGIC,
    PROOF_BYTES,
    WRONG,
    Handshake,
    HandshakeError,
    NotDtrain,
    OtherVersion,
    Side,
    WrongToken,
)

TOKEN = b"a token that is long enough"
KEY = bytes(range(32))


def _pair(token: bytes = TOKEN, other: bytes = TOKEN) -> tuple[Handshake, Handshake]:
    return Handshake(Side.LISTENER, token), Handshake(Side.JOINER, other)


def _shake_hands(listener: Handshake, joiner: Handshake, flip: tuple[int, int] = (-1, 0)) -> list[bytes]:
    """Carry one handshake out; return its messages. `flip`: in which message a bit of which byte is changed."""
    messages = [joiner.greeting]
    for number, end in enumerate((listener, joiner, listener, joiner)):
        message = bytearray(messages[-1])
        if number == flip[0]:
            message[flip[1]] ^= 0x80
        messages.append(end.feed(bytes(message)))
    return messages


def test_both_ends_have_the_same_keys_one_for_each_direction() -> None:
    listener, joiner = _pair()
    messages = _shake_hands(listener, joiner)
    assert [len(message) for message in messages] == [GREETING_BYTES, GREETING_BYTES, PROOF_BYTES, PROOF_BYTES, 0]
    ours, theirs = present(listener.keys), present(joiner.keys)
    assert (ours.sending, ours.receiving) == (theirs.receiving, theirs.sending)
    assert ours.sending != ours.receiving
    assert TOKEN not in b"".join(messages)
    assert repr(ours) == "Keys()"  # they are in no traceback


def test_another_connection_has_other_keys() -> None:
    keys = []
    for _ in range(2):
        listener, joiner = _pair()
        _shake_hands(listener, joiner)
        keys += [present(listener.keys).sending, present(listener.keys).receiving]
    assert len(set(keys)) == 4


def test_another_token_is_an_error_that_says_so_on_both_ends() -> None:
    listener, joiner = _pair(other=TOKEN + b"?")
    proof = joiner.feed(listener.feed(joiner.greeting))
    with pytest.raises(WrongToken, match="another token") as refused:
        listener.feed(proof)
    assert refused.value.answer == WRONG
    assert len(WRONG) == PROOF_BYTES
    with pytest.raises(WrongToken, match="another token"):
        joiner.feed(refused.value.answer)
    assert listener.keys is None
    assert joiner.keys is None


def test_a_recorded_handshake_lets_no_one_in() -> None:
    listener, joiner = _pair()
    recorded = _shake_hands(listener, joiner)
    again = Handshake(Side.LISTENER, TOKEN)
    again.feed(recorded[0])
    with pytest.raises(WrongToken):
        again.feed(recorded[2])
    victim = Handshake(Side.JOINER, TOKEN)
    victim.feed(recorded[1])
    with pytest.raises(WrongToken):
        victim.feed(recorded[3])


def test_what_an_end_says_itself_proves_nothing_to_it() -> None:
    _, joiner = _pair()
    with pytest.raises(NotDtrain, match="echoes"):
        joiner.feed(joiner.greeting)
    listener, joiner = _pair()
    proof = joiner.feed(listener.feed(joiner.greeting))
    with pytest.raises(WrongToken):
        joiner.feed(proof)


def test_one_in_between_who_puts_keys_of_its_own_in_is_found_out() -> None:
    listener, joiner = _pair()
    between_listener, between_joiner = Handshake(Side.JOINER, b""), Handshake(Side.LISTENER, b"")
    between_listener.feed(listener.feed(between_listener.greeting))
    proof = joiner.feed(between_joiner.feed(joiner.greeting))
    with pytest.raises(WrongToken):
        listener.feed(proof)


@pytest.mark.parametrize("number", range(4))
def test_a_flipped_bit_in_any_message_ends_it(number: int) -> None:
    size = (GREETING_BYTES, GREETING_BYTES, PROOF_BYTES, PROOF_BYTES)[number]
    for at in [*range(0, size, 5), size - 1]:
        listener, joiner = _pair()
        with pytest.raises(HandshakeError):
            _shake_hands(listener, joiner, flip=(number, at))
        assert joiner.keys is None


def test_a_key_by_which_everybody_knows_the_secret_is_refused() -> None:
    for point in (bytes(32), b"\1" + bytes(31)):
        with pytest.raises(NotDtrain):
            Handshake(Side.LISTENER, TOKEN).feed(MAGIC + bytes(32) + point)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x16\x03\x01", b"\0"])
def test_other_protocols_are_known_by_their_first_bytes(said: bytes) -> None:
    with pytest.raises(NotDtrain, match="not dtrain"):
        Handshake(Side.LISTENER, TOKEN).feed(said)


def test_another_version_is_named_on_both_ends() -> None:
    with pytest.raises(OtherVersion, match="same version") as refused:
        Handshake(Side.LISTENER, TOKEN).feed(b"dtrain-join 0009" + bytes(64))
    assert refused.value.answer == MAGIC


def test_who_says_more_than_its_turn_is_refused() -> None:
    for more in (1, 1 << 20):
        listener, joiner = _pair()
        with pytest.raises(NotDtrain, match="more"):
            listener.feed(joiner.greeting + bytes(more))
        listener, joiner = _pair()
        proof = joiner.feed(listener.feed(joiner.greeting))
        with pytest.raises(NotDtrain, match="more"):
            listener.feed(proof + bytes(more))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary(max_size=120), max_size=6), st.booleans(), st.sampled_from(list(Side)))
def test_a_foreign_peer_gets_no_keys_whatever_it_sends(said: list[bytes], polite: bool, side: Side) -> None:
    handshake = Handshake(side, TOKEN)
    with contextlib.suppress(HandshakeError):
        for data in [MAGIC, *said] if polite else said:
            handshake.feed(data)
    assert handshake.keys is None


# ---- encrypted records ------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=300)), max_size=6), st.data())
def test_records_arrive_however_the_bytes_are_cut(records: list[tuple[Kind, bytes]], data: st.DataObject) -> None:
    encryptor, decryptor = Encryptor(KEY), Decryptor(KEY)
    stream = b"".join(encryptor.encrypt(kind, text) for kind, text in records)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    arrived: list[Record] = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        arrived += decryptor.feed(stream[begin:end])
    assert [(record.kind, record.data) for record in arrived] == records


def test_a_long_write_is_known_as_one_at_the_other_end() -> None:
    data = bytes(range(256)) * 1000
    encryptor = Encryptor(KEY)
    records = Decryptor(KEY).feed(
        b"".join([*encryptor.encrypt_all(Kind.DATA, data), *encryptor.encrypt_all(Kind.DATA, b"")])
    )
    assert [record.kind for record in records] == [Kind.PART] * 3 + [Kind.DATA, Kind.DATA]
    assert b"".join(record.data for record in records) == data


@settings(deadline=None, max_examples=300)
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=3), st.data())
def test_a_changed_bit_anywhere_is_found(texts: list[bytes], data: st.DataObject) -> None:
    encryptor, decryptor = Encryptor(KEY), Decryptor(KEY)
    encrypted = [encryptor.encrypt(Kind.DATA, text) for text in texts]
    stream = bytearray(b"".join(encrypted))
    bit = data.draw(st.integers(0, 8 * len(stream) - 1))
    stream[bit // 8] ^= 1 << bit % 8
    before = next(n for n in range(len(encrypted)) if bit // 8 < sum(map(len, encrypted[: n + 1])))
    arrived = []
    try:
        for at in range(len(stream)):
            arrived += decryptor.feed(bytes(stream[at : at + 1]))
    except ProtocolError:
        pass
    else:  # a length that was made greater: nothing more is believed before that much has come
        assert len(arrived) == before
        with pytest.raises(ProtocolError):
            decryptor.feed(bytes(MAX_DATA_BYTES + 64))
    assert [record.data for record in arrived] == texts[:before]


def test_left_out_repeated_and_swapped_records_are_found() -> None:
    encryptor = Encryptor(KEY)
    one, two, three = (encryptor.encrypt(Kind.DATA, text) for text in (b"1", b"2", b"3"))
    for stream in (one + three, one + one, two + one, one + two + two):
        with pytest.raises(ProtocolError, match="was changed on the way"):
            Decryptor(KEY).feed(stream)
    with pytest.raises(ProtocolError):
        Decryptor(bytes(32)).feed(one)  # the other direction's key


def test_a_record_over_the_limit_is_refused_before_it_is_there() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        Decryptor(KEY).feed((Kind.DATA << 24 | MAX_DATA_BYTES + 1).to_bytes(4, "big"))


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_garbage_is_no_record_and_an_error_of_ours(garbage: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert Decryptor(KEY).feed(garbage) == []


# ---- what a node says of itself ------------------------------------------------------------------------------


def test_a_greeting_arrives_as_it_was_sent() -> None:
    greeting = Greeting.ours(3, {"command": "träin.py \udcff"})
    arrived = Greeting.decode(encode(greeting))
    assert arrived == greeting
    assert differences({"command": "träin.py \udcff"}, arrived) == []


def test_differences_are_named_with_both_values() -> None:
    greeting = Greeting.ours(1, {"command": "train.py --lr 2", "nnodes": "2", "extra": "x"})
    lines = differences({"command": "train.py --lr 1", "nnodes": "2", "port": "29500"}, greeting)
    here = greeting.hostname
    assert lines == [
        f"command: train.py --lr 1 on node 0, train.py --lr 2 on {here}",
        f"port: 29500 on node 0, (nothing) on {here}",
        f"extra: (nothing) on node 0, x on {here}",
    ]


def test_of_long_values_the_part_is_shown_where_they_differ() -> None:
    for length in (1000, 100_000):
        greeting = Greeting.ours(1, {"command": "a" * length + "TWO"})
        (line,) = differences({"command": "a" * length + "ONE"}, greeting)
        assert len(line) < 600
        one, _, other = line.partition(" on node 0, ")
        assert one.removeprefix("command: ") != other.removesuffix(f" on {greeting.hostname}")


def test_nothing_that_a_node_says_steers_the_terminal() -> None:
    greeting = Greeting.ours(1, {"command\x1b[2J": "\x1b]0;x\x07\r\n"})
    assert all(line.isprintable() for line in differences({}, greeting))


@settings(deadline=None, max_examples=200)
@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["version", "command", "node_rank", "pid", "id", "x"]), inner, max_size=7)
        ),
    ).map(lambda value: __import__("json").dumps(value).encode())
)
def test_a_greeting_of_another_kind_is_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Greeting.decode(data)
