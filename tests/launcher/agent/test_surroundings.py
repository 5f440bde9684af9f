"""What a run must find as it was when a process was left warm: each of it is seen where it differs."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from launcher.agent.workers.keeper import Packages

FIND = "import json; from launcher.agent.warm.surroundings import find_surroundings as f; print(json.dumps(f()))"
UNIFIED = next((path for path in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
                if (path / "cgroup.procs").exists()), None)  # fmt: skip
# What a shell does before it becomes the process, and what differs in it then.
CHANGES = {
    "loader": ("export LD_LIBRARY_PATH=/nowhere", {"LD_LIBRARY_PATH"}),
    "path": ("export PYTHONPATH=/nowhere", {"PYTHONPATH", "folders of packages (sys.path)"}),
    "hashes": ("export PYTHONHASHSEED=3", {"PYTHONHASHSEED"}),
    "secrets": ("export PYTHON_API_KEY=1 LD_TOKEN=2 HEAVY_MODE=3", set()),
    "limits": ("ulimit -n 600", {"resource limits (ulimit)"}),
    "umask": ("umask 26", {"umask"}),
    "nice": ("renice -n 5 -p $$", {"niceness"}),
    "processors": ("taskset -pc 0 $$", {"processors that may be used"}),
    "scheduling": ("chrt -b -p 0 $$", {"scheduling policy"}),
    "input and output": ("ionice -c 3 -p $$", {"priority of input and output"}),
    "out of memory": ("echo 500 > /proc/self/oom_score_adj", {"out-of-memory score"}),
    "nohup": ("trap '' HUP", {"ignored signals"}),
}
# The same as a program that becomes it, for which root is needed.
PROGRAMS = {
    "capabilities": (["setpriv", "--bounding-set", "-sys_time"], {"capabilities"}),
    "privileges": (["setpriv", "--no-new-privs"], {"right to new privileges"}),
    "groups": (["setpriv", "--groups", "65534"], {"groups"}),
    "mounts": (["unshare", "--mount"], {"namespaces"}),
    "host name": (["unshare", "--uts"], {"namespaces"}),
    "GPUs": (
        ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /dev && mknod /dev/null c 1 3"
         ' && mknod /dev/urandom c 1 9 && touch /dev/nvidia7 && exec "$@"', "sh"],
        {"namespaces", "GPUs"},
    ),
}  # fmt: skip


def found(*before: str) -> dict[str, str]:
    """The surroundings of a new process, which another program becomes."""
    done = subprocess.run([*before, sys.executable, "-c", FIND], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    here: dict[str, str] = json.loads(done.stdout)
    return here


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name, _ in one.items() ^ other.items()}


@pytest.fixture(scope="module")
def before() -> dict[str, str]:
    return found("sh", "-c", 'exec "$@"', "sh")


@pytest.mark.parametrize("kind", CHANGES)
def test_what_a_process_is_given_by_its_parent_is_seen(before: dict[str, str], kind: str) -> None:
    change, names = CHANGES[kind]
    if kind == "processors" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor only")
    assert differing(found("sh", "-c", f'{{ {change}; }} > /dev/null; exec "$@"', "sh"), before) == names


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives these")
@pytest.mark.parametrize("kind", PROGRAMS)
def test_what_only_root_gives_is_seen(before: dict[str, str], kind: str) -> None:
    program, names = PROGRAMS[kind]
    if subprocess.run([*program, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{program[0]} cannot do that here")
    assert differing(found(*program), before) == names


def found_in_group(name: str) -> dict[str, str]:
    """The surroundings of a process in a control group of its own, of the unified hierarchy."""
    assert UNIFIED is not None
    group = UNIFIED / name.format(uuid.uuid4().hex[:8])
    group.mkdir()
    try:
        return found("sh", "-c", f'echo $$ > {shlex.quote(str(group / "cgroup.procs"))} && exec "$@"', "sh")
    finally:
        group.rmdir()


@pytest.mark.skipif(UNIFIED is None or not os.access(UNIFIED, os.W_OK), reason="no control group can be made here")
def test_a_control_group_is_seen_but_not_which_tab_it_is_of(before: dict[str, str]) -> None:
    assert differing(found_in_group("dtrain-test-{}"), before) == {"control group"}
    tab, login = "vte-spawn-{}.scope", "session-{}.scope"
    assert differing(found_in_group(tab), found_in_group(tab)) == set()
    assert differing(found_in_group(tab), before) == {"control group"}
    assert differing(found_in_group(login), found_in_group(login)) == {"control group"}  # logind may end the other


CHANGED_PACKAGES = {
    "file": ("a_package.py", "changed since then: {}/a_package.py"),
    "installed": ("new-1.0.dist-info/METADATA", "changed since then: {}/new-1.0.dist-info"),
    "linked": ("new.pth", "changed since then: {}/new.pth"),
    "of no package": ("new.txt", ""),
}


@pytest.mark.parametrize("kind", CHANGED_PACKAGES)
def test_changes_of_installed_packages_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    name, reason = CHANGED_PACKAGES[kind]
    (tmp_path / "a_package.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    packages = Packages()
    importlib.import_module("a_package")
    packages.imported()
    try:
        assert packages.changed() == ""
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("later = True")
        assert packages.changed() == reason.format(tmp_path)
    finally:
        del sys.modules["a_package"]
