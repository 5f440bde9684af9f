"""A server refuses what does not fit, tells its sender which field is wrong, and serves on."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp.comm.codec import encode
from ddp.strategies.parameter_server.endpoints import ClientEndpoint, EndpointOptions, ServerEndpoint
from ddp.strategies.parameter_server.messages import (
    CLIENT_MESSAGES,
    SERVER_MESSAGES,
    MalformedError,
    Message,
    check_fields,
    decode_value,
)
from ddp.strategies.parameter_server.run_plan import Options, make_plan, plain_groups
from ddp.strategies.parameter_server.server import Server

KEY = secrets.token_bytes(32)
DEADLINE_S = 30.0
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
EXAMPLES: dict[Any, Any] = {str: "x", int: 0, bool: True, list: [], dict: {}, NoneType: None}
WITH_FIELDS = {kind: fields for kind, fields in CLIENT_MESSAGES.items() if fields}


@contextmanager
def served(send: Any) -> Iterator[None]:
    """A server of a small model in this thread, which must live until `send(endpoint, join)` is through in another."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    plan = make_plan(model, optimizer, Options(mode="async", shared_memory=False), workers=1, servers=1)
    failures: list[BaseException] = []

    def client(address: str) -> None:
        with ClientEndpoint(EndpointOptions(KEY), address, name="worker 0") as endpoint:
            try:
                ask(endpoint, Message("join", {**JOIN, "digest": plan.digest}), "joined")
                send(endpoint, plain_groups(optimizer))
            except BaseException as error:
                failures.append(error)
            finally:
                endpoint.send(Message("leave"))

    with ServerEndpoint(EndpointOptions(KEY), host="127.0.0.1") as endpoint:
        thread = threading.Thread(target=client, args=(endpoint.address,))
        thread.start()
        try:
            Server(plan, optimizer, endpoint, index=0, life=1).serve()
        finally:
            thread.join(DEADLINE_S)
        yield
    assert failures == []


JOIN = {"role": "worker", "replica": 0, "done": 0, "gathers": 0, "memory": None}


def ask(endpoint: ClientEndpoint, message: Message, *kinds: str) -> Message:
    deadline = time.monotonic() + DEADLINE_S
    while not endpoint.send(message, copy=True):
        assert endpoint.receive(0.05) is None  # it connects
        assert time.monotonic() < deadline
    while time.monotonic() < deadline:
        answer = endpoint.receive(1.0)
        if answer is not None and answer.kind in kinds:
            check_fields(answer, SERVER_MESSAGES)
            return answer
    raise AssertionError(f"no {kinds} within {DEADLINE_S:g} s after {message}")


def example(kind: Any) -> Any:
    """A value of a type, as an annotation has it."""
    if kind == list[tuple[int, int]]:
        return [[0, 0]]
    return EXAMPLES.get(kind, EXAMPLES.get(getattr(kind, "__origin__", NoneType)))


@st.composite
def wrong_facts(draw: st.DrawFn) -> Message:
    """A message of which one field is of any other type than its own."""
    kind = draw(st.sampled_from(sorted(WITH_FIELDS)))
    facts = {name: example(expected) for name, expected in WITH_FIELDS[kind].items()}
    name = draw(st.sampled_from([*facts, "other"]))
    facts[name] = draw(JSON)
    return Message(kind, facts)


def is_refused(message: Message) -> bool:
    try:
        check_fields(message, CLIENT_MESSAGES)
    except MalformedError as error:
        return any(repr(name) in str(error) for name in message.facts)
    return False


@given(st.sampled_from([*CLIENT_MESSAGES, "what"]), st.dictionaries(st.text(), JSON, max_size=4))
def test_facts_of_any_form_are_taken_or_malformed(kind: str, facts: dict[str, Any]) -> None:
    message = Message(kind, facts)
    is_right = kind in CLIENT_MESSAGES and not facts and not (kind in WITH_FIELDS and kind != "statistics")
    if is_right:
        check_fields(message, CLIENT_MESSAGES)
    else:
        with pytest.raises(MalformedError, match=kind):
            check_fields(message, CLIENT_MESSAGES)


