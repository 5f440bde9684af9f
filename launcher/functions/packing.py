"""Pickles a function and its arguments for the workers, and unpickles what they return.

Pickles are exchanged only between processes of one user: this one writes the function, the workers read it; they write
their results, and this one reads those at the end of the run. Both use the authenticated streams to the run's agents.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import linecache
import os
import pickle
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

from launcher.agent.workers.preload import NAMES_TORCH, imports_of_code
from launcher.errors import UsageError
from launcher.output.text import size
from launcher.protocol.commands import Function
from launcher.protocol.frames import encode
from launcher.protocol.message import MAX_PAYLOAD_BYTES
from launcher.protocol.reports import Exited, Returned

MAX_FUNCTION_BYTES = 256 << 20  # it goes to every host before its workers start
_INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")
_ZIPPED = f"{os.sep}python{sys.version_info.major}{sys.version_info.minor}.zip"  # the standard library, if zipped
_NOT_IN_WORKERS = ("__main__", "_pytest")
_FILENAME = 10  # its place among the arguments of CodeType


@dataclass(frozen=True)
class Packed:
    """`modules` are those that the function uses; `path` are the folders of modules that are not installed."""

    name: str
    modules: tuple[str, ...]
    path: tuple[str, ...]
    frames: tuple[bytes, ...]


def pack(function: Callable[..., Any], args: tuple[Any, ...]) -> Packed:
    """Return the data for the hosts. Raises UsageError if it cannot be pickled, or is too large."""
    if not callable(function):
        raise UsageError(f"launch() needs a function, not {type(function).__name__}")
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        with _by_value_if_out_of_reach(getattr(inner, "__module__", None)):
            pickler.dump((function, args))
    except Exception as error:
        raise UsageError(
            f"{name} and its arguments cannot be pickled: {type(error).__name__}: {error}; "
            "create objects that cannot be pickled inside the function"
        ) from error
    lines = pickle.dumps({path: found for path in pickler.files if (found := linecache.getlines(path))})
    data = lines + file.getvalue()
    if len(data) > MAX_FUNCTION_BYTES:
        raise UsageError(
            f"{name} and its arguments take {size(len(data))}, at most {size(MAX_FUNCTION_BYTES)} are sent; "
            "save the data to a file that the workers read"
        )
    modules = [*pickler.modules]
    if (code := getattr(inspect.unwrap(inner), "__code__", None)) is not None:
        modules += imports_of_code(code)
    if "torch" in modules and b"optim" in data and not NAMES_TORCH.search(data):
        modules.append("torch._dynamo")  # imported by an optimizer's first step, which takes seconds
    pieces = range(0, len(data), MAX_PAYLOAD_BYTES)
    return Packed(
        name=name,
        modules=tuple(dict.fromkeys(modules)),
        path=_own_path(),
        frames=tuple(encode(Function(at, bytes(data[at : at + MAX_PAYLOAD_BYTES]))) for at in pieces),
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Records the modules that will be imported, and the source files of pickled code."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: dict[str, None] = {}
        self.files: dict[str, None] = {}

    def reducer_override(self, item: Any) -> Any:
        """Keep the file name of code, which cloudpickle 3.1.3 drops: tracebacks of workers show it."""
        if not isinstance(item, CodeType):
            return super().reducer_override(item)
        make, args = self.dispatch_table[CodeType](item)
        return make, (*args[:_FILENAME], item.co_filename, *args[_FILENAME + 1 :])

    def persistent_id(self, item: Any) -> None:
        """Record each object; all are pickled normally."""
        if isinstance(item, CodeType):
            self.files.setdefault(item.co_filename)
        elif isinstance(item, ModuleType):
            self.modules.setdefault(item.__name__)
        elif isinstance(item, type) or callable(item):
            module = getattr(item, "__module__", None)
            if isinstance(module, str) and module not in ("__main__", "builtins"):
                self.modules.setdefault(module)


@contextmanager
def _by_value_if_out_of_reach(name: str | None) -> Iterator[None]:
    """Pickle a module's definitions by value if workers cannot import it, as one that pytest has loaded from its file.

    Definitions in `__main__` are always pickled by value.
    """
    module = sys.modules.get(name or "__main__")
    if name == "__main__" or module is None or _can_be_imported(module.__name__):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # another thread has done that
            cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(name: str) -> bool:
    """Return whether Python's finders, including those of editable installations, find a module."""
    path: list[str] | None = None
    found = ""
    for part in name.split("."):
        found = f"{found}.{part}".lstrip(".")
        spec = next(filter(None, (finder.find_spec(found, path) for finder in _finders())), None)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or ())
    return True


def _finders() -> list[Any]:
    """Return the finders that a worker has as well."""
    kinds = ((finder, finder if isinstance(finder, type) else type(finder)) for finder in sys.meta_path)
    return [
        finder
        for finder, kind in kinds
        if hasattr(finder, "find_spec") and kind.__module__.partition(".")[0] not in _NOT_IN_WORKERS
    ]


def _own_path() -> tuple[str, ...]:
    """Return the folders in sys.path, except those that every Python of this installation has."""
    folders = [*map(sysconfig.get_path, _INSTALLED), *site.getsitepackages()]
    installed = tuple(os.path.realpath(folder) + os.sep for folder in folders)
    paths = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)
    return tuple(
        path
        for path in paths
        if not f"{os.path.realpath(path)}{os.sep}".startswith(installed)
        and not path.endswith(_ZIPPED)
        and os.pathsep not in path
    )


@dataclass(frozen=True)
class Said:
    """The result of a worker (`ok`) or its exception, with its rank at that time."""

    ok: bool
    value: Any
    rank: int
    world_size: int


class Returns:
    """Results of the workers as they arrive: of the newest attempt, and of each rank's newest process.

    Processes are named by their ranks in orders and reports, which may differ from RANK after hosts were lost.
    """

    def __init__(self) -> None:
        self.hosts: dict[int, str] = {}
        self.error_files: dict[int, str | None] = {}
        self._attempt = -1
        self._coming: dict[int, bytearray] = {}
        self._data: dict[int, bytearray] = {}

    @property
    def processes(self) -> list[int]:
        return sorted(self._data)

    def add(self, host: str, said: Returned | Exited) -> None:
        """Add a report of a host's agent; call it in the order of the reports."""
        if said.attempt > self._attempt:
            self._attempt = said.attempt
            self._coming, self._data, self.error_files = {}, {}, {}
        elif said.attempt < self._attempt:
            return
        if isinstance(said, Returned):
            self._coming.setdefault(said.rank, bytearray()).extend(said.data)
        else:
            self._data[said.rank] = self._coming.pop(said.rank, bytearray())
            self.hosts[said.rank], self.error_files[said.rank] = host, said.error_file

    def read(self, process: int) -> Said | None:
        """Return the result of a process, once; None if there is none. Raises the exceptions of unpickling."""
        data = self._data.pop(process, None)
        return Said(*pickle.loads(data)) if data else None
