"""Writes what torch's flight recorder has of this worker's collectives, when the agent asks, and when it fails.

bootstrap.py loads this file in a worker once torch's process groups are imported. Nothing happens until the script has
a process group. A thread then waits for questions in a FIFO of the agent, which has `.asked` at its name's end, and
answers in a file, `.collectives`. It is no signal handler, since the main thread may wait in C++ for ever. The answer:

    {"groups": [[name, description], ...], "traces": [what torch has, ...]}
"""

from __future__ import annotations

import _thread
import functools
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MADE = "_update_default_pg"  # torch calls it when the default process group has been made or closed
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # those that this torch was built with: of gloo, of NCCL


class Recorder:
    """`error_file` is the beginning of the names of this worker's files."""

    def __init__(self, groups: Any, error_file: str) -> None:
        self._groups = groups
        self._path = error_file
        self._pid = os.getpid()
        self._is_on = False
        made = getattr(groups, _MADE, None)
        if made is None or not os.path.exists(f"{error_file}.asked"):
            return

        @functools.wraps(made)
        def update_default_pg(group: Any) -> None:
            made(group)
            if group is not None and not self._is_on and os.getpid() == self._pid:
                self._is_on = True
                _thread.start_new_thread(self._answer, ())  # threading would list it among the script's own

        setattr(groups, _MADE, update_default_pg)

    def write(self) -> None:
        """Write the record, if the script has a process group, or has had one."""
        if not self._is_on or os.getpid() != self._pid:
            return
        try:
            self._write()
        except Exception as error:  # a full disk, or a torch that keeps its groups in another way
            self._is_on = False
            print(f"dtrain: the collectives of this worker cannot be written: {error}", file=sys.stderr)

    def _write(self) -> None:
        import json

        groups = [(name, group.group_desc) for group, name in list(self._groups._world.pg_names.items())]
        dumps = [getattr(sys.modules["torch._C._distributed_c10d"], name, None) for name in _DUMPS]
        traces = b", ".join(dump() for dump in dumps if dump is not None)
        with open(f"{self._path}.collectives.new", "wb") as file:
            file.write(b'{"groups": %b, "traces": [%b]}' % (json.dumps(groups).encode(), traces))
        os.replace(f"{self._path}.collectives.new", f"{self._path}.collectives")

    def _answer(self) -> None:
        questions = os.open(f"{self._path}.asked", os.O_RDWR | os.O_CLOEXEC)  # with a writer there is no end of file
        while os.read(questions, 4096):
            self.write()
