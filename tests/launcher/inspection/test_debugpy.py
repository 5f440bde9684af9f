"""`dtrain debug --debugpy`: an editor in a rank that runs, which goes on as it would without it."""

import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from testbed.present import present
from testbed.processes import run_dtrain, wait_until
from testbed.require import require
from testbed.sshd import BareHosts
from testbed.terminal import dtrain_on_terminal
from testbed.typed import dtrain

# Starts children while there is a file `start`, and says in `children` how they ended.
SCRIPT = """
import os, pathlib, subprocess, sys, time

start, children, go = map(pathlib.Path, ("start", "children", "go"))
pathlib.Path("pid.new").write_text(str(os.getpid()))
pathlib.Path("pid.new").rename("pid")
while not go.exists():
    time.sleep(0.02)
    if start.exists():
        start.unlink()
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        forked = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ran = subprocess.run([sys.executable, "-c", "print(8)"], capture_output=True, text=True)
        children.with_suffix(".new").write_text(f"{forked} {ran.returncode} {ran.stdout}{ran.stderr}")
        children.with_suffix(".new").rename(children)
"""
LIMIT_S = 60.0


class Editor:
    """One session in the Debug Adapter Protocol."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        self._file = self._connection.makefile("rb")
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}

    def begin(self, command: str, **arguments: Any) -> int:
        self._number += 1
        request = {"seq": self._number, "type": "request", "command": command, "arguments": arguments}
        text = json.dumps(request).encode()
        self._connection.sendall(b"Content-Length: %d\r\n\r\n" % len(text) + text)
        return self._number

    def answer(self, number: int) -> dict[str, Any]:
        """Read until the answer to a request is there, and return its body."""
        while number not in self._answers:
            length = 0
            while line := self._file.readline().strip():
                if line.startswith(b"Content-Length:"):
                    length = int(line.split(b":")[1])
            assert length, "debugpy has ended the session"
            said = json.loads(self._file.read(length))
            if said["type"] == "response":
                self._answers[said["request_seq"]] = said
        assert self._answers[number]["success"], self._answers[number]
        body: dict[str, Any] = self._answers[number].get("body", {})
        return body

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        return self.answer(self.begin(command, **arguments))

    def frames(self, thread: int) -> list[dict[str, Any]]:
        """Return the stack of a thread, once it has stopped."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            with suppress(AssertionError):
                found: list[dict[str, Any]] = self.ask("stackTrace", threadId=thread)["stackFrames"]
                return found
            time.sleep(0.05)
        raise TimeoutError(f"thread {thread} has not stopped")

    def close(self) -> None:
        self._file.close()
        self._connection.close()


@contextmanager
def attached(folder: Path, *, has_mappings: bool = False) -> Iterator[Editor]:
    """Attach an editor to rank 0, and let it leave."""
    with dtrain_on_terminal("debug", "r", "--rank", "0", "--debugpy", cwd=folder) as terminal:
        terminal.read_until("}}\r\n" if not has_mappings else "}]}\r\n")
        found = re.search(r"editor at 127\.0\.0\.1:(\d+)", terminal.shown)
        assert found is not None, terminal.shown
        configuration = json.loads(terminal.shown[terminal.shown.index('{"type"') :].splitlines()[0])
        editor = Editor(int(found[1]))
        try:
            editor.ask("initialize", adapterID="debugpy", clientID="test")
            attach = editor.begin("attach", justMyCode=False, pathMappings=configuration.get("pathMappings", []))
            editor.ask("configurationDone")
            editor.answer(attach)
            with pytest.raises(ConnectionRefusedError):  # a second editor does not wait: debugpy has one
                socket.create_connection(("127.0.0.1", int(found[1])))
            yield editor
            editor.ask("disconnect", terminateDebuggee=False)
        finally:
            editor.close()
        assert terminal.wait() == 0, terminal.shown


def children_of_the_rank(folder: Path) -> str:
    children = folder / "children"
    children.unlink(missing_ok=True)
    (folder / "start").touch()
    wait_until(children.exists, "the rank's children have ended")
    return children.read_text()


def test_a_rank_starts_children_during_and_after_debugging(folder: Path) -> None:
    require(find_spec("debugpy"), "debugpy", "pip install debugpy")
    (folder / "script.py").write_text(SCRIPT)
    result = run_dtrain("run", "--detach", "--run-id", "r", "script.py", outlived=True)
    assert result.returncode == 0, result
    for _ in range(2):
        with attached(folder) as editor:
            assert editor.ask("threads")["threads"]
            assert children_of_the_rank(folder) == "7 0 8\n"
        assert children_of_the_rank(folder) == "7 0 8\n"
    (folder / "go").touch()
    assert dtrain("wait", "r").returncode == 0
    assert "frozen modules" not in (folder / "runs/r/console.log").read_text()


