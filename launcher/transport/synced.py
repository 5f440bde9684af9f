"""Sends the code and environment of a run over the stream to a host, before the agent speaks there (`--sync`).

The stream's command starts the receiver (sync/receiver.py), whose code is the first that goes in; it asks for what the
host lacks, and becomes the agent, with which the stream goes on. One `Outgoing` serves all hosts of a run: files are
found once, and what several hosts lack is read and compressed once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import marshal
import os
import shlex
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from importlib.abc import InspectLoader
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from launcher.errors import DtrainError, HostError, ProtocolError, StreamError, UsageError
from launcher.frozen import dataclass
from launcher.hosts.host import Host
from launcher.placement.job_spec import CommandKind, JobSpec
from launcher.protocol.message import MAX_NOISE_BYTES
from launcher.sync import receiver
from launcher.sync.contents import Block, Blocks, Pace, compressed_block
from launcher.sync.tree import Code, find_code, root_of, some
from launcher.transport.not_started import why_not_started
from launcher.transport.setup import after_setup, why_setup_failed
from launcher.transport.stream import Stream
from launcher.transport.sync_progress import Progress

if TYPE_CHECKING:
    from launcher.sync.environment import Environment

STALL_S = 60.0  # without a byte in either direction
END_S = 2.0  # for a receiver
_MESSAGE_BYTES = 1 << 26
_PIECE_BYTES = (1 << 15) - 64  # what paramiko puts into one packet: of more, it copies the rest for each
_FOUND_FOR = 4  # runs of one process

# Runs the first of the given interpreters that exists. By sh, since a login shell may be any.
_START = """for p in {pythons}; do command -v "$p" >/dev/null 2>&1 && exec "$p" -S -c "$@"; done; exit 127"""
# Reads the receiver from standard input, no byte further. One line without quotes that csh or fish would change. The
# home folder, where it starts, is no place for modules. 4 is for another version of Python.
_BOOT = (
    "import sys;sys.path[:]=filter(None,sys.path);import marshal,os,signal,zlib;signal.alarm({quiet_s});"
    'sys.version_info[:2]=={version} or sys.exit(os.write(1,b" %d.%d"%sys.version_info[:2]) and 4);'
    "os.write(1,bytes({begin}));b=bytearray();"
    "[b.extend(os.read(0,{size}-len(b)) or sys.exit(3)) for _ in iter(lambda:len(b)<{size},False)];"
    'exec(marshal.loads(zlib.decompress(b)),{{"__name__":"__main__"}})'
)
_OTHER_PYTHON, _NO_PYTHON = 4, 127
# Compiled, since that takes a host as long as starting Python. Once, since marshal may write the same code differently.
RECEIVER = zlib.compress(marshal.dumps(cast(InspectLoader, receiver.__loader__).get_code(receiver.__name__)), 1)


def receiver_command(spec: JobSpec, args: Sequence[str] = ()) -> list[str]:
    """Return the command that starts the receiver on a host, by the first Python that is there.

    `args` are those of Python for what the receiver becomes: `-m launcher.agent`.
    """
    boot = _BOOT.format(
        version=sys.version_info[:2], begin=list(receiver.BEGIN), size=len(RECEIVER), quiet_s=receiver.QUIET_S
    )
    start = ["sh", "-c", _START.format(pythons=shlex.join(pythons(spec))), "sh", boot, *args]
    return after_setup(spec, [*spec.agent_prefix, *start])


def pythons(spec: JobSpec) -> list[str]:
    """Return the interpreters to try on a host: the one that the user has named, else the likely ones."""
    if spec.python != sys.executable:
        return [spec.python]
    base = getattr(sys, "_base_executable", "") or sys.executable
    return [*dict.fromkeys((sys.executable, base, "python{}.{}".format(*sys.version_info[:2]), "python3"))]


@functools.lru_cache(_FOUND_FOR)
def _outgoing(run_id: str) -> Outgoing:
    return Outgoing()


def outgoing_of(spec: JobSpec) -> Outgoing:
    """Return what a run sends: the same for all connectors of the run. Its files are found in the background."""
    outgoing = _outgoing(spec.run_id)
    outgoing.start(spec)
    return outgoing


@dataclass(frozen=True)
class _Found:
    code: Code
    environment: Environment | None
    offer: bytes  # the first message to a receiver


class Outgoing:
    """The files of a run, for all of its hosts. Any thread may call it; the files are found by the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: _Found | DtrainError | None = None
        self._blocks: dict[tuple[str, tuple[int, ...]], Blocks] = {}
        self._progress = Progress()
        self.trees: dict[str, str] = {}  # of the code, by host
        self._starts = threading.Lock()  # never released

    def start(self, spec: JobSpec) -> None:
        """Find the files in the background, once."""

        def find() -> None:
            with contextlib.suppress(DtrainError):  # for who waits for the files
                self._find(spec)

        if self._starts.acquire(blocking=False):
            threading.Thread(target=find, name="find code", daemon=True).start()

    @property
    def progress(self) -> Progress:
        return self._progress

    def begin(self, host: Host, stream: Stream, spec: JobSpec) -> SyncedStream:
        """Send a host what it lacks for the run; return the stream to the agent.

        Blocks while bytes flow, at most STALL_S more, and less than the start may take. Raises HostError.
        """
        exchange = Exchange(host, stream, spec, stall_s=min(STALL_S, 0.75 * spec.start_timeout_s))
        watch = threading.Thread(target=exchange.watch, name=f"sync {host.name}", daemon=True)
        watch.start()
        try:
            exchange.write(RECEIVER)
            exchange.write(self._find(spec).offer)
            while "ready" not in (message := exchange.read_message()):
                self._answer(message, exchange, spec)
            trees = tuple(map(str, message["ready"]))
            self.trees[host.name] = trees[0]
            return SyncedStream(stream, exchange.rest, trees)
        except DtrainError as error:
            give_up(stream)
            raise error if isinstance(error, HostError) else HostError(host.name, str(error)) from error
        finally:
            exchange.over.set()

    def _answer(self, message: dict[str, Any], exchange: Exchange, spec: JobSpec) -> None:
        """Send what the receiver asks for: the list of the environment's files, or files."""
        found = self._find(spec)
        part, numbers = message.get("part"), message.get("need")
        if part == "environment" and found.environment is not None:
            if numbers is None:
                exchange.write(message_block(found.environment.listing))
                return
            files = found.environment.files
        else:
            part, files = "code", found.code.files
        if not isinstance(numbers, list) or not all(isinstance(n, int) and 0 <= n < len(files) for n in numbers):
            raise ProtocolError(f"the receiver asks for {str(numbers)[:80]}")
        with self._lock:
            blocks = self._blocks.setdefault((part, tuple(numbers)), Blocks([files[n] for n in numbers]))
        self._progress.starts(exchange.host.name, blocks.size)
        for block in blocks.all():
            exchange.write_block(block)
            self._progress.sent(exchange.host.name, len(block.data))
        self._progress.ends(exchange.host.name)

    def _find(self, spec: JobSpec) -> _Found:
        """Find the files, once. Raises UsageError."""
        with self._lock:
            if self._found is None:
                try:
                    self._found = _find(spec)
                    self._progress.notes(_notes(self._found))
                except DtrainError as error:
                    self._found = error
                except OSError as error:  # a folder that does not exist, or went away
                    self._found = UsageError(f"--sync: {error.filename} cannot be read: {error.strerror}")
            if isinstance(self._found, DtrainError):
                raise self._found
            return self._found


