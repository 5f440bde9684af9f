"""What torch says of itself for `dtrain env`: asked in a process of its own, for dtrain never imports it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from launcher.machine.packages import folder_of, how_tested

__all__ = ["TorchQuestion"]

ASK_S = 60.0  # from a slow network folder torch takes long
# Prints a line of JSON: of each backend that this torch has its version, where it tells, and how many devices it sees.
_CODE = """
import sys
sys.path[:] = [folder for folder in sys.path if folder]  # not the current one, where anybody's json.py may lie
import json
import torch
import torch.distributed as dist
backends, devices = {}, {}
for name in ("nccl", "gloo", "mpi", "xccl", "ucc") if dist.is_available() else ():
    if getattr(dist, f"is_{name}_available", bool)():
        backends[name] = ""
if "nccl" in backends:
    backends["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
for name in ("cuda", "xpu"):
    if module := getattr(torch, name, None):
        devices[name] = module.device_count()
print("\\n" + json.dumps({"backends": backends, "devices": devices}))
"""


class TorchQuestion:
    """The process that is asked, for a `with` block: torch takes seconds to import, in which others can be asked."""

    def __init__(self, torch: str | None) -> None:
        """Start it, if there is a torch of that version to ask."""
        self._version = torch
        self._process: subprocess.Popen[str] | None = None
        if torch is not None and folder_of("torch") is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )

    def __enter__(self) -> TorchQuestion:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, whether it has answered or not."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def answer(self, limit_s: float = ASK_S) -> dict[str, str]:
        """Return what is to be shown. Blocks for at most that long."""
        shown = {"tested": how_tested(self._version)} if self._version else {}
        if self._process is None:
            return shown
        try:
            out, err = self._process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {**shown, "backends": f"not known: torch was not imported within {limit_s:.0f} s"}
        found = _last_line(out)
        if found is None:
            lines = err.strip().splitlines() or [f"exit code {self._process.returncode}"]
            return {**shown, "backends": f"not known: torch cannot be imported: {lines[-1][:200]}"}
        devices = [f"{count} {name}" for name, count in found["devices"].items() if count]
        return {
            **shown,
            "backends": ", ".join(f"{name} {version}".strip() for name, version in found["backends"].items()) or "none",
            "devices that it sees": ", ".join(devices) or "none but the processors",
        }


def _last_line(text: str) -> dict[str, Any] | None:
    """Return the JSON of the last line; others may come from what torch loads."""
    try:
        found = json.loads((text.strip().splitlines() or [""])[-1])
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"backends", "devices"} <= found.keys() else None