def _files_of(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(file))
    return found


def _open_files(folder: Path) -> list[str]:
    """What the rank has open besides sockets, of which debugpy keeps some."""
    pid = int((folder / "pid").read_text())
    return sorted(file for file in _files_of(pid) if not file.startswith("socket:"))


def test_an_editor_leaves_the_rank_s_descriptors_alone(folder: Path) -> None:
    require(find_spec("debugpy"), "debugpy", "pip install debugpy")
    has_timeout = "import socket\nones, others = socket.socketpair()\nsocket.setdefaulttimeout(60)\n"
    blocks = "assert os.get_blocking(ones.fileno())\n"
    (folder / "script.py").write_text(has_timeout + SCRIPT + blocks)
    assert run_dtrain("run", "--detach", "--run-id", "r", "script.py", outlived=True).returncode == 0
    wait_until((folder / "pid").exists, "the script runs")
    before = _open_files(folder)
    with attached(folder):
        pass
    wait_until(lambda: _open_files(folder) == before, f"the rank has open what it had: {before}")
    (folder / "go").touch()
    assert dtrain("wait", "r").returncode == 0


def test_an_editor_sees_sent_files_at_their_paths_here(bare_hosts: BareHosts, folder: Path) -> None:
    require(find_spec("debugpy"), "debugpy", "pip install debugpy")
    shutil.copytree(present(present(find_spec("debugpy")).origin).removesuffix("__init__.py"), "packages/debugpy")
    project = bare_hosts.here / uuid.uuid4().hex[:8]
    project.mkdir()
    (project / "script.py").write_text(f"import os\nos.chdir({str(folder)!r})\n{SCRIPT}")
    hosts = ["--hosts", "node1", "--ssh-config", str(bare_hosts.ssh_config)]
    argv = ["--sync", "code", *hosts, "-x", f"PYTHONPATH={folder}/packages", "--log-dir", str(folder / "runs")]
    result = run_dtrain("run", "--detach", "--run-id", "r", *argv, "script.py", cwd=project, outlived=True)
    assert result.returncode == 0, result
    with attached(folder, has_mappings=True) as editor:
        (thread,) = editor.ask("threads")["threads"]
        editor.ask("pause", threadId=thread["id"])
        frames = editor.frames(thread["id"])
        assert str(project / "script.py") in [frame["source"]["path"] for frame in frames], frames
    (folder / "go").touch()
    assert dtrain("wait", "r").returncode == 0


CLOSES = """
import socket
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        with socket.socket(fileno=os.dup(number)) as each:
            if each.family == socket.AF_UNIX and each.type == socket.SOCK_STREAM:
                each.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
"""


def _listens(pid: int) -> bool:
    """Whether one of a process's descriptors is a TCP socket that listens."""
    sockets = set(_files_of(pid))
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return any(f"socket:[{line[9]}]" in sockets for line in lines if line[3] == "0A")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise ImportError", "debugpy is not installed for "),
        ("def configure(**_): raise RuntimeError('no such port')", "could not be opened: RuntimeError: no such port"),
        ("import os" + CLOSES, "rank 0 continues: it closed the debugger before it was ready"),
        ("USED = True", "debugpy is in use there already"),
    ],
    ids=["missing", "fails", "closes", "used"],
)
def test_a_debugpy_that_does_not_open_is_reported(code: str, text: str, folder: Path) -> None:
    (folder / "script.py").write_text(SCRIPT)
    (folder / "debugpy").mkdir()
    (folder / "debugpy/__init__.py").write_text(code)
    (folder / "debugpy/server.py").touch()
    debugger = "import debugpy\ndef get_global_debugger(): return getattr(debugpy, 'USED', None)\n"
    (folder / "pydevd.py").write_text(f"{debugger}def stoptrace(): pass\n")
    assert run_dtrain("run", "--detach", "--run-id", "r", "script.py", outlived=True).returncode == 0
    result = run_dtrain("debug", "r", "--rank", "0", "--debugpy")
    assert result.returncode == 1, result
    assert text in result.stderr, result
    wait_until((folder / "pid").exists, "the script runs")
    pid = int((folder / "pid").read_text())
    wait_until(lambda: not _listens(pid), "no port of the rank is open")
    assert children_of_the_rank(folder) == "7 0 8\n"
    (folder / "go").touch()
    assert dtrain("wait", "r").returncode == 0
