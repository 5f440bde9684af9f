"""Packages that read variables when they are imported: each worker has of them what a start by exec would give it."""

from __future__ import annotations

import re
import zipapp
from pathlib import Path

import pytest
from testbed.fork_server import loaded, prepare_for
from testbed.processes import run_dtrain

from launcher.agent.warm.kept import describe
from launcher.protocol.commands import StartWorker

IMPORTS = "import os, re, subprocess\n"
FORKED = "were forked from processes that had imported their packages"
# As packages do that have settings in variables: tqdm, fsspec, and others like them.
HARMLESS = {
    "prefix": "seen = sorted((k, v) for k, v in os.environ.items() if k.startswith('SETTING_'))",
    "lookup": "seen = sorted((k, os.environ[k]) for k in os.environ if k.startswith('SETTING_'))",
    "listed": "seen = sorted((k, os.environ[k]) for k in list(os.environ) if k.startswith(('SETTING_', 'OTHER_')))",
    "any": "seen = any(k.startswith('MISSING_') for k in os.environ.keys())",
    "equal": "seen = [v for k, v in os.environ.items() if k == 'SETTING_A' or 'SETTING_B' == k]",
    "copy": "seen = (lambda all: [all[k] for k in all if k.startswith('SETTING_')])(dict(os.environ))",
    "copy lookup": "seen = (lambda all: (all.get('SETTING_A'), 'SETTING_B' in all))(os.environ.copy())",
    "bytes": "seen = [v for k, v in os.environb.items() if k.startswith(b'SETTING_')]",
    "swallows": "try:\n    seen = [k for k in os.environ if k.startswith('SETTING_')]\nexcept Exception:\n    seen = 0",
}
# What was read differs between the workers, or they would look for it later.
HARMFUL = {
    "name": ("seen = os.environ.get('RANK')", "reads RANK"),
    "member": ("seen = 'LOCAL_RANK' in os.environ", "reads LOCAL_RANK"),
    "bytes name": ("seen = os.environb.get(b'RANK')", "reads RANK"),
    "swallows": ("try:\n    seen = os.environ['RANK']\nexcept Exception:\n    seen = 0", "reads RANK"),
    "swallows all": ("try:\n    seen = os.environ['RANK']\nexcept:\n    seen = 0", "reads RANK"),
    "prefix": ("seen = [(k, v) for k, v in os.environ.items() if k.startswith('LOCAL_')]", "reads all variables"),
    "equal": ("seen = [v for k, v in os.environ.items() if k == 'RANK']", "reads all variables"),
    "snapshot": ("seen = dict(os.environ)", "keeps all variables"),
    "kept names": ("seen = list(os.environ)", "keeps all variables"),
    "kept values": ("seen = [*os.environ.values()]", "keeps all variables"),
    "kept in a cycle": ("class C: pass\nseen = C()\nseen.me, seen.all = seen, {**os.environ}", "keeps all variables"),
    "copy lookup": ("seen = (lambda all: all.get('RANK'))(dict(os.environ))", "reads all variables"),
    "number": ("seen = [int(v) for k, v in os.environ.items()]", "reads all variables"),
    "copy member": ("seen = (lambda all: 'RANK' in all)(set(os.environ))", "reads all variables"),
    "first": ("seen = next(iter(os.environ))", "reads all variables"),
    "values": ("seen = [v for v in os.environ.values() if v.startswith('1')]", "reads all variables"),
    "text": ("seen = ' '.join(f'{k}={v}' for k, v in os.environ.items())", "reads all variables"),
    "joined": ("seen = ' '.join(os.environ.values())", "settings cannot be imported (TypeError)"),
    "broken off": (
        "try:\n    [re.match('A', k) for k in os.environ.values()]\nexcept TypeError: pass",
        "reads all variables",
    ),
    "repr": ("seen = repr(os.environ)", "reads all variables"),
    "expression": ("seen = [k for k in os.environ if k.upper() == 'SETTING_A']", "reads all variables"),
    "child": ("subprocess.run(['true'], env=os.environ.copy())", "reads all variables"),
}


