"""The format of a checkpoint's file, and a copy of the newest one that outlives the process that made it.

The launcher keeps memory for it on each host, through all attempts of a run: DTRAIN_COPY_FILE names it, and
DTRAIN_COPY_NOTE a file beside it. The memory holds the output of `torch.save`. The note exists while the copy is
complete, and describes it. If the process that made a copy ends before the file is durable, the launcher runs the
command in the note, with the memory as its standard input: `main` of this module, which imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import re
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from ddp.checkpoint.atomic_file import make_durably, remove_unfinished, replacing

MAGIC = b"ddp-ckpt"
VERSION = 1
HEAD = struct.Struct("<8sIQQ")  # magic, version, step, bytes before the trailer
NAME = re.compile(r"step-([0-9]+)\.pt")
_CHUNK_BYTES = 4 << 20
_COPY, _NOTE = "DTRAIN_COPY_FILE", "DTRAIN_COPY_NOTE"
# Importing the package would import torch, which takes seconds: an empty module with its path replaces it.
_PROGRAM = (
    "import sys, types; ddp = types.ModuleType('ddp'); ddp.__path__ = [sys.argv[1]]; sys.modules['ddp'] = ddp; "
    "from ddp.checkpoint.kept_copy import main; main(sys.argv[2])"
)
_CRC = struct.Struct("<I")
_ENTRY = struct.Struct("<4s6H3I5H2I")  # of the list at a zip archive's end; the checksum is field 7
_ENTRY_CRC_AT, _LOCAL_CRC_AT, _LOCAL_BYTES = 16, 14, 30
_HAS_DESCRIPTOR, _DESCRIPTOR = 8, b"PK\7\10"


@contextlib.contextmanager
def writing(path: Path, step: int) -> Iterator[Stream]:
    """Open the file of a checkpoint for `torch.save`; at the end of the block it is durable.

    Creates the folder, and first removes temporary files of killed writers in it. A file of the same step is replaced.
    Raises OSError, and then leaves nothing.
    """
    make_durably(path.parent)
    remove_unfinished(path.parent, NAME)
    with replacing(path) as file:
        stream = Stream(file)
        yield stream
        stream.write(HEAD.pack(MAGIC, VERSION, step, stream.length))
        stream.write(stream.sha.digest())
        if stream.error is not None:
            raise stream.error


class Stream:
    """A file for torch's zip writer, which hashes the data and keeps the first error until the end.

    torch's C++ writer replaces an exception by another one, which hides the first.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha = hashlib.sha256()
        self.length = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        with memoryview(data).cast("B") as whole:  # an error's traceback would keep the memory otherwise
            if self.error is None:
                try:
                    self._file.write(whole)
                except OSError as error:
                    self.error = error
                self.sha.update(whole)
                self.length += len(whole)
            return len(whole)

    def flush(self) -> None:
        """Leave it to the fsync at the end."""


@dataclass(frozen=True)
class Note:
    """The note of a complete copy: its file, its step, and the process and attempt that made it.

    `argv` is the command that writes the file, empty once that is durable; `key` differs between any two copies.
    """

    path: str
    step: int
    pid: int
    attempt: int
    key: str
    argv: tuple[str, ...]

    @classmethod
    def new(cls, path: Path, step: int, attempt: int) -> Note:
        argv = (sys.executable, "-I", "-c", _PROGRAM, str(Path(__file__).parents[1]), os.environ[_NOTE])
        return cls(str(path), step, os.getpid(), attempt, os.urandom(16).hex(), argv)

    def done(self) -> Note:
        """Return the note for a copy whose file is durable."""
        return replace(self, argv=())

    def put(self, path: Path) -> None:
        """Write the note atomically. Raises OSError."""
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(asdict(self)), encoding="utf-8", errors="surrogateescape")
        part.replace(path)


def copy_path() -> Path | None:
    """Return the path of the launcher's memory for a copy on this host; None if there is none."""
    return Path(os.environ[_COPY]) if os.environ.get(_COPY) and os.environ.get(_NOTE) else None


def note_path() -> Path:
    return Path(os.environ[_NOTE])


def find(path: Path | None = None) -> Note | None:
    """Return the note of the copy on this host; None if there is no complete copy."""
    try:
        text = (path or note_path()).read_text(encoding="utf-8", errors="surrogateescape")
        note = Note(**json.loads(text))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return replace(note, argv=tuple(note.argv))


def writes_for_dead(note: Note | None) -> bool:
    """Return whether the program that writes the file of an ended process uses the memory."""
    return note is not None and bool(note.argv) and not Path(f"/proc/{note.pid}").exists()


def lock(descriptor: int) -> bool:
    """Lock the memory as long as the open file lives; return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_file(memory: int, note: Note) -> None:
    """Write the copy in the open file `memory` to its file, as `writing` does."""
    with mmap.mmap(memory, 0) as mapped, memoryview(mapped) as data, writing(Path(note.path), note.step) as stream:
        _fill_in_checksums(memory, mapped)
        for begin in range(0, len(data), _CHUNK_BYTES):
            with data[begin : begin + _CHUNK_BYTES] as chunk:
                stream.write(chunk)


def _fill_in_checksums(memory: int, archive: mmap.mmap) -> None:
    """Write the CRC-32 of each record into a zip archive that was made without them."""
    with open(memory, "rb", closefd=False) as file, zipfile.ZipFile(file) as listed:
        at, records = listed.start_dir, listed.infolist()
    for record in records:
        fields = _ENTRY.unpack_from(archive, at)
        name_bytes, extra_bytes = struct.unpack_from("<2H", archive, record.header_offset + 26)
        begin = record.header_offset + _LOCAL_BYTES + name_bytes + extra_bytes
        end = begin + record.file_size
        with memoryview(archive) as data, data[begin:end] as content:
            crc = zlib.crc32(content)
        _CRC.pack_into(archive, at + _ENTRY_CRC_AT, crc)
        _CRC.pack_into(archive, record.header_offset + _LOCAL_CRC_AT, crc)
        if record.flag_bits & _HAS_DESCRIPTOR and archive[end : end + 4] == _DESCRIPTOR:
            _CRC.pack_into(archive, end + 4, crc)
        at += _ENTRY.size + sum(fields[10:13])  # the lengths of name, extra field and comment


def main(name: str) -> None:
    """Write the copy on the standard input to its file, for a process that has ended; `name` is the note's path."""
    note = find(Path(name))
    if note is None:
        return
    try:
        write_file(0, note)
        note.done().put(Path(name))
    except OSError as error:
        sys.exit(f"ddp: the worker that saved step {note.step} ended, and {note.path} could not be written: {error}")
