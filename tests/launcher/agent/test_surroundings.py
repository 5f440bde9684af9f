"""What a run must find as it was when a process was left warm: each of it is seen where it differs, and what logind
does to whom."""

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

from launcher.agent.warm.login import why_it_may_end
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
def test_a_control_group_is_seen_but_not_which_login_it_is_of(before: dict[str, str]) -> None:
    assert differing(found_in_group("dtrain-test-{}"), before) == {"control group"}
    for kind in ("session-{}.scope", "vte-spawn-{}.scope"):
        assert differing(found_in_group(kind), found_in_group(kind)) == set()
        assert differing(found_in_group(kind), before) == {"control group"}


def sessions(folder: Path, state: str, answer: str) -> Path:
    """Notes of logind on session 3, and a loginctl that gives an answer, put first in the PATH by the caller."""
    (folder / "3").write_text(f"# This is private data. Do not parse.\nUID=1000\nSTATE={state}\nREMOTE=1\n")
    program = folder / "loginctl"
    program.write_text(f'#!/bin/sh\ntouch "{folder}/asked"\n{answer}\n')
    program.chmod(0o755)
    return folder


THIRD = "1:name=systemd:/user.slice/user-1000.slice/session-3.scope\n0::/user.slice/user-1000.slice/session-3.scope\n"
NOT_KILLED, KILLED = "echo KillUserProcesses=no", "echo KillUserProcesses=yes"


@pytest.mark.parametrize(
    ("ours", "state", "answer", "ends", "asked"),
    [
        (THIRD, "active", KILLED, False, False),  # the run ends with the same login
        (THIRD.replace("session-3", "session-14"), "active", KILLED, True, True),
        (THIRD.replace("session-3", "session-14"), "online", KILLED, True, True),
        (THIRD.replace("session-3", "session-14"), "online", NOT_KILLED, False, True),
        (THIRD.replace("session-3", "session-14"), "online", "exit 1", True, True),
        (THIRD.replace("session-3", "session-14"), "closing", KILLED, False, False),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/run.scope\n", "active", KILLED, True, True),
    ],
)
def test_a_process_that_logind_may_end_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: str, state: str, answer: str, ends: bool, asked: bool
) -> None:
    folder = sessions(tmp_path, state, answer)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert ("session 3 (KillUserProcesses)" in why_it_may_end(THIRD, ours=ours, sessions=folder)) is ends
    assert (folder / "asked").exists() is asked


def test_a_process_of_no_login_or_of_one_that_is_over_is_used(tmp_path: Path) -> None:
    ours = "0::/user.slice/user-1000.slice/session-14.scope\n"
    assert why_it_may_end("0::/system.slice/ssh.service\n", ours=ours, sessions=tmp_path) == ""
    assert why_it_may_end(THIRD, ours=ours, sessions=tmp_path) == ""


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
