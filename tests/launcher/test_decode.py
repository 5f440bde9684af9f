"""What another process says becomes a dataclass of the annotated types, or a ProtocolError; never anything else."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.decode import decode_dataclass, decode_json, decode_value
from launcher.errors import ProtocolError


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Point:
    x: float
    y: int = 0


@dataclass(frozen=True)
class Shape:
    name: str
    points: tuple[Point, ...]
    first: Point | None
    size: tuple[int, float]
    colour: Colour
    tags: dict[str, Point]
    weights: list[float]
    closed: bool = True


GOOD: dict[str, Any] = {
    "name": "a",
    "points": [{"x": 1}, {"x": 2.5, "y": -3}],
    "first": None,
    "size": [3, 4],
    "colour": "blue",
    "tags": {"p": {"x": 0.0}},
    "weights": [1, 2.5],
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["red", "a", 2**63 + 1, 10**400]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["x", "y", "p", *GOOD]), inner, max_size=4)
    ),
)


def test_nested_dataclasses_arrive_with_their_types() -> None:
    shape = decode_json(Shape, json.dumps(GOOD))
    assert shape == Shape("a", (Point(1.0), Point(2.5, -3)), None, (3, 4.0), Colour.BLUE, {"p": Point(0.0)}, [1.0, 2.5])
    assert type(shape.points[0].x) is type(shape.size[1]) is type(shape.weights[0]) is float
    assert decode_value(tuple[Point, ...], [{"x": 1}]) == (Point(1.0),)
    assert decode_value(float, 3) == 3.0


def test_what_is_decoded_stays_as_it_is() -> None:
    before = json.dumps(GOOD)
    decode_dataclass(Shape, GOOD)
    assert json.dumps(GOOD) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, r"Shape\.name: expected str, got int"),
        ({"closed": 1}, r"Shape\.closed: expected bool, got int"),
        ({"points": [{"x": "1"}]}, r"Shape\.points: Point\.x: expected float, got str"),
        ({"points": {"x": 1}}, r"Shape\.points: expected a list, got dict"),
        ({"points": [{}]}, r"Shape\.points: Point: .*missing.*'x'"),
        ({"first": {"x": 1, "z": 1}}, r"Shape\.first: Point: it has no field of that name"),
        ({"size": [3]}, r"Shape\.size: expected a list of 2"),
        ({"size": [True, 1.0]}, r"Shape\.size: expected int, got bool"),
        ({"size": [2**64, 1.0]}, r"Shape\.size: expected int, but it is out of range"),
        ({"size": [1, math.nan]}, r"Shape\.size: expected float, but it is out of range"),
        ({"size": [1, 10**400]}, r"Shape\.size: expected float, got int"),
        ({"colour": "green"}, r"Shape\.colour: expected one of Colour"),
        ({"colour": []}, r"Shape\.colour: expected one of Colour"),
        ({"tags": [1]}, r"Shape\.tags: expected an object, got list"),
        ({"weights": [math.inf]}, r"Shape\.weights: expected float"),
        ({"more": 1}, r"Shape: it has no field of that name"),
    ],
)
def test_a_wrong_type_is_named_by_its_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_json(Shape, json.dumps({**GOOD, **change}))


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", "[" * 100_000, "9" * 5000, b"\xff", b"\xff\xfe{\0}\0", "\udcff"]
)
def test_what_is_no_json_object_is_an_error(text: str | bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_json(Shape, text)


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(st.sampled_from([*GOOD]), JSON))
def test_random_values_are_an_error_or_survive_a_round_trip(change: dict[str, Any]) -> None:
    try:
        shape = decode_json(Shape, json.dumps({**GOOD, **change}))
    except ProtocolError:
        return
    fields = {**asdict(shape), "colour": shape.colour.value}
    assert decode_json(Shape, json.dumps(fields)) == shape
    assert all(math.isfinite(number) for point in shape.points for number in (point.x, point.y))