WHY_NOT = {
    "only the standard library": ("import json", "the script imports only the standard library"),
    "variables first": ("import os; os.environ.update(A='b'); import numpy", "no installed package before it does"),
    "own module first": ("import mine; import numpy", "no installed package before it does anything"),
    "missing module": ("import nowhere, numpy", "no installed package before it does anything"),
    "left out": ("import keras", "keras is left to each worker: it starts threads, connects to something or"),
}
# Packages that make a fork unsafe.
UNSAFE = {
    "threaded": (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "the imports left 1 threads running (",
    ),
    "connected": ("import socket; kept = socket.socketpair()", "the imports left socket:"),
    "parent": ("import subprocess; kept = subprocess.Popen(['sleep', '5'])", "the imports left a process running"),
    "broken": ("raise ValueError('broken')", "settings cannot be imported (ValueError)"),
    "reads to seed": ("import os, random; random.seed(os.environ['LOCAL_RANK'])", "reads LOCAL_RANK when"),
    "leaving": ("raise SystemExit(3)", "settings cannot be imported (SystemExit)"),
    "killing": ("import os; os.kill(os.getpid(), 9)", "its process has ended"),
}


def why_not(folder: Path, script: str = "import settings") -> tuple[str, float]:
    """Return why a script cannot be forked, and what that costs."""
    (folder / "script.py").write_text(script)
    with loaded(prepare_for(folder)) as server:
        return server.why_not, server.costs_s


@pytest.mark.parametrize(("script", "reason"), WHY_NOT.values(), ids=[*WHY_NOT])
def test_what_a_script_does_first_decides(tmp_path: Path, script: str, reason: str) -> None:
    (tmp_path / "mine.py").write_text("print('imported')")
    assert reason in why_not(tmp_path, script)[0]


