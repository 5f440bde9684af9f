"""The entry scripts parse, can be run, and find a real interpreter; what they do shows in every CI run."""

import ast
import fcntl
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import coverage
import pytest
from testbed.present import present

ROOT = Path(__file__).parents[1]
TINY = """\
def covered(a, b):
    return a or b


def not_covered(left):
    left.clear()
"""
TINY_TEST = """\
import os
import subprocess
import sys
from pathlib import Path


def test_in_a_process_without_variables():
    program = "import launcher.tiny; print(launcher.tiny.__file__, launcher.tiny.covered(5, 6))"
    file, result = subprocess.check_output([sys.executable, "-c", program], cwd="/", env={}, text=True).split()
    assert (Path(file).parents[1], result) == (Path.cwd(), "5")
"""


@pytest.mark.parametrize(
    "script",
    [
        "scripts/quickstart",
        "scripts/test",
        "scripts/gpu",
        "scripts/docs",
        "scripts/ordinary_user",
        "scripts/venv.sh",
        ".ci/run",
    ],
)
def test_scripts_are_valid_bash(script: str) -> None:
    parsed = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True)
    assert (parsed.returncode, parsed.stderr) == (0, "")
    assert os.access(ROOT / script, os.X_OK) or script.endswith(".sh")


def test_the_interpreter_found_is_no_environment_and_no_shim() -> None:
    found = _venv_sh("find_python venv", PYTHON=sys.executable)
    assert found.returncode == 0, found
    check = "import sys; print(sys.prefix == sys.base_prefix, sys.executable)"
    really = subprocess.run([found.stdout.strip(), "-c", check], capture_output=True, text=True, check=True)
    assert really.stdout == f"True {found.stdout}"


def test_an_unsuitable_interpreter_is_named() -> None:
    refused = _venv_sh("python_for_venv", PYTHON="/nowhere/python3")
    assert refused.returncode == 1
    assert "PYTHON=/nowhere/python3 is not a Python from 3.10 on" in refused.stderr


