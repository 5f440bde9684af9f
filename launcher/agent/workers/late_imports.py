"""Records which installed packages a worker imports after its script has started, and which can be imported early.

A worker (bootstrap.py) records each import that the user's own code makes, and writes the record at the first step of
an optimizer. The fork server reads the records of a host's first workers. It makes the same imports in a separate
forked process, and later workers are forked from that.

An early import is allowed only if it finds the process as in the worker: its variables and its `process_state`. It
must leave the same modules, from the same files, that the worker had at its first step. If it draws random numbers,
the script must not have drawn or seeded any before it. Modules of the user's own are never imported early: they may be
edited between two attempts.
"""

from __future__ import annotations

import os
import sys
import time
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # this file is loaded in every worker
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

_INSTALLED = ("/site-packages/", "/dist-packages/")  # pip's and Debian's, in any place
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_OWN = os.path.abspath(__file__).rpartition("/launcher/")[0]
_OF_DTRAIN = (f"{_OWN}/launcher{os.sep}", f"{_OWN}/ddp{os.sep}")


class Recorder:
    """Records the imports of one worker. `known` are the modules loaded at its start."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        self._began_with = self._variables = _variables()
        self._random = random_states()
        self._imports: list[tuple[str, dict[Any, Any], list[str], list[str]]] = []
        self._last, self._last_began = "", 0.0
        self._took: dict[str, float] = {}  # least duration of the imports of packages, in s

    def note(self, name: str) -> None:
        """Record an import that is about to start, unless the code of an installed package makes it."""
        last, now = sys.modules.get(self._last), time.monotonic()
        if _is_being_imported(last) and not _is_own(origin_of(last)):
            self._took[self._last.partition(".")[0]] = now - self._last_began
            return
        self._last, self._last_began = name, now
        if _environ() != self._variables:
            self._variables = _variables()
        drawn = [kind for kind, state in random_states().items() if self._random.get(kind) != state]
        self._imports.append((name, self._variables, process_state(), drawn))

    def write(self, path: str) -> None:
        """Write the record to a file, unless it is empty. Raises OSError."""
        modules = {
            name: origin_of(module)
            for name, module in [*sys.modules.items()]
            if name not in self._known and module is not None
        }
        own = {name: origin for name, origin in modules.items() if _is_own(origin)}
        imports = [
            [name, self._changes(variables), state, drawn]
            for name, variables, state, drawn in self._imports
            if name in modules and name not in own
        ]
        if not imports:
            return
        import json

        taken_in = {*own, "__main__"}
        left = {name: origin for name, origin in modules.items() if name in own or not _has_parts_of(name, taken_in)}
        main = getattr(sys.modules["__main__"], "__file__", None)
        files = [file for file in {*own.values(), main} if file is not None]
        said = {"imports": imports, "modules": left, "own": files, "variables": self._changes(_variables())}
        with open(f"{path}.new", "w", encoding="ascii") as file:
            json.dump(said, file)
        os.rename(f"{path}.new", path)

    def write_times(self, path: str) -> None:
        """Write the durations of the imports of packages, if there were any. Raises OSError."""
        if not self._took:
            return
        import json

        with open(path, "w", encoding="ascii") as file:
            json.dump(self._took, file)

    def _changes(self, variables: Mapping[Any, Any]) -> dict[str, str | None]:
        names = {name for name, _ in variables.items() ^ self._began_with.items()}
        return {
            os.fsdecode(name): os.fsdecode(variables[name]) if name in variables else None for name in sorted(names)
        }


def _environ() -> Any:
    return os.environ._data  # type: ignore[attr-defined]  # decoding them all would take longer than an import


def _variables() -> dict[Any, Any]:
    return dict(_environ())


def _is_being_imported(module: Any) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False) is True


def _loaded(*names: str) -> Iterator[Any]:
    """Yield these modules; None for those that are not imported yet."""
    for name in names:
        module = sys.modules.get(name)
        yield None if _is_being_imported(module) else module


def origin_of(module: Any) -> str | None:
    """Return where a module is from: its file, `built-in`, or None if unknown."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin if type(origin) is str else None


