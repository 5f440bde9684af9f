"""ddp's modules import one another in one direction: no circles, and no package imports what stands above it."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Top down. Packages inside of a package count by themselves where they have a line of their own.
ORDER = [
    "training",
    "callbacks",
    "strategies.parameter_server",
    "strategies.parameter_server.transport",
    "strategies.central_storage",
    "strategies.sharding",
    "strategies.local_sgd",
    "strategies",
    "horovod",
    "verification",
    "checkpoint",
    "data_parallel",
    "data_parallel.buckets",
    "compression",
    "data",
    "comm",
    "monitoring",
    "world",
    "environment",
    "torch_internals",
    "errors",
]


def _module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_module(file): file for file in (ROOT / "ddp").rglob("*.py")}


def _imports(file: Path) -> Iterator[str]:
    """Yield what a file imports, wherever in it: inside of functions, and for type checkers only."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module or "" for name in names)


GRAPH = {name: {other for other in _imports(file) if other in MODULES} for name, file in MODULES.items()}


def _level(module: str) -> int:
    """Return the place in ORDER of the longest entry that the module is in."""
    name = module.removeprefix("ddp.")
    return ORDER.index(max((entry for entry in ORDER if f"{name}.".startswith(f"{entry}.")), key=len))


def test_no_files_import_each_other() -> None:
    tuple(TopologicalSorter(GRAPH).static_order())  # raises CycleError with the circle


def test_no_package_imports_one_above_it() -> None:
    upward = [
        f"{module} imports {other}"
        for module, others in GRAPH.items()
        if module != "ddp"
        for other in others
        if _level(other) < _level(module)
    ]
    assert upward == []


def test_nothing_imports_the_launcher() -> None:
    assert [name for name, file in MODULES.items() if any(i.split(".")[0] == "launcher" for i in _imports(file))] == []


def test_the_names_at_the_top_are_few() -> None:
    import types

    import ddp

    names = [
        "Checkpoint", "DistributedDataParallel", "DistributedSampler", "LocalSGD", "Trainer", "World", "callbacks",
        "compression", "errors", "gather_metrics", "gather_samples", "horovod", "init", "make_compression", "strategy",
        "verify",
    ]  # fmt: skip
    assert ddp.__all__ == names
    others = {name for name, value in vars(ddp).items() if not isinstance(value, types.ModuleType) and name[0] != "_"}
    assert others <= {*names}
