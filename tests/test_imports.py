"""The launcher never imports torch or ddp in its own processes, ddp never the launcher; and each only downwards."""

import functools
import json
import os
import sys
from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from testbed.imports import ROOT, graph, imports, modules, upward
from testbed.processes import run_program

HEAVY = {"torch", "numpy", "ddp"}
# What an agent could do without: it starts on every host and lives as long as the run.
FAT = {
    "asyncio",
    "click",
    "dataclasses",
    "http",
    "inspect",
    "multiprocessing",
    "paramiko",
    "psutil",
    "pynvml",
    "rich",
    "ssl",
    "unittest",
}
# What each half imports of others, and may not import.
ALONE = {
    "launcher": ({"click", "cryptography", "paramiko", "psutil", "rich"}, HEAVY),
    "ddp": ({"numpy", "torch", "zmq"}, {"launcher"}),
}
LAUNCHER, DDP = modules("launcher"), modules("ddp")
STORE = "launcher.agent.store_process"  # runs in a process of its own
FORK_SERVER = "launcher.agent.workers.fork_server"
ONE_STRATEGY = "import ddp; ddp.strategy('all_reduce')"
# Top down: each imports only what stands behind it. Packages inside of a package have lines of their own.
ORDERS = {
    "launcher": [
        "__main__", "functions", "cli", "check", "runs", "controller", "transport", "sync", "agent", "output",
        "timeline", "job", "placement", "hangs", "hosts", "machine", "protocol", "decode", "frozen", "errors",
    ],
    "ddp": [
        "training", "callbacks", "strategies.parameter_server",
        "strategies.central_storage", "strategies.sharding", "strategies.local_sgd", "strategies.tpu", "strategies",
        "resilience", "horovod", "verification", "checkpoint", "data_parallel",
        "data_parallel.planning", "data_parallel.buckets", "compression", "data", "comm", "monitoring", "world",
        "group_store", "device_choice", "comm.shm", "comm.shared_memory", "comm.combine", "generation",
        "monitoring.device_watch", "monitoring.user_code", "monitoring.stall_text", "monitoring.progress",
        "monitoring.debuggers", "monitoring.timeline", "environment", "rng", "torch_internals",
        "monitoring.interrupts", "errors",
    ],
}  # fmt: skip
LAUNCH = "launcher.functions.launch"  # the top of the launcher imports it when it is first used


def _packages(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(file)}


def test_the_launcher_never_names_torch_or_ddp_but_in_one_process() -> None:
    named = {name: _packages(file) & HEAVY for name, file in LAUNCHER.items()}
    assert {name: found for name, found in named.items() if found} == {STORE: {"torch"}}


def test_ddp_never_names_the_launcher() -> None:
    assert [name for name, file in DDP.items() if "launcher" in _packages(file)] == []


@pytest.mark.parametrize("package", ORDERS)
def test_each_package_imports_only_what_stands_below_it(package: str) -> None:
    known = {entry.partition(".")[0] for entry in ORDERS[package]}
    assert {name.split(".")[1] for name in modules(package) if "." in name} == known
    found = {name: imported for name, imported in graph(package).items() if name != package}
    assert upward(found, ORDERS[package]) == []


@pytest.mark.parametrize("package", ORDERS)
def test_no_files_import_each_other_in_a_circle(package: str) -> None:
    found = graph(package)
    found[package] -= {LAUNCH}
    tuple(TopologicalSorter(found).static_order())  # raises CycleError with the circle


@pytest.mark.parametrize("program", [STORE, FORK_SERVER])
def test_nothing_of_the_launcher_imports_these_programs(program: str) -> None:
    assert [name for name, imported in graph("launcher").items() if program in imported] == []


@functools.cache
def _loaded(statement: str) -> set[str]:
    """Return the modules in a fresh interpreter after a statement, submodules too, without what it starts with."""
    code = f"import sys; before = set(sys.modules); {statement}; import json; print(json.dumps([*sys.modules]))"
    result = run_program(sys.executable, "-c", code, cwd=Path("/"))
    assert (result.returncode, result.stderr) == (0, "")
    return set(json.loads(result.stdout))


