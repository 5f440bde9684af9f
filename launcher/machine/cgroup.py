"""A control group for the workers of this host: their descendants cannot leave it.

Made below the agent's own group in the unified hierarchy (cgroup v2), so that all limits of that group still apply. If
there is none, or this user must not create one, nothing here has an effect: agent/cleanup/run_tag.py has other ways.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from launcher.machine.system_files import read_text

_NAME = re.compile(r"dtrain-[0-9a-f]{16}")


class Cgroup:
    """A group, by its folder, which need not exist."""

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def below_ours(cls, name: str) -> Cgroup | None:
        """Return the group with this name below this process's own, not made yet; None if there can be none."""
        try:
            own = next((path for path, _ in own_folders() if os.path.exists(f"{path}/cgroup.procs")), None)
        except (OSError, ValueError, IndexError):
            return None
        if own is None or read_text(f"{own}/cgroup.type") not in ("", "domain"):  # the root has no type
            return None
        return cls(f"{own}/{name}")

    @classmethod
    def named(cls, path: str, name: str) -> Cgroup | None:
        """Return the group at `path`, which came from outside; None unless it is one of ours."""
        if not _NAME.fullmatch(name) or os.path.basename(path) != name or os.path.realpath(path) != path:
            return None
        if not os.path.exists(f"{os.path.dirname(path)}/cgroup.procs"):  # not in the unified hierarchy
            return None
        return cls(path)

    def make(self) -> None:
        try:
            if os.access(f"{os.path.dirname(self.path)}/cgroup.procs", os.W_OK):
                os.mkdir(self.path, 0o755)
        except OSError:  # no permission, or too many groups
            return

    def add(self, pid: int = 0) -> None:
        """Move a process into it; by default the calling one, between fork and exec."""
        _write(f"{self.path}/cgroup.procs", str(pid))

    def pids(self) -> set[int]:
        """Return the members, including those of nested groups, except those that only other pid namespaces see."""
        found: set[int] = set()
        for folder in self._folders():
            found.update(int(pid) for pid in read_text(f"{folder}/cgroup.procs").split() if pid.isdigit())
        found.discard(0)
        return found

    def kill(self) -> None:
        """Kill every member at once, if the kernel supports it (Linux 5.14)."""
        _write(f"{self.path}/cgroup.kill", "1")

    def remove(self) -> None:
        """Remove it and the groups in it; groups that still have members stay."""
        for folder in reversed(self._folders()):
            try:
                os.rmdir(folder)
            except OSError:
                continue

    def _folders(self) -> list[str]:
        return [folder for folder, _, _ in os.walk(self.path)]


def folders_of(
    controller: str, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[Path]:
    """Return the folders of this process's group and of those above it: version 2's, and version 1's `controller`."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / controllers
            below = top / path.lstrip("/")
            found += [below, *(folder for folder in below.parents if folder == top or top in folder.parents)]
    return found


def own_folders(controller: str = "") -> list[tuple[str, str]]:
    """Return the folder of this process's group and the mount point of its hierarchy, for each such mount.

    It is the unified hierarchy, or that of version 1 with the `controller`. The folder need not exist: a container may
    show only groups above it.
    """
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        groups = [line.rstrip("\n").split(":", 2) for line in file]
    own = next((path for _, names, path in groups if controller in names.split(",")), None)
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            mount, _, super_block = line.rstrip("\n").partition(" - ")
            filesystem, _, options = super_block.split(" ", 2)
            if own is None or filesystem != ("cgroup" if controller else "cgroup2"):
                continue
            root, point = (_unescaped(field) for field in mount.split(" ")[3:5])
            folder = folder_in(own, root, point)
            if folder is not None and (not controller or controller in options.split(",")):
                found.append((folder, point))
    return found


def folder_in(path: str, root: str, point: str) -> str | None:
    """Return the folder of the group at `path` in a mount that shows the tree below `root`; None outside of it."""
    root = root.rstrip("/")
    if "/.." in path or not f"{path}/".startswith(f"{root}/"):
        return None
    return f"{point}{path[len(root) :]}".rstrip("/")


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _write(path: str, text: str) -> None:
    """Write to an existing file of the kernel: opening it never creates one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(descriptor, text.encode())
    except OSError:
        return
    finally:
        os.close(descriptor)