def _find(spec: JobSpec) -> _Found:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dtrain" / "hashes"
    dtrain = Path(__file__).absolute().parents[2]
    packages = [str(dtrain / name) for name in ("launcher", "ddp")]
    environment = None
    if "env" in spec.sync:
        from launcher.sync.environment import find_environment

        environment = find_environment(cache)
    script = ""
    if "code" in spec.sync and spec.command.kind is CommandKind.SCRIPT and not spec.command.is_standard_input:
        script = os.path.normpath(os.path.join(spec.workdir, spec.command.target))
    root = root_of(spec.command, spec.workdir)
    roots = [root] if "code" in spec.sync else []
    more = list(environment.editable) if environment is not None else []
    if roots and spec.command.kind is CommandKind.FUNCTION:
        folders = filter(os.path.isdir, dict(spec.export)["PYTHONPATH"].split(os.pathsep))
        more += [path for path in folders if os.path.basename(path) not in receiver.PACKAGES]
    roots += [path for path in dict.fromkeys(more) if path not in (root, str(dtrain))]
    code = find_code(roots, packages, cache=cache, left_out={str(spec.log_dir.absolute())}, named=script)
    offer = {
        "run": spec.run_id,
        "key": hashlib.sha256(os.fsencode(code.root)).hexdigest()[:16],
        "files": [file.as_list() for file in code.files],
        "links": code.links,
        "folders": [str(spec.workdir)] if _is_moved(spec, code) else [],
        "dtrain": str(dtrain),
        "environment": environment.digest if environment is not None else "",
        "site": environment.site if environment is not None else (),
        "libc": environment.libc if environment is not None else (),
        "platform": _platform() if environment is not None else "",
    }
    return _Found(code, environment, message_block(json.dumps(offer).encode()))


def _notes(found: _Found) -> list[str]:
    """Return what the user should know of what is not sent."""
    unsent = found.environment.unrecorded if found.environment is not None else ()
    text = f"not sent, since no RECORD says which files they have: {some(unsent)}; install them with pip, here or there"
    return [*found.code.notes, *([text] if unsent else [])]


def _is_moved(spec: JobSpec, code: Code) -> bool:
    """Return whether the working directory on the hosts is one in the tree: not one beside it that the user named."""
    workdir = str(spec.workdir)
    return "code" in spec.sync and (not spec.names_workdir or f"{workdir}/".startswith(code.root + "/"))


def _platform() -> str:
    import sysconfig

    return sysconfig.get_platform()


def message_block(data: bytes) -> bytes:
    data = zlib.compress(data, 1)
    if len(data) > _MESSAGE_BYTES:
        raise ProtocolError(f"--sync: a list of files has {len(data)} bytes, which is over the limit")
    return compressed_block(data)


