"""What the modules of a package import, read from their sources."""

import ast
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def imports(file: Path) -> tuple[str, ...]:
    """Return what a file imports, wherever in it, inside of functions and for type checkers too: `a.b` of both
    `import a.b` and `from a import b`, whether or not that b is a module."""
    return (*_imports(file),)


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


def modules(package: str) -> dict[str, Path]:
    """Return the files of a package by the names of its modules."""
    files = sorted((ROOT / package).rglob("*.py"))
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def graph(package: str) -> dict[str, set[str]]:
    """Return which modules of a package each of them imports."""
    files = modules(package)
    found = {name: {i if i in files else i.rpartition(".")[0] for i in imports(file)} for name, file in files.items()}
    return {name: (imported & files.keys()) - {name} for name, imported in found.items()}


def upward(graph: Mapping[str, set[str]], order: Sequence[str]) -> list[str]:
    """Return the imports of what stands higher in `order`, which has packages and modules top down.

    The place of a module is that of the longest entry that it is in; what is in none, the package itself, is at the
    bottom.
    """

    def level(module: str) -> int:
        inner = module.partition(".")[2]
        places = [entry for entry in order if f"{inner}.".startswith(f"{entry}.")]
        return order.index(max(places, key=len)) if places else len(order)

    return [f"{name} imports {one}" for name, found in graph.items() for one in found if level(one) < level(name)]