def test_what_is_no_script_is_not_forked(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app/__main__.py").write_text("import numpy\nprint('ran')")
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    for prepare, reason in (
        (prepare_for(tmp_path, start_method="exec"), "--start-method is exec"),
        (prepare_for(tmp_path, behind="env"), "--launch-prefix is set"),
        (prepare_for(tmp_path, "app"), "the script is no plain file"),
        (prepare_for(tmp_path, "app.pyz"), "the script cannot be read as Python"),
        (prepare_for(tmp_path, "cProfile", through="module"), "no installed package before it does anything"),
    ):
        with loaded(prepare) as server:
            assert reason in server.why_not
    (tmp_path / "script.py").write_text("import settings")
    with loaded(prepare_for(tmp_path)) as server:
        program = StartWorker(0, 0, "", ["true"], {}, {})
        assert server.why_not_for(program, {}, ()) == "it is no Python script"
        server.why_not, bound = "", StartWorker(0, 0, "script", ["script.py"], {}, {})
        assert server.why_not_for(bound, {}, (0,)).startswith("--numa-binding is set")


@pytest.mark.parametrize(("source", "reason"), UNSAFE.values(), ids=[*UNSAFE])
def test_a_package_that_makes_a_fork_unsafe(installed: Path, tmp_path: Path, source: str, reason: str) -> None:
    (installed / "settings.py").write_text(source)
    assert reason in why_not(tmp_path)[0]


@pytest.mark.parametrize("source", HARMLESS.values(), ids=[*HARMLESS])
def test_variables_that_all_workers_share_may_be_read(installed: Path, tmp_path: Path, source: str) -> None:
    (installed / "settings.py").write_text(IMPORTS + source)
    assert why_not(tmp_path) == ("", 0.0)


@pytest.mark.parametrize(("source", "reason"), HARMFUL.values(), ids=[*HARMFUL])
def test_who_reads_a_variable_of_one_worker_is_named(installed: Path, tmp_path: Path, source: str, reason: str) -> None:
    (installed / "heavy.py").write_text("import settings")
    (installed / "settings.py").write_text(IMPORTS + source)
    said, costs_s = why_not(tmp_path)
    line = source.count("\n", 0, max(source.find("os.environ"), 0)) + 2
    assert reason in said
    assert "cannot be imported" in said or f"(settings.py:{line})" in said
    assert costs_s > 0


def test_a_forked_worker_finds_the_same_settings(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, source in HARMLESS.items():
        (installed / f"settings_{name.replace(' ', '_')}.py").write_text(IMPORTS + source)
    modules = sorted(path.stem for path in installed.glob("settings_*.py"))
    text = "".join(f"import {module}\n" for module in modules)
    text += f"import os\nprint('seen', os.environ['RANK'], *({'.seen, '.join(modules)}.seen))\n"
    (tmp_path / "script.py").write_text(text)
    monkeypatch.setenv("SETTING_B", "2")
    monkeypatch.setenv("SETTING_A", "1")
    options = ("--nproc-per-node", "2", "--env-for", "mpi,deepspeed,horovod", "script.py")
    runs = [run_dtrain("run", "-v", "--start-method", method, *options, cwd=tmp_path) for method in ("fork", "exec")]
    forked, started = (sorted(re.findall("seen .*", run.stdout)) for run in runs)
    assert FORKED in runs[0].stderr, runs[0]
    assert forked == started
    assert len(forked) == 2
    assert "('SETTING_A', '1')" in forked[0]


def test_a_worker_with_such_a_variable_is_started_by_exec(installed: Path, tmp_path: Path) -> None:
    (installed / "settings.py").write_text(
        IMPORTS + "seen = [v for k, v in os.environ.items() if k.startswith('OMPI_')]"
    )
    (tmp_path / "script.py").write_text("import settings\nprint('seen', settings.seen)")
    alone = run_dtrain("run", "-v", "script.py", cwd=tmp_path)
    assert "1 worker was forked" in alone.stderr, alone
    assert "seen []" in alone.stdout
    known = run_dtrain("run", "--env-for", "mpi", "script.py", cwd=tmp_path)
    assert re.search(r"seen \['1', '0', ", known.stdout), known


def test_the_package_and_its_cost_are_shown(installed: Path, tmp_path: Path) -> None:
    (installed / "heavy.py").write_text("import time\ntime.sleep(0.3)\nimport settings\ntime.sleep(5)")
    (installed / "settings.py").write_text(IMPORTS + "seen = dict(os.environ).get('RANK')")
    (tmp_path / "script.py").write_text("import heavy\nprint('seen', heavy.settings.seen)")
    result = run_dtrain("run", "--nproc-per-node", "2", "--start-timeout-s", "100", "script.py", cwd=tmp_path)
    assert len(re.findall("seen [01]$", result.stdout, re.MULTILINE)) == 2, result
    (line,) = (line for line in result.stderr.splitlines() if "started by exec" in line)
    said = r"settings reads all variables when it is imported \(settings.py:2\); "
    assert re.search(said + r"each such start takes at least \d+\.\d s longer$", line)


def test_so_is_a_package_that_is_left_to_each_worker(installed: Path, tmp_path: Path) -> None:
    (installed / "tensorflow").mkdir()
    (installed / "tensorflow" / "__init__.py").write_text("import time\ntime.sleep(0.3)\nimport tensorflow.core")
    (installed / "tensorflow" / "core.py").touch()
    (tmp_path / "script.py").write_text("import tensorflow")
    result = run_dtrain("run", "--nproc-per-node", "2", "script.py", cwd=tmp_path)
    (line,) = (line for line in result.stderr.splitlines() if "started by exec" in line)
    said = r"tensorflow is left to each worker: .*; each such start takes at least \d+\.\d s longer$"
    assert re.search(said, line), result


@pytest.mark.parametrize("package", ["prefix", "copy"])
def test_another_variable_matters_if_a_package_looked_for_it(
    installed: Path, tmp_path: Path, runtime: Path, package: str
) -> None:
    (installed / "settings.py").write_text(IMPORTS + HARMLESS[package])
    (tmp_path / "script.py").write_text("import settings\nprint('seen', settings.seen)")

    def run(**variables: str) -> tuple[str, bool]:
        options = ("--keep-warm", "5m", "-x", "OF_RUN", "script.py")
        result = run_dtrain("run", "-v", *options, cwd=tmp_path, env={"OF_RUN": "1", **variables}, outlived=True)
        assert "1 worker was forked" in result.stderr, result
        return re.findall("seen (.*)", result.stdout)[0], "since an earlier run" in result.stderr

    assert run() == ("[]", False)
    assert run(API_TOKEN="secret") == ("[]", package == "prefix")
    assert run(API_TOKEN="another") == ("[]", True)
    assert run(API_TOKEN="another", UNRELATED="1") == ("[]", package == "prefix")
    assert run(API_TOKEN="another", UNRELATED="1", SSH_CONNECTION="10.0.0.1 4711 10.0.0.2 22")[0] == "[]"
    assert run(API_TOKEN="another", UNRELATED="1", SSH_CONNECTION="10.0.0.1 4712 10.0.0.2 22") == ("[]", True)
    seen, was_warm = run(SETTING_A="7", API_TOKEN="another", UNRELATED="1", SSH_CONNECTION="10.0.0.1 4713 10.0.0.2 22")
    assert "'7'" in seen
    assert not was_warm
    assert run(SETTING_A="7", API_TOKEN="another", UNRELATED="1", SSH_CONNECTION="10.0.0.1 4714 10.0.0.2 22")[1]
    assert len(describe()) == 1
