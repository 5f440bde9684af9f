"""Stand-ins for pods of Kubernetes: a network, host name, pids, mounts and /dev of their own, and no init.

The command of a pod is its process 1. Names are those in /etc/hosts of each pod, which a test may write late. Files are
this machine's, but for /proc, /dev, and what a test mounts. The network is that of `testbed.network`, without hosts.
Needs root.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from testbed.left import own_group
from testbed.namespaces import path_of, run_part
from testbed.network import NetworkHosts
from testbed.processes import Program, started, wait_until

# In the pod's network; waits until its cable is plugged in. $1 and $2 are control groups, or empty.
OUTER = """\
read -r _
for group in "$1" "$2"; do [ -z "$group" ] || echo 0 >"$group/cgroup.procs"; done
shift 2
exec "$@" </dev/null
"""
# Process 1, which becomes the command. $1 is the pod's name, $2 its folder, $3 what is special about it.
INNER = """\
set -e
dev=$2/dev
mount -t tmpfs -o mode=755 tmpfs "$dev"
mknod -m 666 "$dev/null" c 1 3; mknod -m 666 "$dev/zero" c 1 5; mknod -m 666 "$dev/urandom" c 1 9
ln -s /proc/self/fd "$dev/fd"
mkdir "$dev/shm"; mount -t tmpfs -o mode=1777,size=64m tmpfs "$dev/shm"
: >"$dev/termination-log"; mount --bind "$2/termination-log" "$dev/termination-log"
mount --move "$dev" /dev
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2" "$2"
eval "$3"
shift 3
exec "$@"
"""
NO_PASSWD = 'mount --bind "$2/passwd" /etc/passwd\n'
READ_ONLY = "mount -o remount,ro,bind /\n"  # what is mounted below is not


@dataclass(frozen=True)
class Pod:
    """A running pod. `init` is its process 1; `program` ends with its exit code."""

    name: str
    address: str
    folder: Path
    program: Program
    init: psutil.Process

    @property
    def termination_message(self) -> str:
        return (self.folder / "termination-log").read_text()

    def end(self) -> tuple[int, str, str]:
        """Wait for its end; return its exit code, stdout and stderr."""
        out, err = self.program.communicate(timeout=90)
        return self.program.returncode, out.decode(), err.decode()


class Pods(NetworkHosts):
    """The network of pods, and the pods that run in it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, count=0)
        self._started = 0
        self._folders: list[Path] = []
        self._names: list[str] = []

    def publish(self, name: str, address: str) -> None:
        """Have all pods know an address by its name, those that start later as well. The last one counts."""
        self._names.insert(0, f"{address} {name}\n")
        for folder in self._folders:
            self._write_names(folder)

    @contextmanager
    def pod(
        self,
        name: str,
        *command: str | Path,
        cwd: Path,
        env: Mapping[str, str | None] | None = None,
        special: str = "",
        group: Path | None = None,
    ) -> Iterator[Pod]:
        """Start a pod with an address of its own, which only its own name means in it; kill it at the end."""
        self._started += 1
        number, port = self._started, f"pod{self._started}"
        address, folder = f"{self._network}.{number}", self.folder / f"{name}-{number}"
        for made in (folder, folder / "dev", folder / "tmp", folder / "home"):
            made.mkdir()
        (folder / "own").write_text(f"127.0.0.1 localhost\n{address} {name}.svc.cluster.local {name}\n")
        for empty in ("termination-log", "passwd"):
            (folder / empty).touch()
        self._write_names(folder)
        self._folders.append(folder)
        pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": name, "XDG_STATE_HOME": None}
        own = {"TMPDIR": str(folder / "tmp"), "HOME": str(folder / "home"), **pod, **(env or {})}
        unshare = path_of("unshare")
        inner = [unshare, "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--", "sh", "-c", INNER, "pod"]
        with contextlib.ExitStack() as stack:
            groups = str(stack.enter_context(_own_group(f"{self.mark[:16]}-{port}")) or ""), str(group or "")
            outer = [unshare, "--net", "--uts", "--ipc", "--", "sh", "-c", OUTER, "outer", *groups, *inner]
            program = stack.enter_context(
                started(*outer, name, folder, special, *command, cwd=cwd, env=own, stdin=subprocess.PIPE)
            )
            ours = os.readlink("/proc/self/ns/net")
            wait_until(lambda: os.readlink(f"/proc/{program.pid}/ns/net") != ours, "the pod has a network")
            self._ip_at_switch(
                f"link add {port} type veth peer name eth0 netns {program.pid}",
                f"link set {port} master switch",
                f"link set {port} up",
            )
            commands = ("link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up")
            run_part("ip", "-batch", "-", inside=program.pid, stdin="\n".join(commands))
            assert program.stdin is not None
            program.stdin.write(b"\n")
            program.stdin.close()
            program.stdin = None  # `communicate` would flush it
            outside = psutil.Process(program.pid)
            seen = [outside]  # last: process 1, if it has not ended before it was seen

            def is_there() -> bool:
                with contextlib.suppress(psutil.Error):
                    seen.extend(outside.children())
                return len(seen) > 1 or program.poll() is not None

            wait_until(is_there, "process 1 is there")
            yield Pod(name, address, folder, program, seen[-1])

    def _write_names(self, folder: Path) -> None:
        """Write the file in its place, which is mounted in the pod."""
        (folder / "hosts").write_text((folder / "own").read_text() + "".join(self._names))


@contextmanager
def _own_group(name: str) -> Iterator[Path | None]:
    """Make a control group (v2), where there can be one; it ends with the pod and what its agents make in it."""
    if (outer := own_group()) is None:
        yield None
        return
    group = outer / f"dtrain-test-{name}"
    group.mkdir()
    try:
        yield group
    finally:
        for folder, _, _ in os.walk(group, topdown=False):
            wait_until(lambda folder=folder: _removed(folder), f"{folder} is removed")  # type: ignore[misc]


def _removed(group: str) -> bool:
    with contextlib.suppress(OSError):  # the last process is on its way out
        os.rmdir(group)
    return not os.path.exists(group)
