"""The one decoder of data from other processes: JSON becomes a dataclass of exactly the annotated types, or an error.

Used for the messages of protocol/, the messages between nodes that are started by hand, the leftovers of lost agents
and the answers of `dtrain check`. Annotations may be str, bool, int, float, bytes (which JSON never has), enums by
their value, `X | None`, list[X], tuple[X, ...], tuple[X, Y], dict[str, X], dataclasses of these, and Any. Pure; errors
name the field and its type, never its value, which may be secret. msgspec (0.22) would name the value of an enum,
accept integers of any size, and add a compiled package to every host without being faster.
"""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from launcher.errors import ProtocolError
from launcher.frozen import names_of

T = TypeVar("T")
_Field: typing.TypeAlias = tuple[Any, float | None, Callable[[Any], Any]]
_LIMITS: dict[type, float] = {int: 2**63, float: sys.float_info.max}  # excludes overflows in C, infinity and NaN
_parse = json.JSONDecoder().decode  # json.loads checks options and encodings each time


def parse_json(text: bytes | str) -> Any:
    """Parse JSON in UTF-8. Raises ProtocolError."""
    try:
        return _parse(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"this is no JSON: {type(error).__name__}") from error


def decode_json(cls: type[T], text: bytes | str) -> T:
    """Parse JSON and decode it as a dataclass. Raises ProtocolError."""
    return decode_dataclass(cls, parse_json(text))


def decode_dataclass(cls: type[T], value: object) -> T:
    """Make a dataclass of a mapping with its field names, which is not changed. Raises ProtocolError."""
    if not isinstance(value, dict):
        raise ProtocolError(f"{cls.__name__}: expected an object, got {type(value).__name__}")
    known: dict[str, _Field] = _fields(cls)  # type: ignore[arg-type]  # a class can be hashed
    made = value
    for name, item in value.items():
        if name not in known:
            raise ProtocolError(f"{cls.__name__}: it has no field of that name")
        kind, limit, convert = known[name]
        if type(item) is kind and (limit is None or -limit <= item <= limit):  # for most fields; else slower
            continue
        try:
            converted = convert(item)
        except ProtocolError as error:
            raise ProtocolError(f"{cls.__name__}.{name}: {error}") from error
        if converted is not item:
            made = dict(value) if made is value else made
            made[name] = converted
    try:
        return cls(**made)
    except (TypeError, ValueError) as error:  # a field is missing, or the class rejects a value
        raise ProtocolError(f"{cls.__name__}: {error}") from error


def decode_value(kind: Any, value: object) -> Any:
    """Decode a value of an annotated type. Raises ProtocolError."""
    return _converter(kind)(value)


@cache
def _fields(cls: Any) -> dict[str, _Field]:
    """Return each field's type, limit and converter by name: hashing a type each time would be slow."""
    hints = typing.get_type_hints(cls)
    kinds = {name: hints[name] for name in names_of(cls) or ()}
    return {name: (kind, _LIMITS.get(kind), _converter(kind)) for name, kind in kinds.items()}


@cache
def _converter(kind: Any) -> Callable[[Any], Any]:
    """Return a converter to this type, which raises ProtocolError; it returns the value itself if nothing changes."""
    if kind is Any:
        return lambda value: value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        (other,) = (_converter(argument) for argument in arguments if argument is not types.NoneType)
        return lambda value: None if value is None else other(value)
    if origin is list:
        return _items(list, arguments[0])
    if origin is tuple and arguments[1:] == (...,):
        return _items(tuple, arguments[0])
    if origin is tuple:
        return _pair([_converter(argument) for argument in arguments])
    if origin is dict:
        return _mapping(arguments[1])
    if isinstance(kind, type) and names_of(kind) is not None:
        return lambda value: decode_dataclass(kind, value)
    if issubclass(kind, Enum):
        return lambda value: _member(kind, value)
    return lambda value: _plain(kind, value)


def _plain(kind: type[Any], value: Any) -> Any:
    if kind is float and type(value) is int and abs(value) <= _LIMITS[int]:
        return float(value)
    if type(value) is not kind:
        raise ProtocolError(f"expected {kind.__name__}, got {type(value).__name__}")
    if kind in _LIMITS and not -_LIMITS[kind] <= value <= _LIMITS[kind]:  # false for NaN as well
        raise ProtocolError(f"expected {kind.__name__}, but it is out of range")
    return value


def _member(kind: type[Enum], value: Any) -> Enum:
    try:
        return kind(value)
    except ValueError as error:
        raise ProtocolError(f"expected one of {kind.__name__}") from error


def _items(sequence: type[list[Any]] | type[tuple[Any, ...]], kind: Any) -> Callable[[Any], Any]:
    convert = _converter(kind)

    def items(value: Any) -> Any:
        if type(value) is not list:
            raise ProtocolError(f"expected a list, got {type(value).__name__}")
        if sequence is list and kind is str and {*map(type, value)} <= {str}:
            return value
        return sequence(map(convert, value))

    return items


def _pair(converters: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def pair(value: Any) -> Any:
        if type(value) is not list or len(value) != len(converters):
            raise ProtocolError(f"expected a list of {len(converters)}")
        return tuple(convert(item) for convert, item in zip(converters, value, strict=True))

    return pair


def _mapping(kind: Any) -> Callable[[Any], Any]:
    convert = _converter(kind)

    def mapping(value: Any) -> Any:
        if type(value) is not dict:
            raise ProtocolError(f"expected an object, got {type(value).__name__}")
        if kind is str and {*map(type, value.values())} <= {str}:  # an environment is checked in one step
            return value
        return {name: convert(item) for name, item in value.items()}

    return mapping
