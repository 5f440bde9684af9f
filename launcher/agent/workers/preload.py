"""Finds the installed packages that a script imports before it does anything else, by reading its source.

The script is not executed. Its top-level statements are read in order, and those of the user's own modules at the
place where they are imported. Reading ends at the first statement that could have an effect, such as a call: later
imports may depend on it. Calls of a few read-only functions, such as `time.time()`, have none. A variable that is set
to a constant is recorded: the imports after it must find it set.
"""

from __future__ import annotations

import ast
import dis
import importlib.machinery
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence

# They start threads, open connections or read the worker's rank when imported.
NEVER = {
    "cupy", "deepspeed", "grpc", "horovod", "jax", "jaxlib", "keras", "lightning", "lightning_fabric",
    "lightning_utilities", "mpi4py", "pycuda", "pyspark", "pytorch_lightning", "ray", "tensorflow", "torch_xla",
    "torchmetrics",
}  # fmt: skip
_ON_TORCH = NEVER & {"deepspeed", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics"}
_INSTALLED = ("/site-packages/", "/dist-packages/")  # pip's and Debian's, in any place
NAMES_TORCH = re.compile(rb"TORCH(?!ELASTIC_)")  # those are the launcher's own; torch does not read them when imported
_EFFECTS = ("CALL", "BINARY_SUBSCR", "STORE_SUBSCR", "STORE_ATTR", "FOR_ITER", "YIELD", "POP_JUMP")  # bytecode
# Calls without effects: prefixes of dotted names, and functions.
_LOOKS = ("time.", "datetime.", "math.", "os.path.", "os.environ.get", "os.getenv", "os.getpid", "logging.getLogger")
_CONVERTS = {"bool", "float", "int", "len", "max", "min", "str"}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)


class Found:
    """Imports to make: `(module, names)` in order, as in `import module` or `from module import names`.

    `variables` are set to constants: number of imports before it, name, value, and whether it replaces another value.
    """

    def __init__(self) -> None:
        self.imports: list[tuple[str, tuple[str, ...]]] = []
        self.variables: list[tuple[int, str, str, bool]] = []
        self.left_out: list[str] = []  # packages that each worker must import by itself
        self.uses_optimizer = False
        self.sets_torch = False  # it names variables of torch, so it may change them before torch reads them

    @property
    def steps(self) -> tuple[object, ...]:
        """All steps, to compare them with those of another script."""
        return self.imports, self.variables, self.imports_dynamo

    @property
    def imports_dynamo(self) -> bool:
        """Return whether it will import torch._dynamo, which may be imported early."""
        return self.uses_optimizer and not self.sets_torch


class _EffectError(Exception):
    """A statement could have an effect: nothing after it is read."""


def find_preloads(kind: str, target: str, own_root: str) -> Found:
    """Read a script, or the module that `python -m` would run, from the working directory.

    For a function, `target` are the modules that it uses, separated by commas.

    `own_root` is the folder of dtrain's own packages, which count as installed in any place.
    """
    found = Found()
    reader = _Reader(found, folder_of(kind, target), own_root)
    try:
        if kind == "function":
            reader.import_all(target.split(","))
        elif kind == "script":
            reader.read(target, package="")
        else:
            reader.read_module(target)
            reader.read_module(f"{target}.__main__")
    except _EffectError:
        return found
    return found


def folder_of(kind: str, target: str) -> list[str]:
    """Return the first folder in sys.path when the script runs; none with PYTHONSAFEPATH.

    A function has none either: its folders are in PYTHONPATH.
    """
    if kind == "function" or getattr(sys.flags, "safe_path", False):
        return []
    return [os.path.dirname(os.path.realpath(target)) if kind == "script" else os.getcwd()]


def imports_of_code(code: types.CodeType) -> Iterator[str]:
    """Yield the modules that a function imports before it does anything else."""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            yield step.argval
        elif step.opname.startswith(_EFFECTS):
            return


def find_hidden(folder: Sequence[str]) -> str:
    """Return the name of an imported module that the script would import from elsewhere; empty if there is none.

    `folder` is the result of `folder_of`.
    """
    inside = {name.partition(".")[0] for path in folder for name in os.listdir(path)}
    for name in sorted(inside & sys.modules.keys() - {"__main__"}):
        spec, known = _find(name, [*folder]), getattr(sys.modules[name], "__spec__", None)
        if spec is not None and spec.origin is not None and spec.origin != getattr(known, "origin", None):
            return name
    return ""


