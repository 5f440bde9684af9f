"""Snapshots of a State during a run, from which `dtrain replay` begins.

`dtrain run --replayable K` sets DTRAIN_REPLAYABLE=K and DTRAIN_REPLAYABLE_FOLDER. Every K steps of the StepLoader in
the State, rank 0 copies all of the State at a commit, and a thread writes the copy there; the two newest stay. A file's
name has the number of the last step before it. The launcher removes the folder.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from ddp import rng
from ddp.checkpoint import file as checkpoint_file
from ddp.checkpoint.copies import HostCopy
from ddp.checkpoint.state import check_plain
from ddp.data.step_loader import StepLoader
from ddp.errors import CheckpointError, DdpError
from ddp.torch_internals import unwrapped

_EVERY, _FOLDER = "DTRAIN_REPLAYABLE", "DTRAIN_REPLAYABLE_FOLDER"
_KEPT = 2


class Snapshots:
    """Snapshots of one State, with these objects and values. Owns the thread that writes; it ends with the process."""

    def __init__(self, objects: Mapping[str, Any], values: MutableMapping[str, Any]) -> None:
        self._objects, self._values = objects, values
        self._every: int | None = None  # 0: none are taken
        self._next = 0  # step
        self._thread: threading.Thread | None = None

    def committed(self) -> None:
        """Take a snapshot if it is due. Blocks for the copy."""
        if self._every is None:
            self._every = int(os.environ.get(_EVERY) or 0)
        if not self._every:
            return
        loader = self._loader()
        if loader is None or not Path(os.environ[_FOLDER]).is_dir():
            what = "a ddp.StepLoader in the State" if loader is None else f"that this host sees {os.environ[_FOLDER]}"
            self._give_up(f"it needs {what}")
        elif loader.steps >= self._next and (self._thread is None or not self._thread.is_alive()):
            self._next = (loader.steps // self._every + 1) * self._every
            if not dist.is_initialized() or dist.get_rank() == 0:
                self._take(loader.steps)

    def _take(self, step: int) -> None:
        copy = HostCopy()
        try:
            objects = {name: dict(_plain(each).state_dict()) for name, each in self._objects.items()}
            content: dict[str, Any] = {"objects": objects, "values": dict(self._values), "random": rng.capture()}
            check_plain(content)
            content = copy.of(content)
        except DdpError as error:
            self._give_up(str(error))
            return
        self._thread = threading.Thread(
            target=self._write, args=(Path(os.environ[_FOLDER]), step, copy, content), name="snapshot", daemon=True
        )
        self._thread.start()

    def _write(self, folder: Path, step: int, copy: HostCopy, content: Mapping[str, Any]) -> None:
        try:
            copy.wait()
            checkpoint_file.write(folder, step, content)
            checkpoint_file.prune(folder, _KEPT, ())
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        self._every = 0
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"ddp: --replayable takes no snapshots: {why}", file=sys.stderr, flush=True)

    def load(self, path: str) -> None:
        """Load a snapshot into the State's objects and values. Raises CheckpointError, OSError."""
        with open(path, "rb") as file:
            checkpoint_file.verify(file)
            content = checkpoint_file.read(file)
        if content["objects"].keys() != self._objects.keys():
            raise CheckpointError(
                f"{path} has {', '.join(content['objects'])}, and this State {', '.join(self._objects)}: the script is "
                "not that of the run"
            )
        rng.restore(content["random"])
        for name, each in self._objects.items():
            _plain(each).load_state_dict(content["objects"][name])  # a StepLoader also sets random numbers
        self._values.clear()
        self._values.update(content["values"])

    def _loader(self) -> StepLoader | None:
        return next((each for each in self._objects.values() if isinstance(each, StepLoader)), None)


def _plain(part: Any) -> Any:
    return unwrapped(part) if isinstance(part, nn.Module) else part
