"""The framed protocol: every message arrives as it was sent, however the bytes are cut; garbage is an error."""

import ast
import json
import math
import struct
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import launcher
from launcher.errors import ProtocolError
from launcher.protocol.commands import StartWorker
from launcher.protocol.frames import Decoder, encode
from launcher.protocol.message import (
    MAX_HEADER_BYTES,
    MAX_NOISE_BYTES,
    MAX_PAYLOAD_BYTES,
    PREAMBLE,
    PROTOCOL,
    Command,
    Message,
    Report,
)
from launcher.protocol.reports import Collective, Collectives, Output
from launcher.protocol.two_way import Heartbeat

# Unpaired surrogates are how Python holds an environment that is no UTF-8.
TEXT = st.text(st.characters(), max_size=20)
CALLS = st.builds(Collective, TEXT, st.integers(0, 999), TEXT, TEXT, st.integers(0, 999), st.booleans())
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: TEXT,
    bytes: st.binary(max_size=100),
    int | None: st.none() | st.integers(0, 999),
    str | None: st.none() | TEXT,
    list[str]: st.lists(TEXT, max_size=4),
    list[float]: st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    list[int]: st.lists(st.integers(0, 999), max_size=4),
    dict[str, int]: st.dictionaries(TEXT, st.integers(0, 999), max_size=4),
    dict[str, float]: st.dictionaries(TEXT, st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    dict[str, list[int]]: st.dictionaries(TEXT, st.lists(st.integers(0, 999), max_size=3), max_size=3),
    dict[str, str]: st.dictionaries(TEXT, TEXT, max_size=4),
    dict[str, str] | None: st.none() | st.dictionaries(TEXT, TEXT, max_size=4),
    dict[str, dict[str, str]]: st.dictionaries(TEXT, st.dictionaries(TEXT, TEXT, max_size=2), max_size=3),
    Any: st.none() | st.integers(0, 9) | st.lists(TEXT, max_size=4),
    Collectives | None: st.none() | st.builds(Collectives, st.lists(TEXT, max_size=2), st.lists(CALLS, max_size=2)),
    dict[str, Any]: st.dictionaries(TEXT, st.none() | st.booleans() | st.integers(0, 9) | TEXT, max_size=4),
}
KINDS: tuple[type[Message], ...] = tuple(dict.fromkeys([*Command.__subclasses__(), *Report.__subclasses__()]))


def _fields(message: Any) -> tuple[Field[Any], ...]:
    """Return the fields of a message or of its class: Message itself is no dataclass, all kinds of it are."""
    return fields(message)


def _messages_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    hints = get_type_hints(kind)
    return st.builds(kind, **{field.name: VALUES[hints[field.name]] for field in _fields(kind)})


MESSAGES = st.one_of([_messages_of(kind) for kind in KINDS])


def _frame(header: bytes, payload: bytes = b"") -> bytes:
    return struct.pack(">II", len(header), len(payload)) + header + payload + b"\n"


def _decode(data: bytes) -> list[Message]:
    return Decoder().feed(PREAMBLE + data)