class _Reader:
    def __init__(self, found: Found, folder: list[str], own_root: str) -> None:
        self._found = found
        self._folder = folder  # searched first, for the script's own modules
        paths = (sysconfig.get_path(name) for name in ("purelib", "platlib"))
        installed = [os.path.realpath(path) for path in (*paths, os.path.join(own_root, "ddp"))]
        self._installed = tuple(path + os.sep for path in installed)
        self._seen: set[str] = set()

    def read(self, path: str, package: str) -> None:
        """Read one file of the user's. Raises _EffectError at a statement after which nothing is read."""
        full = os.path.realpath(path)
        if full in self._seen:
            return
        self._seen.add(full)
        try:
            with open(full, "rb") as file:
                source = file.read()
            tree = ast.parse(source, full)
        except (OSError, SyntaxError, ValueError, RecursionError):
            raise _EffectError from None
        self._found.uses_optimizer |= b"optim" in source
        self._found.sets_torch |= NAMES_TORCH.search(source) is not None
        for statement in tree.body:
            self._read_statement(statement, package)

    def _read_statement(self, statement: ast.stmt, package: str) -> None:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                self._import(alias.name, ())
        elif isinstance(statement, ast.ImportFrom):
            self._import(_absolute(statement, package), tuple(alias.name for alias in statement.names))
        elif variable := _set_variable(statement):
            self._found.variables.append((len(self._found.imports), *variable))
        elif not _is_harmless(statement):
            raise _EffectError

    def read_module(self, name: str) -> bool:
        """Read a user's module, its packages first. Do not read an installed one: return False."""
        parts = name.split(".")
        path: list[str] | None = None
        for count in range(1, len(parts) + 1):
            spec = _find(parts[count - 1], [*self._folder, *sys.path] if count == 1 else path)
            if spec is None:
                raise _EffectError  # an import hook may find it, or the script will fail
            if spec.origin is None:
                return True  # a namespace package: there is no file to read or to import
            if self._is_installed(spec.origin):
                return False
            package = ".".join(parts[:count] if spec.submodule_search_locations is not None else parts[: count - 1])
            self.read(spec.origin, package)
            path = list(spec.submodule_search_locations or ())
            if not path:
                break
        return True

    def import_all(self, modules: Sequence[str]) -> None:
        for module in modules:
            self._import(module, ())

    def _is_installed(self, origin: str) -> bool:
        path = os.path.realpath(origin)
        return path.startswith(self._installed) or any(part in path for part in _INSTALLED)

    def _import(self, module: str, names: tuple[str, ...]) -> None:
        top = module.partition(".")[0]
        if top in NEVER:
            self._found.left_out.append(top)
        if top in _ON_TORCH and not self.read_module(top):  # torch is thus imported once for all workers
            self._found.imports.append(("torch", ()))
        if top in sys.stdlib_module_names or top in NEVER:
            return
        if not self.read_module(module):
            self._found.imports.append((module, names))
            return
        for name in names:  # some of them may be modules
            spec = _find(name, self._locations(module))
            if spec is not None and spec.origin is not None:
                self.read(spec.origin, module)

    def _locations(self, module: str) -> list[str]:
        path = [*self._folder, *sys.path]
        for part in module.split("."):
            spec = _find(part, path)
            path = list(spec.submodule_search_locations or ()) if spec is not None else []
        return path


def _find(name: str, path: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.machinery.PathFinder.find_spec(name, path)
    except (ImportError, ValueError):
        return None


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    parts = package.split(".")
    if not package or statement.level > len(parts):
        raise _EffectError  # it will fail
    base = ".".join(parts[: len(parts) - statement.level + 1])
    return f"{base}.{statement.module}" if statement.module else base


def _set_variable(statement: ast.stmt) -> tuple[str, str, bool] | None:
    """Return name and value of a variable that a statement sets to a constant, and whether it replaces a value."""
    match statement:
        case ast.Assign(targets=[ast.Subscript(value=where, slice=ast.Constant(value=str(name)))], value=value):
            replaces = True
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=where, attr="setdefault"),
                args=[ast.Constant(value=str(name)), value],
                keywords=[],
            )
        ):
            replaces = False
        case _:
            return None
    if _dotted(where) == "os.environ" and isinstance(value, ast.Constant) and isinstance(value.value, str):
        return name, value.value, replaces
    return None


def _dotted(value: ast.expr) -> str:
    """Return `a.b.c` for a name with attributes, else an empty string."""
    if isinstance(value, ast.Attribute):
        return f"{before}.{value.attr}" if (before := _dotted(value.value)) else ""
    return value.id if isinstance(value, ast.Name) else ""


def _is_harmless(statement: ast.stmt) -> bool:
    """Return whether no import after this statement can depend on it."""
    if isinstance(statement, _DEFINITIONS) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    ):
        return True
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return all(isinstance(target, ast.Name) for target in targets) and not _calls(statement.value)
    if isinstance(statement, ast.If):
        return not _calls(statement.test) and all(map(_is_optional, (*statement.body, *statement.orelse)))
    if isinstance(statement, ast.Try):
        handled = (inner for handler in statement.handlers for inner in handler.body)
        return all(map(_is_optional, (*statement.body, *handled, *statement.orelse, *statement.finalbody)))
    return False


def _is_optional(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Import | ast.ImportFrom) or _is_harmless(statement)


def _calls(value: ast.expr | None) -> bool:
    return value is not None and any(_nodes_with_effects(value))


def _nodes_with_effects(value: ast.expr) -> Iterator[ast.AST]:
    effects = (ast.Call, ast.Await, ast.NamedExpr, ast.Subscript, ast.Yield, ast.YieldFrom)
    return (node for node in ast.walk(value) if isinstance(node, effects) and not _only_looks(node))


def _only_looks(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript):
        return _dotted(node.value) == "os.environ"
    name = _dotted(node.func) if isinstance(node, ast.Call) else ""
    return name.startswith(_LOOKS) or name in _CONVERTS
