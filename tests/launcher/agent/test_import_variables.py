"""Packages that read variables when they are imported: each worker has of them what a start by exec would give it."""

from __future__ import annotations

import os
import re
import selectors
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.processes import run_dtrain, wait_until

from launcher.agent.cleanup.run_tag import RunTag
from launcher.agent.warm.kept import describe, stop
from launcher.agent.workers.warm_start import ForkServer, Warmth
from launcher.protocol.commands import Prepare

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


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules count as installed."""
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def why_not(folder: Path) -> tuple[str, float]:
    """Return why a script that imports settings cannot be forked, and what that costs."""
    (folder / "script.py").write_text("import settings")
    names = ["RANK", "LOCAL_RANK"]
    command = ("script", "script.py")
    prepare = Prepare("run", str(folder), "script.py", None, {}, 1.0, 1.0, [], 0, 1, [], *command, names=names)
    selector = selectors.DefaultSelector()
    server = ForkServer(RunTag.new(), selector, Warmth())
    server.prepare(prepare, 1)
    pid = server.pid
    assert pid is not None
    try:
        while server.is_loading:
            for chosen, _ in selector.select(60):
                chosen.data()
        return server.why_not, server.costs_s
    finally:
        server.kill()
        os.waitpid(pid, 0)


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


def test_a_forked_worker_finds_the_settings_that_a_started_one_does(
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


def test_a_worker_that_has_variables_which_a_package_looked_for_is_started_by_exec(
    installed: Path, tmp_path: Path
) -> None:
    (installed / "settings.py").write_text(
        IMPORTS + "seen = [v for k, v in os.environ.items() if k.startswith('OMPI_')]"
    )
    (tmp_path / "script.py").write_text("import settings\nprint('seen', settings.seen)")
    alone = run_dtrain("run", "-v", "script.py", cwd=tmp_path)
    assert "1 worker was forked" in alone.stderr, alone
    assert "seen []" in alone.stdout
    known = run_dtrain("run", "--env-for", "mpi", "script.py", cwd=tmp_path)
    assert re.search(r"seen \['1', '0', ", known.stdout), known


def test_each_user_sees_which_package_prevents_a_fork_and_what_that_costs(installed: Path, tmp_path: Path) -> None:
    (installed / "heavy.py").write_text("import time\ntime.sleep(0.3)\nimport settings\ntime.sleep(5)")
    (installed / "settings.py").write_text(IMPORTS + "seen = dict(os.environ).get('RANK')")
    (tmp_path / "script.py").write_text("import heavy\nprint('seen', heavy.settings.seen)")
    result = run_dtrain("run", "--nproc-per-node", "2", "--start-timeout-s", "100", "script.py", cwd=tmp_path)
    assert len(re.findall("seen [01]$", result.stdout, re.MULTILINE)) == 2, result
    (line,) = (line for line in result.stderr.splitlines() if "started by exec" in line)
    said = r"settings reads all variables when it is imported \(settings.py:2\); "
    assert re.search(said + r"each such start takes at least \d+\.\d s longer$", line)


def test_so_is_a_package_that_each_worker_imports_by_itself(installed: Path, tmp_path: Path) -> None:
    (installed / "tensorflow").mkdir()
    (installed / "tensorflow" / "__init__.py").write_text("import time\ntime.sleep(0.3)\nimport tensorflow.core")
    (installed / "tensorflow" / "core.py").touch()
    (tmp_path / "script.py").write_text("import tensorflow")
    result = run_dtrain("run", "--nproc-per-node", "2", "script.py", cwd=tmp_path)
    (line,) = (line for line in result.stderr.splitlines() if "started by exec" in line)
    said = r"tensorflow is left to each worker: .*; each such start takes at least \d+\.\d s longer$"
    assert re.search(said, line), result


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder in which nothing is warm, nor anything at the end."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    stop()
    wait_until(lambda: not [*folder.iterdir()], "nothing is left in the runtime folder")


@pytest.mark.parametrize("package", ["prefix", "copy"])
def test_what_is_kept_warm_serves_a_run_with_other_variables_unless_a_package_looked_for_those(
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