@settings(deadline=None)
@given(st.lists(MESSAGES, max_size=5), st.binary(max_size=50), st.data())
def test_messages_arrive_however_the_bytes_are_cut(messages: list[Message], noise: bytes, data: st.DataObject) -> None:
    assume(PREAMBLE not in noise + PREAMBLE[:-1])
    stream = noise + PREAMBLE + b"".join(map(encode, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder, arrived = Decoder(), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        arrived += decoder.feed(stream[begin:end])
    assert arrived == messages
    assert decoder.noise == noise


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@settings(deadline=None, max_examples=20)
@given(st.data())
def test_every_kind_arrives_byte_by_byte(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(_messages_of(kind))
    decoder = Decoder()
    stream = PREAMBLE + encode(message)
    arrived = [message for byte in stream for message in decoder.feed(bytes([byte]))]
    assert arrived == [message]


def test_large_output_arrives_whole() -> None:
    message = Output(rank=3, stream=1, data=bytes(range(256)) * (MAX_PAYLOAD_BYTES // 256))
    assert _decode(encode(message)) == [message]


def test_an_environment_of_odd_values_arrives_whole() -> None:
    env = {"NAME": "\udcff\n\0'\"=", "": "", "日本": "\U0001f600"}
    message = StartWorker(rank=0, attempt=0, through="script", argv=["a b", ""], env=env, defaults={})
    assert _decode(encode(message)) == [message]


def test_what_a_login_shell_says_is_kept_as_noise() -> None:
    decoder = Decoder()
    assert decoder.feed(b"Welcome!\n" + PREAMBLE[:5]) == []
    assert decoder.noise == b"Welcome!\n" + PREAMBLE[:5]
    assert decoder.feed(PREAMBLE[5:] + encode(Heartbeat(time=1.0))) == [Heartbeat(time=1.0)]
    assert decoder.noise == b"Welcome!\n"


def test_endless_noise_is_an_error() -> None:
    decoder = Decoder()
    decoder.feed(b"y\n" * (MAX_NOISE_BYTES // 2))
    with pytest.raises(ProtocolError, match="other text precedes"):
        decoder.feed(b"y\n")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"null",
        b"7",
        b"[]",
        b'["kind"]',
        b"{}",
        b'{"kind":"format_disk"}',
        b'{"kind":["hello"]}',
        b'{"kind":null,"time":1}',
        b'{"kind":"heartbeat"}',
        b'{"kind":"heartbeat","time":1,"more":2}',
        b'{"kind":"heartbeat","time":1}{}',
        b'{"kind":"exited","rank":0}',
        b"[" * 100_000,
        b'{"kind":"heartbeat","time":' + b"9" * 5000 + b"}",
        b"cos\nsystem\n(S'true'\ntR.",  # a pickle
    ],
    ids=lambda header: repr(header[:40]),
)
def test_what_is_no_message_of_this_version_is_an_error(header: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"a frame is not a message of protocol {PROTOCOL}"):
        _decode(_frame(header))


def test_a_heartbeat_has_no_payload() -> None:
    header = json.dumps({"kind": "heartbeat", "time": 1.0}).encode()
    with pytest.raises(ProtocolError):
        _decode(_frame(header, b"more"))


@pytest.mark.parametrize(("header", "payload"), [(MAX_HEADER_BYTES + 1, 0), (0, MAX_PAYLOAD_BYTES + 1), (2**32 - 1, 0)])
def test_a_length_over_the_limit_is_an_error_at_once(header: int, payload: int) -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        _decode(struct.pack(">II", header, payload))


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_garbage_is_an_error_or_waits_for_more(garbage: bytes) -> None:
    try:
        assert _decode(garbage) == []
    except ProtocolError:
        return


@settings(deadline=None)
@given(MESSAGES, st.data())
def test_a_damaged_frame_is_an_error_or_another_message(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        assert all(isinstance(arrived, KINDS) for arrived in _decode(bytes(frame)))
    except ProtocolError:
        return


NAMES = ["kind", "data", *dict.fromkeys(field.name for kind in KINDS for field in _fields(kind))]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([10**400, -1, 2**64]) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
)


@settings(deadline=None, max_examples=100)
@given(MESSAGES, st.data())
def test_a_field_of_another_type_never_gets_into_a_message(message: Message, data: st.DataObject) -> None:
    names = [field.name for field in _fields(message) if field.name != "data"]
    changed = data.draw(st.dictionaries(st.sampled_from([*names, "data"]), JSON, max_size=3))
    said = {"kind": message.kind, **{name: getattr(message, name) for name in names}, **changed}
    try:
        (arrived,) = _decode(_frame(json.dumps(said, default=_by_name).encode()))
    except ProtocolError:
        return
    assert type(arrived) is type(message)
    assert repr(_decode(encode(arrived))) == repr([arrived])  # NaN is not equal to itself
    _check_fields(arrived)


def _by_name(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in _fields(value)}


def _check_fields(value: Any) -> None:
    hints = get_type_hints(type(value))
    for name, each in _by_name(value).items():
        _check_type(each, hints[name])


def _check_type(value: Any, kind: Any) -> None:
    """Check it without the decoder's own rules."""
    if kind is Any:  # the answers of `dtrain check`, which it decodes itself
        return
    if kind is float:
        assert type(value) is float
        assert math.isfinite(value)
    elif isinstance(kind, type) and not get_args(kind):
        assert type(value) is kind
        if is_dataclass(kind):
            _check_fields(value)
    elif type(None) in get_args(kind):
        if value is not None:
            _check_type(value, get_args(kind)[0])
    else:
        assert type(value) is get_origin(kind)
        for item in value.values() if isinstance(value, dict) else value:
            _check_type(item, get_args(kind)[-1])


@pytest.mark.parametrize(
    "time", ['"soon"', "null", "true", "[1]", "{}", "NaN", "Infinity", "-Infinity", "1e999", "9" * 400]
)
def test_what_is_no_finite_number_is_no_time(time: str) -> None:
    with pytest.raises(ProtocolError, match=r"Heartbeat\.time: expected float"):
        _decode(_frame(f'{{"kind":"heartbeat","time":{time}}}'.encode()))


def test_a_wrong_value_is_not_repeated_for_it_may_be_secret() -> None:
    with pytest.raises(ProtocolError, match=r"StartWorker\.env: expected str, got int") as refused:
        _decode(_frame(b'{"kind":"start_worker","env":{"KEY":"canary","N":5}}'))
    assert "canary" not in str(refused.value)


PICKLES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
# The function of launcher.launch() and what it returns, in the worker and in the program of who called it.
FUNCTIONS = {"functions/packing.py", "agent/workers/call_function.py"}
# What torch's watchdog writes on a worker's host; only plain containers are made of it.
RECORDS = {"agent/observation/flight_recorder.py"}
# It compiles the program that a host runs for --sync, and reads nothing.
SENT_CODE = {"transport/synced.py"}


def test_nothing_is_unpickled_or_evaluated() -> None:
    top = Path(launcher.__file__).parent
    unpickling: set[str] = set()
    for file in top.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported = {node.module or ""}
            else:
                continue
            if imported & PICKLES:
                unpickling.add(str(file.relative_to(top)))
    assert unpickling == FUNCTIONS | RECORDS | SENT_CODE
    trees = [ast.parse(file.read_text()) for file in (top / "protocol").glob("*.py")]
    names = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert "parse_json" in names
    assert not names & {"eval", "exec", "__import__", "getattr"}