def _is_own(origin: str | None) -> bool:
    """Return whether a module is the user's own: from a file that is neither installed, Python's nor dtrain's."""
    if origin is None or not os.path.isabs(origin):
        return False
    return not origin.startswith((_STDLIB, *_OF_DTRAIN)) and not any(part in origin for part in _INSTALLED)


def _has_parts_of(name: str, own: set[str]) -> bool:
    """Return whether a module holds functions or classes of the user's, which it would lack if imported early."""
    for value in [*getattr(sys.modules[name], "__dict__", {}).values()]:
        kind = type(value)  # isinstance() asks the object, and some then warn of deprecation
        part = value.__module__ if kind is types.FunctionType else vars(value).get("__module__") if kind is type else ""
        if type(part) is str and part in own:
            return True
    return False


def process_state() -> list[str]:
    """Describe process-wide settings, besides variables, that a script may change and an import may act on."""
    warnings, logging, context, torch = _loaded("warnings", "logging", "multiprocessing.context", "torch")
    root = None if logging is None else logging.root
    return [
        os.getcwd(),
        str(sys.gettrace() is None and sys.getprofile() is None),
        f"{_finders()} {len(sys.path_hooks)}",
        "" if warnings is None else repr(warnings.filters),
        "30 [] 0" if root is None else f"{root.level} {[*map(type, root.handlers)]} {root.manager.disable}",
        "None" if context is None else str(context._default_context.get_start_method(allow_none=True)),
        "torch.float32" if torch is None else str(torch.get_default_dtype()),
    ]


def random_states() -> dict[str, object]:
    """Return the states of the process-wide random number generators."""
    random, numpy, torch = _loaded("random", "numpy.random", "torch")
    found: dict[str, object] = {}
    if random is not None:
        found["random"] = random.getstate()
    if numpy is not None:
        state = numpy.get_state(legacy=False)["state"].values()
        found["numpy"] = [part.tobytes() if hasattr(part, "tobytes") else part for part in state]
    if torch is not None:
        found["torch"] = torch.get_rng_state().tolist()
    return found


def _finders() -> list[str]:
    names = (getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path)
    return [name for name in names if name != "_Imports"]  # of bootstrap.py


class Record:
    """Records of the first workers: imports in order, each as `(module, variables, process_state, drawn)`.

    `drawn` are the kinds of random numbers whose state had changed since the worker's start, or did not exist then.
    `constants` are the strings in the user's code: variables are set early to nothing else. `differing` are variables
    that the workers set differently.
    """

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        first, *others = records
        self.imports: list[tuple[str, dict[str, str | None], list[str], list[str]]] = [
            (name, variables, state, drawn)
            for name, variables, state, drawn in first["imports"]
            if not _is_own(first["modules"].get(name))
        ]
        self.modules: dict[str, str | None] = first["modules"]
        self.constants = {text for path in first["own"] for text in _constants(path)}
        self.differing = {
            name for other in others for name, _ in first["variables"].items() ^ other["variables"].items()
        }

    def why_not_alike(self, before: set[str]) -> str:
        """Return a reason if a module imported since then differs from the worker's; empty if none does."""
        modules: dict[str, Any] = sys.modules  # None marks a module that must not be imported
        for name, module in [*modules.items()]:
            if name in before or module is None or module is sys.modules["__main__"]:  # also `__mp_main__`
                continue
            origin = origin_of(module)
            if _is_own(origin):
                return f"{name} is not installed"
            if name not in self.modules or self.modules[name] != origin:
                return f"{name} is not what the script has imported"
        return ""


def read_records(paths: Sequence[str]) -> Record:
    """Read the records of a host's first workers. Raises OSError, ValueError."""
    import json

    records = []
    for path in paths:
        with open(path, encoding="ascii") as file:
            records.append(json.load(file))
    return Record(records)


def _constants(path: str) -> Iterator[str]:
    import ast

    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):  # an extension, or a file that was removed
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
