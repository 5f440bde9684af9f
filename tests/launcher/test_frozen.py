"""The dataclasses of launcher.frozen do what those of the standard library do."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from launcher import frozen


def _made(decorator: Any, field: Any) -> type[Any]:
    class Made:
        name: str
        secret: str = field(repr=False)
        place: int = field(compare=False, default=3)
        items: list[int] = field(default_factory=list)
        last: str | None = None

        @property
        def known(self) -> str:
            return self.name

    return decorator(frozen=True)(Made)  # type: ignore[no-any-return]


OURS = _made(frozen.dataclass, frozen.field)
THEIRS = _made(dataclasses.dataclass, dataclasses.field)
BOTH = pytest.mark.parametrize("cls", [OURS, THEIRS], ids=["ours", "theirs"])


@BOTH
def test_values_come_by_place_by_name_and_by_default(cls: type[Any]) -> None:
    made = cls("a", "b", items=[1])
    assert vars(made) == {"name": "a", "secret": "b", "place": 3, "items": [1], "last": None}
    assert (made.known, cls.__match_args__) == ("a", ("name", "secret", "place", "items", "last"))
    assert cls("a", secret="b").items is not cls("a", "b").items


@BOTH
@pytest.mark.parametrize(
    ("args", "words"),
    [(("a",), {}), (("a", "b"), {"name": "c"}), (("a", "b"), {"other": 1}), ((), {"name": "a"}), ("abcdef", {})],
)
def test_values_that_do_not_fit_are_refused(cls: type[Any], args: tuple[str, ...], words: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        cls(*args, **words)


@BOTH
def test_equality_and_hash_leave_out_what_is_not_compared(cls: type[Any]) -> None:
    assert cls("a", "b", 1) == cls("a", "b", 2) != cls("a", "c", 2)
    assert cls("a", "b") != vars(cls("a", "b"))
    assert hash(cls("a", "b", 1, ())) == hash(cls("a", "b", 2, ()))


@BOTH
def test_nothing_can_be_changed_and_secrets_are_not_shown(cls: type[Any]) -> None:
    made = cls("a", "b")
    changes: list[Callable[[], None]] = [
        lambda: setattr(made, "name", "c"),
        lambda: setattr(made, "new", 1),
        lambda: delattr(made, "name"),
    ]
    for change in changes:
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert repr(made) == "_made.<locals>.Made(name='a', place=3, items=[], last=None)"


@BOTH
@pytest.mark.parametrize("replace", [frozen.replace, dataclasses.replace])
def test_copies_and_the_functions_of_dataclasses(cls: type[Any], replace: Any) -> None:
    made = cls("a", "b", items=[1])
    assert replace(made, last="z") == cls("a", "b", items=[1], last="z")
    assert dataclasses.asdict(made) == vars(made)
    assert dataclasses.is_dataclass(cls)
    assert tuple(field.name for field in dataclasses.fields(made)) == vars(cls)["__match_args__"]
    assert copy.deepcopy(made) == made


def test_the_names_of_fields_are_known_of_any_dataclass() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Named:
        first: int
        second: int

    assert frozen.names_of(Named) == ("first", "second")
    assert frozen.names_of(OURS) == frozen.names_of(THEIRS) == ("name", "secret", "place", "items", "last")
    assert frozen.names_of(int) is None


def test_what_would_be_left_out_is_refused() -> None:
    unknown: dict[str, Any] = {"kw_only": True}
    with pytest.raises(TypeError, match="kw_only"):
        frozen.field(**unknown)

    class Made:
        def __post_init__(self) -> None: ...

    with pytest.raises(TypeError, match="__post_init__"):
        frozen.dataclass(frozen=True)(Made)
    assert OURS("a", "b").__replace__(last="z") == OURS("a", "b", last="z")


def test_they_can_be_pickled() -> None:
    from launcher.hosts.host import Host, HostKind

    host = Host("a", HostKind.SSH, slots=2)
    assert pickle.loads(pickle.dumps(host)) == host