def test_a_pair_of_versions_has_an_environment_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/constraints.txt", tmp_path / "scripts")
    version = "{}.{}".format(*sys.version_info)
    bin_ = tmp_path / "pyenv/versions" / f"{version}.0" / "bin"
    bin_.mkdir(parents=True)
    (bin_ / f"python{version}").symlink_to(getattr(sys, "_base_executable", sys.executable))
    environment = {"PATH": "/usr/bin:/bin", "PYENV_ROOT": str(tmp_path / "pyenv")}
    reported = _venv_sh(f'use_pair 2.9.1 {version}; echo "$venv"; cat "$constraints"', tmp_path, **environment)
    assert reported.returncode == 0, reported.stderr
    venv, *constraints = reported.stdout.splitlines()
    assert venv == f".venvs/torch2.9.1-py{version}"
    ours = (ROOT / "scripts/constraints.txt").read_text().splitlines()
    assert constraints == ["torch==2.9.1" if line.startswith("torch==") else line for line in ours]
    assert "torch==2.9.1" in constraints
    alone = _venv_sh(f'use_pair "" {version}; cmp "$constraints" scripts/constraints.txt', tmp_path, **environment)
    assert alone.returncode == 0, alone


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("2.15 3.13", "--torch 2.15: give a whole version, like 2.13.0"),
        ("2.15.0 3.13.1", "--python 3.13.1: give it like 3.12"),
        ("2.15.0 3.99", "no Python 3.99 that can make a virtual environment"),
    ],
)
def test_a_pair_that_cannot_be_is_refused(pair: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    refused = _venv_sh(f"use_pair {pair}", tmp_path)
    assert refused.returncode == 1
    assert message in refused.stderr


@pytest.mark.parametrize(
    ("found", "pinned"),
    [("2.9.1+cu128", "2.9.1+cu128"), ("2.10.0", "2.10.0"), ("3.0", "3.0"), ("2.8.0", None), ("", None)],
)
def test_a_torch_that_dtrain_can_use_stays(found: str, pinned: str | None, tmp_path: Path) -> None:
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n[ -n '{found}' ] && echo '{found}'\ntrue\n")
    python.chmod(0o755)
    kept = _venv_sh('keep_torch; cat "$constraints"', tmp_path)
    ours = (ROOT / "scripts/constraints.txt").read_text().splitlines()
    expected = [f"torch=={pinned}" if pinned and line.startswith("torch==") else line for line in ours]
    assert (kept.returncode, kept.stdout.splitlines()) == (0, expected), kept
    for before, is_replaced in (("", bool(found)), ("keep_torch; ", bool(found) and pinned is None)):
        installed = _venv_sh(f"{before}rm -f .venv/.dtrain-examples; install examples", tmp_path)
        assert (installed.returncode, f"replacing torch {found} in .venv" in installed.stdout) == (0, is_replaced)


def test_an_environment_without_pip_gets_it_and_keeps_the_rest(tmp_path: Path) -> None:
    """As uv makes them."""
    python = _venv_sh("find_python ensurepip").stdout.strip()
    if not python:
        pytest.skip("no Python here has ensurepip")
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    (tmp_path / ".venv/mine").touch()
    made = _venv_sh("make_venv; .venv/bin/python -m pip --version", tmp_path)
    assert (made.returncode, made.stdout[:4]) == (0, "pip "), made
    assert (tmp_path / ".venv/mine").exists()


def test_an_ordinary_user_has_no_rights_and_is_gone_afterwards() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a user")
    says = "import getpass, os, launcher; print(*os.getresuid(), getpass.getuser(), os.access('/etc/shadow', os.R_OK))"
    argv = [str(ROOT / "scripts/ordinary_user"), sys.executable, "-c", f"{says}; raise SystemExit(3)"]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if result.returncode == 77:
        pytest.skip(result.stderr)
    assert (result.returncode, result.stderr) == (3, "")
    *uids, user, reads_all = result.stdout.split()
    assert (len(set(uids)), "0" in uids, reads_all) == (1, False, "False")
    with pytest.raises(KeyError):
        pwd.getpwnam(user)


def test_gpu_here_runs_with_the_packages_that_it_was_given(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "PYTHONPATH is $PYTHONPATH"\nexit 1\n')
    python.chmod(0o755)
    for given, expected in (("/some/packages", f"{ROOT}:/some/packages"), ("", str(ROOT))):
        env = {**os.environ, "PYTHON": str(python), "PYTHONPATH": given}
        result = subprocess.run([ROOT / "scripts/gpu", "--here"], env=env, capture_output=True, text=True)
        assert result.stdout == f"PYTHONPATH is {expected}\n"
        assert (result.returncode, "torch cannot use a GPU here" in result.stderr) == (1, True)


def test_gpu_says_where_there_is_none() -> None:
    files = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
    if any(map(os.path.exists, files)):
        pytest.skip("this machine has one")
    refused = subprocess.run([ROOT / "scripts/gpu"], capture_output=True, text=True)
    assert (refused.returncode, refused.stderr) == (1, "gpu: no GPU of NVIDIA or AMD here; scripts/test needs none\n")


@pytest.fixture
def apt_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state of an apt-get with which bash is installed, and which knows no server."""
    if shutil.which("apt-get") is None:
        pytest.skip("only Debian and its like have apt-get")
    for folder in ("dpkg", "etc/apt.conf.d", "lists/partial", "archives/partial"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy("/var/lib/dpkg/status", tmp_path / "dpkg")
    own = {"Etc": "etc", "State": "", "State::status": "dpkg/status", "State::lists": "lists", "Cache": ""}
    (tmp_path / "apt.conf").write_text("".join(f'Dir::{key} "{tmp_path}/{name}";\n' for key, name in own.items()))
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    return tmp_path


@pytest.mark.parametrize("lock", ["lists/lock", "archives/lock", "dpkg/lock-frontend", "dpkg/lock"])
def test_packages_wait_for_apt_s_lock(apt_folder: Path, lock: str) -> None:
    argv = ["bash", "-c", f"set -euo pipefail; . {ROOT}/scripts/venv.sh; apt_install bash"]
    with (apt_folder / lock).open("w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        line = present(process.stderr).readline()
        assert (line.startswith("-- waiting up to 300 s: E: Could not get lock"), str(held.name) in line) == (
            True,
            True,
        )
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)


@pytest.mark.parametrize(("ci", "status"), [("true", 1), ("", 0)])
def test_packages_that_cannot_be_installed_end_ci(apt_folder: Path, ci: str, status: int) -> None:
    with (apt_folder / "lists/lock").open("w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        tried = _venv_sh("apt_wait_s=0; install_parts bash; echo goes on", CI=ci)
    assert (tried.returncode, "goes on" in tried.stdout) == (status, status == 0), tried
    assert "the tests that need bash cannot run" in (tried.stderr if ci else tried.stdout)


def test_coverage_sees_all_processes_of_a_run(tmp_path: Path) -> None:
    """What scripts/test --cover sets, for one run: each of these modules is run by a process of its own."""
    (tmp_path / "script.py").touch()
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    env |= {"COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml"), "COVERAGE_FILE": str(tmp_path / "data")}
    options = ["--log-dir", str(tmp_path / "runs"), "--nproc-per-node", "1"]
    argv = [sys.executable, "-m", "launcher", "run", *options, str(tmp_path / "script.py")]
    subprocess.run(argv, cwd=ROOT, env=env, check=True, timeout=100)
    ran: dict[str, set[int]] = {}
    for file in tmp_path.glob("data.*"):
        data = coverage.CoverageData(str(file))
        data.read()
        for module in data.measured_files():
            ran.setdefault(module, set()).update(data.lines(module) or ())
    for name in ("controller/controller", "agent/cleanup/guard", "agent/agent", "agent/workers/bootstrap"):
        source = ROOT / "launcher" / f"{name}.py"
        functions = (node for node in ast.walk(ast.parse(source.read_bytes())) if isinstance(node, ast.FunctionDef))
        in_functions = {line for each in functions for line in range(each.body[0].lineno, each.body[-1].lineno + 1)}
        assert len(ran[str(source)] & in_functions) > 5


def _tiny_tree(folder: Path) -> None:
    for part in ("launcher", "tests/launcher", "scripts"):
        (folder / part).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/mutate", folder / "scripts")
    (folder / "launcher/__init__.py").touch()
    (folder / "launcher/tiny.py").write_text(TINY)
    (folder / "tests/launcher/test_tiny.py").write_text(TINY_TEST)


def _mutate(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(folder / "scripts/mutate"), *args]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take most of the time
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


def _venv_sh(command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = ["bash", "-c", f"set -euo pipefail; . {ROOT}/scripts/venv.sh; {command}"]
    return subprocess.run(argv, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)


def test_mutate_names_the_changes_that_no_test_notices(tmp_path: Path) -> None:
    _tiny_tree(tmp_path)
    result = _mutate(tmp_path, "launcher/tiny.py")
    assert result.returncode == 0, result
    first, _, survivor, *rest = result.stdout.splitlines()
    assert first == "3 of 3 changes of launcher/tiny.py, --seed 0, tests: tests/launcher/test_tiny.py"
    assert [survivor, *rest] == ["launcher/tiny.py:6", "-    left.clear()", "+    pass", "", "2 of 3 killed (67 %)"]
    assert (tmp_path / "launcher/tiny.py").read_text() == TINY


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("assert False", "the tests fail without a change"),
        ("pass", "the tests pass although launcher/tiny.py cannot be"),
    ],
)
def test_mutate_refuses_tests_that_would_say_nothing(test: str, message: str, tmp_path: Path) -> None:
    _tiny_tree(tmp_path)
    (tmp_path / "tests/launcher/test_tiny.py").write_text(f"def test_nothing():\n    {test}\n")
    refused = _mutate(tmp_path, "launcher/tiny.py")
    assert refused.returncode == 1
    assert message in refused.stderr
