"""The launcher never imports torch or ddp in its own processes, ddp never the launcher; and each only downwards."""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from testbed.processes import run_program

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "numpy", "ddp"}
# What an agent could do without: it starts on every host and lives as long as the run.
FAT = {"asyncio", "click", "http", "multiprocessing", "paramiko", "psutil", "pynvml", "rich", "ssl", "unittest"}
LAUNCHER = sorted((ROOT / "launcher").rglob("*.py"))
DDP = sorted((ROOT / "ddp").rglob("*.py"))
STORE = "store_process.py"  # runs in a process of its own


def _imports(file: Path) -> Iterator[str]:
    """Yield every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield node.module or ""
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


def _packages(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in _imports(file)}


def test_the_launcher_never_names_torch_or_ddp_but_in_the_store() -> None:
    named = {file.name: _packages(file) & HEAVY for file in LAUNCHER}
    assert {name: found for name, found in named.items() if found} == {STORE: {"torch"}}


def test_ddp_never_names_the_launcher() -> None:
    assert [file.name for file in DDP if "launcher" in _packages(file)] == []


# Top down: each imports only what stands behind it.
ORDER = (
    "cli", "check", "controller", "transport", "agent", "output", "job", "placement", "hosts", "machine",
    "protocol", "decode", "errors",
)  # fmt: skip


def _launcher_modules() -> dict[str, set[str]]:
    """Return what each module of the launcher imports of the launcher, wherever in it and for whatever purpose."""
    names = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in LAUNCHER}
    names = {file: name.removesuffix(".__init__") for file, name in names.items()}
    modules = {name: set(_imports(file)) | set(_members(file)) for file, name in names.items()}
    return {name: {one for one in imported if one in modules and one != name} for name, imported in modules.items()}


def _members(file: Path) -> Iterator[str]:
    """Yield every `a.b` of `from a import b`, which may be a module."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_each_package_of_the_launcher_imports_only_what_stands_below_it() -> None:
    def height(module: str) -> int:
        parts = module.split(".")
        return -ORDER.index(parts[1]) if len(parts) > 1 and parts[1] in ORDER else -len(ORDER)

    modules = _launcher_modules()
    assert {module.split(".")[1] for module in modules if "." in module} == {*ORDER, "__main__"}
    upwards = {(name, one) for name, imported in modules.items() for one in imported if height(one) > height(name)}
    assert upwards - {("launcher.__main__", "launcher.cli.main")} == set()


def test_no_files_of_the_launcher_import_each_other_in_a_circle() -> None:
    modules = _launcher_modules()
    reached = {}
    for start in modules:
        reached[start], ahead = set[str](), [start]
        while ahead:
            new = modules[ahead.pop()] - reached[start]
            reached[start] |= new
            ahead += new
    circles = {frozenset(one for one in reached[name] if name in reached[one]) for name in modules}
    assert circles - {frozenset()} == set()


def test_nothing_of_the_launcher_imports_the_store() -> None:
    assert [file.name for file in LAUNCHER if "launcher.agent.store_process" in set(_imports(file))] == []


def _loaded(statement: str) -> set[str]:
    """Return the modules in a fresh interpreter after a statement, submodules too, without what it starts with."""
    code = f"import sys; before = set(sys.modules); {statement}; import json; print(json.dumps([*sys.modules]))"
    result = run_program(sys.executable, "-c", code, cwd=Path("/"))
    assert (result.returncode, result.stderr) == (0, "")
    return set(json.loads(result.stdout))


def test_importing_the_launcher_loads_no_torch() -> None:
    files = [file for file in LAUNCHER if file.stem not in ("__init__", "__main__", "bootstrap")]  # the last two run
    modules = ", ".join(".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files)
    assert "launcher.agent.main" in modules
    assert not _loaded(f"import {modules}") & HEAVY


def test_the_agent_s_imports_are_lean() -> None:
    assert not _loaded("import launcher.agent.main") & FAT


def test_a_worker_s_first_code_imports_nothing_of_the_launcher() -> None:
    assert not any(name.startswith("launcher") for name in _imports(ROOT / "launcher/agent/bootstrap.py"))


def test_the_command_line_and_the_controller_are_quick_to_load() -> None:
    # paramiko takes 0.2 s, rich 0.1 s: they are imported where a run needs them.
    loaded = _loaded("import launcher.cli.main, launcher.controller.controller")
    assert not loaded & {"asyncio", "paramiko", "psutil", "pynvml", "rich.table", "cryptography"}


def test_importing_ddp_loads_nothing_of_the_launcher() -> None:
    assert not {name for name in _loaded("import ddp") if name.partition(".")[0] == "launcher"}
