"""Which tests are quick: those that start no process, open no socket, do not wait and do not need torch.

Found by reading, so that no list has to be kept: a file that imports torch is not imported itself, and a test is left
out if it names something slow, or names a function, class or fixture of its module that does.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import pytest

TESTS = Path(__file__).parents[1]
HEAVY = {"torch", "ddp"}
SLOW = {"multiprocessing", "socket", "subprocess", "threading"}
WAITS = {"sleep", "fork"}
OF_ALL = {"nothing_left_behind", "own_folders", "start_by_exec_in_turn"}  # fixtures, which start nothing
LIGHT = {
    f"testbed.{name}" for name in ("imports", "job_drive", "outcomes", "present", "seeds", "typed", "write")
}  # fmt: skip


@functools.cache
def is_heavy(path: Path) -> bool:
    """Whether importing this module would import torch, by itself or by a module of the testbed."""
    names = []
    for statement in ast.parse(path.read_bytes()).body:
        if isinstance(statement, ast.Import):
            names += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            names.append(statement.module or "")
    ours = [TESTS / f"{name.replace('.', '/')}.py" for name in names if name.startswith("testbed.")]
    return any(name.partition(".")[0] in HEAVY for name in names) or any(
        is_heavy(each) for each in ours if each.exists()
    )


def is_quick(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    fixtures = [f.func for fixtures in item._fixtureinfo.name2fixturedefs.values() for f in fixtures]
    named = (thing for thing in (item.function, *fixtures) if thing.__name__ not in OF_ALL)
    seen: set[int] = set()
    return not any(_is_slow(thing, item.module, seen) for thing in named)


def _is_slow(thing: object, module: ModuleType, seen: set[int]) -> bool:
    if id(thing) in seen:
        return False
    seen.add(id(thing))
    if isinstance(thing, ModuleType):
        return thing.__name__ in SLOW
    where = getattr(thing, "__module__", "") or ""
    if where.startswith("testbed."):
        return where not in LIGHT
    if where in SLOW:
        return True
    if where != module.__name__ and where.rpartition(".")[2] != "conftest":
        return False
    if isinstance(thing, type):
        return any(_is_slow(part, module, seen) for part in vars(thing).values())
    thing = getattr(thing, "hypothesis", thing)
    thing = getattr(thing, "inner_test", getattr(thing, "__wrapped__", thing))
    if not isinstance(thing, FunctionType):
        return False
    for name in _names(thing.__code__):
        if (
            name in WAITS
            or name.partition(".")[0] in HEAVY
            or (name in thing.__globals__ and _is_slow(thing.__globals__[name], module, seen))
        ):
            return True
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
