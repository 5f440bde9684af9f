"""One host of `testbed.network`: its namespaces, its processes, its sshd; of the network it has only its own end."""

import contextlib
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Literal

import psutil

from testbed.lab import clear_temp
from testbed.namespaces import await_word, bare_environment, path_of
from testbed.processes import kill, wait_until

# The host's case, around all of its namespaces but that of its pids, whose end it awaits. A control group of its own,
# where there can be one, is what the host's processes may make theirs in; no power loss would remove those.
CASE = """\
set -e
group=$1; shift
[ -z "$group" ] || { mkdir "$group"; echo 0 >"$group/cgroup.procs"; }
unshare --pid --fork --kill-child --mount-proc -- "$@" || :
[ -z "$group" ] || { echo 0 >"$group/../cgroup.procs"; find "$group" -depth -type d -exec rmdir {} +; }
"""

# Process 1. Another boot has another boot_id: by that programs know that nothing can be left of what they started.
BOOT = """\
set -e
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$1/hosts" /etc/hosts
mount --bind "$2/boot_id" /proc/sys/kernel/random/boot_id
shift 2
exec "$@"
"""
# Starts an sshd for every line that it is sent; the end of its stdin is the host's. As SIGCHLD is ignored the kernel
# removes orphans that end.
INIT = """\
import os, signal, socket, sys
name, *sshd = sys.argv[1:]
socket.sethostname(name)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
for _ in sys.stdin:
    os.posix_spawn(sshd[0], sshd, os.environ, file_actions=files, setsigdef=[signal.SIGCHLD], setsid=True)
"""


class Host:
    """The processes of one host. Of the network it knows its own name only."""

    def __init__(self, number: int, lab: Path, group: Path | None) -> None:
        self.number = number
        self.name = f"far{number}"
        self.port = f"port{number}"  # at the switch
        self.folder = lab / self.name
        self.temp = self.folder / "temp"
        self.touched = False  # by a fault, since it was booted
        self._lab = lab
        self._group = "" if group is None else str(group)
        self._case: subprocess.Popen[bytes] | None = None
        self._init: psutil.Process | None = None
        self._log_bytes = 0  # before sshd was last started

    @property
    def is_on(self) -> bool:
        return self._case is not None

    @property
    def pid(self) -> int:
        """A process in the host's network namespace."""
        assert self._case is not None, f"{self.name} is off"
        return self._case.pid

    def begin(self, sshd: str) -> None:
        """Start process 1. The network namespace is there when `await_up` returns."""
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        listener = [sshd, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        init = [sys.executable, "-IS", "-c", INIT, self.name, *listener]
        boot = ["sh", "-c", BOOT, "boot", str(self._lab), str(self.folder), *init]
        case = [path_of("unshare"), "--net", "--uts", "--ipc", "--", "sh", "-c", CASE, "case", self._group, *boot]
        with self._log_file.open("wb") as log:
            self._case = subprocess.Popen(
                case,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=bare_environment(),
            )
        self.touched = False

    def await_up(self) -> None:
        assert self._case is not None
        try:
            await_word(self._case, self.name)
        except ChildProcessError as error:
            raise ChildProcessError(f"{error}: {self.log()}") from None
        (unshare,) = psutil.Process(self._case.pid).children()
        (self._init,) = unshare.children()

    def start_sshd(self) -> None:
        assert self._case is not None, f"{self.name} is off"
        assert self._case.stdin is not None
        self._log_bytes = self._log_file.stat().st_size
        self._case.stdin.write(b"sshd\n")
        self._case.stdin.flush()

    def await_sshd(self) -> None:
        # The log, not a connection: that would leave a session behind for a moment.
        def listens() -> bool:
            return b"Server listening on" in self._log_file.read_bytes()[self._log_bytes :]

        try:
            wait_until(listens, f"sshd of {self.name} listens")
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {self.log()}") from None

    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All that run below process 1, which is where orphans go; a process that has ended does not run."""
        if self._init is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [process for process in self._init.children(recursive=True) if _state(process) != "ended"]
        return []

    def pids(self) -> set[int]:
        """Process 1, those around it, sshd and its sessions."""
        if self._case is None:
            return set()
        found = {self._case.pid}
        if self._init is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {self._init.pid, self._init.ppid()}
        return found | {process.pid for process in self.processes() if is_sshd(process)}

    def is_fresh(self) -> bool:
        return self.is_on and not self.touched and len(self.processes()) == 1  # the listener

    def freeze(self) -> None:
        # Process 1 goes on: if the tests are killed, it must see the end of its stdin.
        def run() -> list[psutil.Process]:
            running = [process for process in self.processes() if _state(process) == "runs"]
            for process in running:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            return running

        wait_until(lambda: not run(), f"{self.name} is frozen")  # some had time to fork

    def thaw(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def kill_sshd(self) -> None:
        # While its listener is killed, a session may begin.
        while found := [process for process in self.processes() if is_sshd(process)]:
            kill(found)

    def end(self) -> None:
        """Kill process 1, with which the kernel kills all others; return when they are gone."""
        if (case := self._case) is None:
            return
        with case:  # closes the pipes: a host that had not come up ends by that
            if self._init is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._init.kill()
            else:
                for process in psutil.Process(case.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            try:
                case.wait(60)
            except subprocess.TimeoutExpired:
                case.kill()
                raise TimeoutError(f"{self.name} did not end") from None
            finally:
                self._case = self._init = None
        clear_temp(self.temp)  # as a machine does when it is started again

    @property
    def _log_file(self) -> Path:
        return self.folder / "sshd.log"


def _state(process: psutil.Process) -> Literal["runs", "stopped", "ended"]:
    try:
        status = process.status()
    except psutil.NoSuchProcess:
        return "ended"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "ended"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "runs"


def is_sshd(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("sshd")  # or sshd-session, sshd-auth
    except psutil.NoSuchProcess:
        return False
