"""A server's snapshots: its values and its optimizer's state, written as checkpoints are, in a folder of its own.

Called by the server. A snapshot is copied at once and written by a thread, so the workers do not wait for the disk.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddp.checkpoint import file as checkpoint_file
from ddp.errors import CheckpointError, ParameterServerError
from ddp.monitoring.interrupts import has_started
from ddp.monitoring.progress import count_checkpoint
from ddp.torch_internals import tree_map_only

_KEEP = 2


class Snapshots:
    """The snapshots of one server in `folder`/server-N, with the same `layout`. One thread writes them in order.

    `step` is that of the last one, 0 if there is none.
    """

    def __init__(self, folder: str | os.PathLike[str], server: int, layout: str) -> None:
        self.step = 0
        self._folder = Path(folder) / f"server-{server}"
        self._layout = layout
        self._server = server
        self._writer: threading.Thread | None = None
        self._broken: set[str] = set()

    def whole_steps(self) -> list[int]:
        """Read all snapshots; return the steps of those that are complete. Prints which ones it skips."""
        steps = []
        for step, path in checkpoint_file.newest_first(self._folder):
            try:
                with open(path, "rb") as file:
                    checkpoint_file.verify(file)
                steps.append(step)
            except (CheckpointError, OSError) as error:
                self._broken.add(path.name)
                print(f"parameter server {self._server}: skipping {path}: {error}", file=sys.stderr, flush=True)
        return steps

    def load(self, step: int) -> dict[str, Any]:
        """Return the snapshot of `step`. Raises ParameterServerError if there is none or its layout differs."""
        problem = "cannot be read"
        for found, path in checkpoint_file.newest_first(self._folder):
            if found == step:
                state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
                if state["digest"] == self._layout:
                    self.step = step
                    return state
                problem = "is of another model, number of servers or settings"
        raise ParameterServerError(
            f"parameter server {self._server}: the snapshot of step {step} in {self._folder} {problem}: choose another "
            "folder, or remove it"
        )

    def write(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy `state` and start writing it; blocks only while the last one is still being written."""
        self.wait()
        self.step = step
        copied = tree_map_only(
            torch.Tensor, lambda tensor: tensor.detach().clone(), {"step": step, "digest": self._layout, **state}
        )
        self._writer = threading.Thread(target=self._write, args=(step, copied), name="snapshot")
        self._writer.start()

    def _write(self, step: int, state: Mapping[str, Any]) -> None:
        try:
            checkpoint_file.write(self._folder, step, state)
            checkpoint_file.prune(self._folder, _KEEP, self._broken)
            count_checkpoint()
        except OSError as error:  # such as a full disk: training continues, and earlier snapshots remain
            message = f"parameter server {self._server}: no snapshot of step {step}: {error}"
            print(message, file=sys.stderr, flush=True)

    def wait(self) -> None:
        """Wait until the last snapshot is written."""
        if self._writer is not None:
            if has_started(self._writer):
                self._writer.join()
            self._writer = None
