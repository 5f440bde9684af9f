"""A machine with AMD's GPUs as far as the kernel shows them: its own /sys and /dev, in a mount namespace.

The files are those of Linux 6.x: KFD's topology, DRM's render devices. NVIDIA's are faked by fake_nvml.c.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.namespaces import find_part
from testbed.require import require

# The namespace has the files of FOLDER/sys and FOLDER/dev, and of the real /dev what programs cannot do without.
ENTER = """
set -e
mkdir -p "$1/real"
mount --rbind /dev "$1/real"
mount --rbind "$1/sys" /sys
mount -t tmpfs none /dev
cp -a "$1/dev/." /dev
for name in null zero full random urandom tty shm pts; do ln -s "$1/real/$name" /dev/$name; done
ln -s /proc/self/fd /dev/fd
shift
exec "$@"
"""


class GpuMachine:
    """The files of a machine; `run_in` makes a command run on it."""

    def __init__(self, folder: Path) -> None:
        self.sys, self.dev = folder / "sys", folder / "dev"
        self._folder = folder
        self._minor = 128
        for made in (self.sys / "class", self.dev):
            made.mkdir(parents=True)

    def write(self, name: str, text: object) -> Path:
        """Write a file of sysfs."""
        file = self.sys / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    def add_pci(self, bus_id: str, *, numa_node: int = 0, **files: object) -> Path:
        """Add a PCI device; `__` in a file's name stands for `/`."""
        place = f"devices/pci{bus_id[:7]}/{bus_id}"
        for name, text in {"numa_node": numa_node, **files}.items():
            self.write(f"{place}/{name.replace('__', '/')}", text)
        link = self.sys / "bus/pci/devices" / bus_id
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(self.sys / place, link.parent))
        return self.sys / place

    def add_processors(self, nodes: Sequence[Sequence[int]]) -> None:
        """Add NUMA nodes with these processors, each a core of its own, on one socket."""
        for node, cpus in enumerate(nodes):
            self.write(f"devices/system/node/node{node}/cpulist", ",".join(map(str, cpus)))
            for cpu in cpus:
                self.write(f"devices/system/cpu/cpu{cpu}/topology/physical_package_id", 0)
                self.write(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", cpu)

    def add_cpu_node(self) -> None:
        """Add what KFD lists first: the processors."""
        self.write("class/kfd/kfd/topology/nodes/0/gpu_id", 0)
        self.write("class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 8\nsimd_count 0")
        (self.dev / "kfd").touch()

    def add_amd(self, node: int, bus_id: str, *, unique_id: int = 0, partition: int = 0, **files: Any) -> None:
        """Add a GPU as this node of KFD's topology; `files` are as for `add_pci`."""
        bus, _, rest = bus_id[5:].partition(":")
        device, _, function = rest.partition(".")
        location = int(bus, 16) << 8 | int(device, 16) << 3 | int(function) | partition << 28
        lines = {
            "simd_count": 304, "location_id": location, "domain": int(bus_id[:4], 16), "unique_id": unique_id,
            "drm_render_minor": self._minor, "gfx_target_version": 90402,
        }  # fmt: skip
        self.write(f"class/kfd/kfd/topology/nodes/{node}/gpu_id", 50000 + node)
        text = "\n".join(f"{name} {number}" for name, number in lines.items())
        self.write(f"class/kfd/kfd/topology/nodes/{node}/properties", text)
        if not (self.sys / "bus/pci/devices" / bus_id).exists():
            self.add_pci(bus_id, vendor="0x1002", **files)
        self._add_render()

    def built_for(self, name: str | None) -> Path:
        """Make a package `torch` that says that it was built for `cuda`, `hip` or None; return its folder."""
        folder = self._folder / "site"
        (folder / "torch").mkdir(parents=True, exist_ok=True)
        (folder / "torch/__init__.py").write_text("raise ImportError('a stand-in')\n")
        lines = ["__version__ = '2.13.0'", *(f"{each}: Optional[str] = {'6.4' if each == name else None!r}"
                                            for each in ("cuda", "hip"))]  # fmt: skip
        (folder / "torch/version.py").write_text("\n".join(lines) + "\n")
        return folder

    def run_in(self, *argv: str) -> list[str]:
        """Return what runs a command on this machine; skips the test where namespaces cannot be made."""
        unshare = find_part("unshare")
        require(unshare, "unshare", "apt-get install util-linux")
        return [str(unshare), "--map-root-user", "--mount", "sh", "-c", ENTER, "sh", str(self._folder), *argv]

    def _add_render(self) -> None:
        (self.dev / "dri").mkdir(exist_ok=True)
        (self.dev / f"dri/renderD{self._minor}").touch()
        self._minor += 1