def _imported_alone(names: Sequence[str], ahead: set[str], without: set[str], *folders: Path) -> str:
    """Import each module as the first of ours in a process; return what failed, and their number."""
    argv = ["-m", "testbed.imported_alone", ",".join(ahead), ",".join(without)]
    path = os.pathsep.join(map(str, (*folders, ROOT, ROOT / "tests")))
    result = run_program(
        sys.executable, *argv, env={"PYTHONPATH": path}, cwd=Path("/"), stdin="\n".join(names), timeout=250
    )
    assert result.returncode == 0, result
    return result.stdout


@pytest.mark.parametrize("package", ALONE)
def test_each_module_can_be_imported_first(package: str) -> None:
    names = [name for name in modules(package) if not name.endswith("__main__")]  # which would run
    assert len(names) > 150
    assert _imported_alone(names, *ALONE[package]) == f"{len(names)} modules\n"


@pytest.mark.control
def test_a_module_that_only_works_behind_another_is_found(tmp_path: Path) -> None:
    planted = {
        "planted": "",
        "planted.first": "",
        "planted.heavy": "import wave",
        "planted.inner": "from planted import first",
        "planted.inner.fine": "import planted\nplanted.first",  # its package has imported it
        "planted.second": "import planted\nplanted.first",
        "planted.third": "import planted.second",
    }
    for name, text in planted.items():
        is_package = any(other.startswith(f"{name}.") for other in planted)
        file = tmp_path.joinpath(*name.split("."), *["__init__"] * is_package).with_suffix(".py")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    why = "AttributeError: module 'planted' has no attribute 'first'"
    found = ["planted.heavy: loads wave", f"planted.second: {why}", f"planted.third: {why}", "7 modules"]
    assert _imported_alone([*planted], set(), {"wave"}, tmp_path).splitlines() == found


def test_the_agent_s_imports_are_lean() -> None:
    assert not _loaded("import launcher.agent.main, launcher.machine.oom") & FAT  # the latter with the first worker


def test_a_worker_s_first_code_imports_nothing_of_the_launcher() -> None:
    assert not any(name.startswith("launcher") for name in imports(ROOT / "launcher/agent/workers/bootstrap.py"))


def test_the_command_line_and_the_controller_are_quick_to_load() -> None:
    # paramiko takes 0.2 s, rich 0.1 s: they are imported where a run needs them.
    loaded = _loaded("import launcher.cli.main, launcher.controller.controller")
    assert not loaded & {"asyncio", "paramiko", "psutil", "pynvml", "rich.table", "cryptography"}


def test_the_launcher_imports_launch_when_it_is_first_used() -> None:
    assert [name for name in _loaded("import launcher") if name.startswith("launcher")] == ["launcher"]
    assert LAUNCH in _loaded("import launcher; launcher.launch")
    assert LAUNCH not in _loaded("import launcher; launcher.step()")


def test_importing_ddp_loads_nothing_of_the_launcher() -> None:
    assert not {name for name in _loaded(ONE_STRATEGY) if name.partition(".")[0] == "launcher"}


def test_torch_xla_is_loaded_only_for_the_tpu_strategy() -> None:
    assert [name for name, file in DDP.items() if "torch_xla" in _packages(file)] == ["ddp.strategies.tpu.mesh"]
    loaded = _loaded(ONE_STRATEGY)
    assert "ddp.strategies.all_reduce" in loaded
    assert not {name for name in loaded if "torch_xla" in name or "strategies.tpu" in name}


def test_the_names_at_the_top_of_ddp_are_few() -> None:
    import types

    import ddp

    names = [
        "Checkpoint", "DistributedDataParallel", "DistributedSampler", "LocalSGD", "State", "StepLoader", "Trainer",
        "World", "callbacks", "check_replicas", "compression", "errors", "gather_metrics", "gather_samples", "horovod",
        "init", "ledger", "make_compression", "resilient", "strategy", "verify",
    ]  # fmt: skip
    assert ddp.__all__ == names
    others = {name for name, value in vars(ddp).items() if not isinstance(value, types.ModuleType) and name[0] != "_"}
    assert others <= {*names}