class Exchange:
    """The messages with the receiver on one host, before the agent begins."""

    def __init__(self, host: Host, stream: Stream, spec: JobSpec, *, stall_s: float = STALL_S) -> None:
        self.host = host
        self.rest = b""  # what was read and not used
        self.over = threading.Event()
        self._stream = stream
        self._spec = spec
        self._stall_s = stall_s
        self._begun = self._stalled = False
        self._pace = Pace()
        self._moved_at = time.monotonic()

    def watch(self) -> None:
        """Give the stream up once no byte has moved for long, which ends a blocked call."""
        while not self.over.wait(1.0):
            if time.monotonic() - self._moved_at > self._stall_s:
                self._stalled = True
                self._stream.finish(0.0)
                return

    def write(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                self._stream.write(bytes(view[:_PIECE_BYTES]))
                view = view[_PIECE_BYTES:]
                self._moved_at = time.monotonic()
        except StreamError:
            while True:  # the receiver may have said why
                self.read_message()

    def write_block(self, block: Block) -> None:
        frame = self._pace.frame(block)
        began = time.monotonic()
        self.write(frame)
        self._pace.wrote(len(frame), time.monotonic() - began)

    def read_message(self) -> dict[str, Any]:
        """Return the next message. Raises HostError if it is an error, or there is none."""
        while not self._begun:
            before, begin, after = self.rest.partition(receiver.BEGIN)
            if begin:
                self.rest, self._begun = after, True
            elif len(before) > MAX_NOISE_BYTES:
                raise HostError(self.host.name, "over 1 MiB of other text precedes the receiver's greeting")
            else:
                self._read_more()
        while len(self.rest) < receiver.LENGTH.size or len(self.rest) < self._end():
            self._read_more()
        end = self._end()
        try:
            message = json.loads(self.rest[receiver.LENGTH.size : end])
        except ValueError as error:
            raise HostError(self.host.name, f"the receiver's message is no JSON: {error}") from error
        self.rest = self.rest[end:]
        if not isinstance(message, dict) or "error" in message:
            raise HostError(self.host.name, str(message.get("error") if isinstance(message, dict) else message))
        return message

    def read_exactly(self, size: int) -> Iterator[bytes]:
        """Yield the next bytes, as they come."""
        while size:
            if not self.rest:
                self._read_more()
            data, self.rest = self.rest[:size], self.rest[size:]
            size -= len(data)
            yield data

    def _end(self) -> int:
        length = int(receiver.LENGTH.unpack_from(self.rest)[0])
        if length > _MESSAGE_BYTES:
            raise HostError(self.host.name, f"the receiver's message of {length} bytes is over the limit")
        return receiver.LENGTH.size + length

    def _read_more(self) -> None:
        try:
            data = self._stream.read()
        except StreamError:
            data = b""
        self._moved_at = time.monotonic()
        if not data:
            raise HostError(self.host.name, self._why_ended())
        self.rest += data

    def _why_ended(self) -> str:
        status, words = self._stream.finish(2.0)
        if why := why_setup_failed(words):
            return why
        wanted = "Python {}.{}".format(*sys.version_info[:2])
        if status == _OTHER_PYTHON and not self._begun:
            *_, found = ["another", *self.rest.decode("utf-8", "replace").split()]
            return f"it is Python {found} there, and {wanted} here; install {wanted} there, or name one with --python"
        if status == _NO_PYTHON and not (words and self._spec.agent_prefix):
            tried = ", ".join(pythons(self._spec))
            return f"there is no Python there ({tried}); install {wanted} there, or name one with --python"
        if self._begun:
            said = [line.strip() for line in words.splitlines() if line.strip()]
            how = "the connection closed" if status is None else f"the receiver ended with status {status}"
            if self._stalled:
                how = f"no byte arrived for {self._stall_s:g} s"
            return f"{how} while files were sent{': ' + said[-1] if said else ''}; start the run again: it goes on"
        if self._stalled:
            wait = "does a start-up file of its shell, such as .bashrc, wait for something?"
            return f"let us in, but no byte arrived for {self._stall_s:g} s; {wait}"
        return why_not_started(self._spec.python, status, words, self.rest)


def give_up(stream: Stream) -> None:
    """End a stream to a receiver. It ends by itself then; an srun that was killed would keep its step for long."""
    with contextlib.suppress(StreamError):
        stream.end()
    stream.finish(END_S)


class SyncedStream:
    """The stream to an agent that has followed the receiver. A `Stream`.

    `trees` are the folders there below which the files have their paths of here.
    """

    def __init__(self, stream: Stream, begun: bytes, trees: tuple[str, ...]) -> None:
        self._stream = stream
        self._begun = begun
        self.trees = trees
        self.our_address = stream.our_address

    def read(self) -> bytes:
        if self._begun:
            data, self._begun = self._begun, b""
            return data
        return self._stream.read()

    def write(self, data: bytes) -> None:
        self._stream.write(data)

    def end(self) -> None:
        self._stream.end()

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        return self._stream.finish(wait_s)