def test_a_server_refuses_fields_of_a_wrong_type_and_serves_on() -> None:
    def send(endpoint: ClientEndpoint, groups: list[dict[str, Any]]) -> None:
        @settings(max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.filter_too_much])
        @given(wrong_facts().filter(is_refused))
        def refused(message: Message) -> None:
            problem = ask(endpoint, message, "malformed").facts["problem"]
            assert repr(message.kind) in problem

        refused()
        ask(endpoint, Message("statistics"), "statistics")

    with served(send):
        pass


def test_a_server_refuses_what_does_not_fit_and_serves_on(capfd: pytest.CaptureFixture[str]) -> None:
    flat = torch.zeros(8)
    push = {"chunk": 0, "step": 0, "flat": "float32"}
    rows = (torch.tensor([0, 9]), torch.zeros(2, 3))
    garbage = torch.frombuffer(bytearray(b"\x02" + bytes(7) + b"{}"), dtype=torch.uint8)

    def send(endpoint: ClientEndpoint, groups: list[dict[str, Any]]) -> None:
        push["groups"] = groups
        for message, field in (
            (Message("join", {**JOIN, "digest": "", "replica": "0"}), "replica"),
            (Message("pull", {"chunk": 7, "step": 0}), "chunk 7"),
            (Message("value", {"chunk": 0}, (torch.zeros(9),)), "chunk 0"),
            (Message("value", {"chunk": 0}), "chunk 0"),
            (Message("push", push), "0 tensors"),
            (Message("push", push, (torch.zeros(9),)), "shape (9,)"),
            (Message("push", {**push, "flat": "int8"}, (torch.zeros(9, dtype=torch.uint8),)), "shape (9,)"),
            (Message("push", {**push, "absent": [5]}, (flat,)), "piece 5"),
            (Message("push", {**push, "flat": None, "sparse": [0]}, rows), "piece 0"),
            (Message("push", {**push, "flat": None, "absent": [0]}), "missing"),
            (Message("push", {**push, "groups": []}, (flat,)), "groups"),
            (Message("push", {**push, "groups": [{"lr": "fast"}]}, (flat,)), "'lr'"),
            (Message("push", {**push, "groups": [{"betas": [0.9]}]}, (flat,)), "'betas'"),
            (Message("ask", {"outstanding": [[9, 0]]}), "chunk 9"),
            (Message("extras", {"names": ["mean"]}, (flat,)), "'mean'"),
            (Message("extras", {"names": []}, (flat,)), "None"),
            (Message("load", {"chunk": 0}), "load"),
            (Message("load", {"chunk": 0}, (garbage,)), "load"),
            (Message("load", {"chunk": 0}, (torch.tensor(1.0),)), "load"),
            (Message("load", {"chunk": 0}, (encode(["x"]),)), "load"),
            (Message("load", {"chunk": 0}, (encode([{}] * 5),)), "chunk"),
        ):
            problem = ask(endpoint, message, "malformed").facts["problem"]
            assert field in problem, (message, problem)
        ask(endpoint, Message("ready"), "filled")
        assert ask(endpoint, Message("push", push, (torch.ones(8),)), "pushed").facts["made"] == -1

    with served(send):
        pass
    assert (
        "parameter server 0: refused a message of worker 0: field 'replica' of message 'join'" in capfd.readouterr().err
    )


@given(st.binary(max_size=60), st.integers(0, 60))
def test_bytes_that_no_one_writes_are_malformed_or_a_value(data: bytes, length: int) -> None:
    written = encode([1, {"a": torch.ones(2)}, b"x", (None, 2.5)]).numpy().tobytes()
    for payload in (data, length.to_bytes(8, "little") + data, written[:length] + data + written[length + len(data) :]):
        tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0)
        try:
            decode_value(Message("load", {}, (tensor,)), list[Any])
        except MalformedError:
            continue
