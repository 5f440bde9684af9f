"""Torch's flight recorder of each worker: switched on for any script, asked while it runs, read after its end.

torch records the newest collectives of a process in memory, whatever the backend, and its watchdog for NCCL writes them
to a file when it ends the process. A running worker is asked through a FIFO, and so writes them before it fails by an
exception: see workers/collectives.py. Both are data of the user's process, so they are checked, and of a pickle only
plain containers are read.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from launcher.agent.workers.worker import Files, Worker
from launcher.protocol.reports import Collective, Collectives

_ENTRIES = "2000"  # as torch has it by default from 2.9 on
_NEWEST = 16  # collectives of a group that are done; and as many as
_MOST = 128  # of all of them
_MAX_BYTES = 64 << 20
_TENSORS = 4  # named in a call
# Variables with their values, each with its former name, which the user may have set.
_RECORD = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMP = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
_DUMP_TO = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def recorder_variables(env: Mapping[str, str], files: Files) -> dict[str, str]:
    """Return the variables that make torch record and write; none that the user has set, under its former name too."""
    wanted = ((_RECORD, _ENTRIES), (_DUMP, "1"), (_DUMP_TO, str(files.dump)))
    return {names[0]: value for names, value in wanted if not any(name in env for name in names)}


def ask(files: Files) -> bool:
    """Ask a worker for its record; return whether it can answer: `version` then changes, soon."""
    try:
        fifo = os.open(files.asked, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # it has no process group, or is no Python of ours
        return False
    try:
        os.write(fifo, b"?")
    except OSError:  # it has not read earlier questions
        return False
    finally:
        os.close(fifo)
    return True


def version(files: Files) -> object:
    """Return what differs between two records that a worker has written, None before the first.

    None is ever removed: it may be what a worker wrote before it failed, which then cannot answer any more.
    """
    try:
        found = os.stat(files.collectives)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def read_of_failed(worker: Worker) -> Collectives | None:
    """Return what a worker has left that has failed by itself; None of any other."""
    return None if worker.provoked or not worker.status else read(worker.files)


def read(files: Files) -> Collectives | None:
    """Return what a worker has written, or torch in it; None if there is nothing, or it cannot be read."""
    dumps = sorted(files.dump.parent.glob(f"{files.dump.name}*"))
    for path, parse in ((files.collectives, _parse_answer), *((dump, _parse_dump) for dump in dumps)):
        try:
            with open(path, "rb") as file:
                data = file.read(_MAX_BYTES)
            named, traces = parse(data)
            entries = [entry for trace in traces for entry in trace.get("entries", ()) if not entry.get("is_p2p")]
            groups = sorted({_title(*each) for each in named})
            return Collectives(groups, _newest(entries, groups))
        except FileNotFoundError:
            continue
        except Exception as error:  # any: what a pickle makes has attributes of its own choice
            print(f"dtrain: {path} cannot be read: {type(error).__name__}: {error}", file=sys.stderr)
    return None


_Entry = Mapping[str, Any]
_Parsed = tuple[list[tuple[str, str]], Sequence[Mapping[str, Any]]]  # name and description of groups; torch's traces


def _parse_answer(data: bytes) -> _Parsed:
    answer = json.loads(data)
    return [(str(name), str(described)) for name, described in answer["groups"]], answer["traces"]


def _parse_dump(data: bytes) -> _Parsed:
    import io
    import pickle

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise pickle.UnpicklingError(f"{module}.{name} is no plain container")

    trace = Plain(io.BytesIO(data)).load()
    config = trace["pg_config"].values()
    return [(str(group["name"]), str(group["desc"])) for group in config if group["name"]], [trace]


def _title(name: str, described: str) -> str:
    """Return the name of a group in texts, by which ranks of the same group have the same."""
    if described == "default_pg":
        return described
    return name if described in ("", "undefined") else f"{described} ({name})"


def _newest(entries: Sequence[_Entry], groups: Collection[str]) -> list[Collective]:
    """Return the calls in these groups that are not done, and the last of each group that are."""
    of_entries = [(_title(*entry["process_group"]), entry) for entry in entries]
    numbers = {title: entry["pg_id"] for title, entry in of_entries}  # the last: an earlier group had the same name
    kept: list[Collective] = []
    done: dict[str, int] = {}
    for title, entry in reversed(of_entries):
        if title not in groups or entry["pg_id"] != numbers[title]:
            continue
        call = _collective(title, entry)
        done[title] = done.get(title, 0) + call.done
        if not call.done or done[title] <= _NEWEST:
            kept.append(call)
    return kept[:_MOST][::-1]


def _collective(title: str, entry: _Entry) -> Collective:
    shapes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    pairs = zip(dtypes[:_TENSORS], shapes, strict=False)
    tensors = [f"{dtype}[{', '.join(map(str, shape))}]" for dtype, shape in pairs]
    more = [f"and {len(dtypes) - _TENSORS} more"] if len(dtypes) > _TENSORS else []
    return Collective(
        group=title,
        number=int(entry["collective_seq_id"]),
        operation=str(entry["profiling_name"]).rpartition(":")[2],
        tensors=", ".join(tensors + more),
        elements=sum(math.prod(map(int, shape)) for shape in shapes),
        done=bool(entry["retired"]) or entry["state"] == "completed",
    )
