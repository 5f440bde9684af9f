"""The debugger's part in the worker: connects to the agent, and through it to the command.

Loaded from its file, in the script's process: by the handler of bootstrap.py, or by sys.remote_exec. So it imports
nothing of the launcher, and no error here may end the process: whatever happens to the debugger, the command or the
connection, the script continues.

The agent first sends a line of JSON that names the debugger, and the folders below which sent files have their paths of
the user's machine (`dtrain run --sync`): the user sees those. For pdb, the answers are lines too: {"text": ...} is
shown, {"prompt": ...} asks for a line, {"end": ...} means that the script continues without the debugger. For debugpy,
the answer is {"ready": {PATH HERE: PATH THERE}}; from then on its own protocol is spoken.
"""

from __future__ import annotations

import contextlib
import json
import os
import pdb
import socket
import struct
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from typing import Any

_PEER = struct.Struct("3i")  # pid, uid, gid
_PIECE = 16 << 10  # characters of a text in one line of JSON
_LINE_BYTES = 64 << 10
_CONNECT_S = 10.0
_DEBUGPY_S = 60.0  # to connect: it imports much, and the host may be busy
_PAUSE_S = 0.02
_GOES_ON = "goes on without the debugger"
_AGENT_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

_current: _Debugger | None = None
_serving: threading.Thread | None = None


def open_debugger(path: str, frame: types.FrameType | None) -> None:
    """Open the debugger that the agent offers at a Unix socket, in the main thread, which was interrupted at `frame`.

    Do nothing if no agent offers one, except that an open debugger that lost its connection is closed.
    """
    if _current is not None:
        _current.close_if_lost()
        return
    connection = _connect(path)
    if connection is None or frame is None:
        return
    try:
        channel = _Lines(connection)
        said = json.loads(channel.read_line() or "{}")
        if said.get("debugger") == "debugpy":
            _begin_debugpy(channel, said["trees"])
        elif said:
            _Debugger(channel, said["trees"]).begin(frame)
    except Exception as error:  # of the debugger; exceptions of the script's own signal handlers are the script's
        with contextlib.suppress(OSError):
            channel.say(end=f"the debugger could not be opened: {type(error).__name__}: {error}")
        channel.close()


def _connect(path: str) -> socket.socket | None:
    """Connect to the agent; return None if it offers nothing, or belongs to another user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connection.settimeout(_CONNECT_S)
            connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")  # the whole path may be too long
        finally:
            os.close(folder)
        _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid == os.geteuid():
            connection.settimeout(None)
            return connection
    except OSError:
        pass
    connection.close()
    return None


class _Lines:
    """The connection to the command, as a file for pdb. A lost connection is an end of input, never an error."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_lost = False
        self.was_interrupted = False
        self._unsent = ""
        self._unread = b""

    def write(self, text: str) -> int:
        self._unsent += text
        while len(self._unsent) > _PIECE or "\n" in self._unsent:  # the rest may be a prompt
            end = min(self._unsent.rfind("\n") + 1 or _PIECE, _PIECE)
            piece, self._unsent = self._unsent[:end], self._unsent[end:]
            self.say(text=piece)
        return len(text)

    def flush(self) -> None:
        """Do nothing: an incomplete line is shown as the prompt of the next line that is read."""

    def isatty(self) -> bool:
        return False

    def say(self, **what: str | dict[str, str]) -> None:
        if not self.is_lost:
            try:
                self._uninterrupted(lambda: self.connection.sendall(json.dumps(what).encode() + b"\n"))
            except OSError:
                self.is_lost = True

    def readline(self) -> str:
        prompt, self._unsent = self._unsent, ""
        self.say(prompt=prompt)
        return self.read_line()

    def read_line(self) -> str:
        while not self.is_lost and b"\n" not in self._unread:
            try:
                data = self._uninterrupted(lambda: self.connection.recv(_LINE_BYTES))
            except OSError:
                data = b""
            self._unread += data
            self.is_lost = not data
        line, newline, self._unread = self._unread.partition(b"\n")
        return (line + newline).decode("utf-8", "replace") if newline else ""

    def _uninterrupted(self, call: Any) -> Any:
        """Call it; a SIGINT takes effect when the debugger is left, since pdb would handle it as its own."""
        while True:
            try:
                return call()
            except KeyboardInterrupt:
                self.was_interrupted = True

    def close(self) -> None:
        self.is_lost = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # children forked meanwhile have it open too
        self.connection.close()


class _Debugger(pdb.Pdb):
    """pdb that never ends the script: quit leaves the debugger, as does `continue` without breakpoints."""

    def __init__(self, channel: _Lines, trees: list[str]) -> None:
        super().__init__(stdin=channel, stdout=channel, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self._channel = channel
        self._trees = trees
        self._before = (sys.gettrace(), [])  # type: tuple[Any, list[tuple[types.FrameType, Any]]]
        self._is_over = False
        rank = os.environ.get("RANK", "?")
        self._who = f"rank {rank}"
        self.prompt = f"(Pdb rank {rank}) "

    def begin(self, frame: types.FrameType) -> None:
        """Show the prompt where the script is now; the user's commands decide whether it is traced from here on."""
        global _current
        _current = self
        try:
            self.reset()
            each: types.FrameType | None = frame
            while each is not None and not (each.f_code.co_filename.startswith(_AGENT_FOLDER) and each is not frame):
                self._before[1].append((each, each.f_trace))
                each.f_trace = self.trace_dispatch
                self.botframe = each
                each = each.f_back
            self.interaction(frame, None)
        except BaseException:  # raised by a signal handler of the script
            self._leave("")
            raise
        if not self._is_over:
            sys.settrace(self.trace_dispatch)

    def interaction(self, *args: Any) -> None:
        super().interaction(*args)
        if self._channel.is_lost or (self.stoplineno == -1 and not self.breaks):
            self._leave(f"{self._who} {_GOES_ON}")
        if self._channel.was_interrupted:
            self._channel.was_interrupted = False
            raise KeyboardInterrupt

    def stop_here(self, frame: types.FrameType) -> bool:
        return not frame.f_code.co_filename.startswith(_AGENT_FOLDER) and super().stop_here(frame)

    def format_stack_entry(self, *args: Any) -> str:
        return self._on_user_s_machine(super().format_stack_entry(*args))

    def message(self, msg: Any) -> None:
        is_place = isinstance(msg, str) and msg.startswith("Breakpoint ")
        super().message(self._on_user_s_machine(msg) if is_place else msg)

    def lookupmodule(self, filename: str) -> str | None:
        """Find a file, also by its path on the user's machine."""
        there = [tree + filename for tree in self._trees if filename.startswith("/")]
        return super().lookupmodule(next(filter(os.path.exists, there), filename))

    def _on_user_s_machine(self, text: str) -> str:
        for tree in self._trees:
            text = text.replace(tree + "/", "/")
        return text

    def default(self, line: str) -> None:
        """Execute a statement in the current frame, whose variables it may set."""
        super().default(line)
        if sys.version_info < (3, 13):  # locals are a copy, written back only in a trace function's own frame
            import ctypes

            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self.curframe), ctypes.c_int(0))

    def do_quit(self, arg: str) -> bool:
        """q(uit)

        Leave the debugger. The script goes on: to end the run, type dtrain stop.
        """
        self.clear_all_breaks()
        self.set_continue()
        return True

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool:
        """EOF

        As quit: the script goes on.
        """
        return self.do_quit(arg)

    def do_run(self, arg: str) -> None:
        """run, restart

        Not here: type dtrain stop and dtrain rerun.
        """
        self.message("a rank is not started again from here; type dtrain stop and dtrain rerun in a shell")

    do_restart = do_run

    def do_interact(self, arg: str) -> None:
        """interact

        Not here: it would read the script's standard input. Type !STATEMENT.
        """
        self.message("it would read the script's standard input; type !STATEMENT instead")

    def set_quit(self) -> None:
        """Leave the debugger: BdbQuit would end the script."""
        self.do_quit("")

    def close_if_lost(self) -> None:
        """Leave if the other end is gone: the script may run for long before it reaches a breakpoint."""
        try:
            is_gone = self._channel.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            is_gone = False
        except OSError:
            is_gone = True
        if is_gone:
            self._channel.is_lost = True
            self._leave("")

    def _leave(self, why: str) -> None:
        global _current
        if self._is_over:
            return
        self._is_over = True
        _current = None
        self.clear_all_breaks()
        tracer, frames = self._before
        sys.settrace(tracer)
        for frame, trace in frames:
            frame.f_trace = trace
        frames.clear()
        self.set_continue_quietly()
        if why:
            self._channel.say(end=why)
        self._channel.close()

    def set_continue_quietly(self) -> None:
        """Stop nowhere any more, even if this is called while the script is traced."""
        self._set_stopinfo(self.botframe, None, -1)  # type: ignore[attr-defined]  # as bdb.set_continue does


def _begin_debugpy(channel: _Lines, trees: list[str]) -> None:
    global _serving
    try:
        debugpy, pydevd = _import_debugpy()
    except ImportError:
        channel.say(end=f"debugpy is not installed for {sys.executable}: {sys.executable} -m pip install debugpy")
        channel.close()
        return
    if _serving is not None:  # perhaps the last editor has just left
        until = time.monotonic() + _CONNECT_S
        while (_serving.is_alive() or pydevd.get_global_debugger() is not None) and time.monotonic() < until:
            time.sleep(_PAUSE_S)
    if pydevd.get_global_debugger() is not None:  # else connect() would return at once, connected to nothing
        channel.say(end="debugpy is in use there already: by the script itself, or by the last editor, still connected")
        channel.close()
        return
    # pydevd connects to a TCP port only. It is open for this one connection, which must come from this process.
    listening = socket.create_server(("127.0.0.1", 0), backlog=1)
    listening.settimeout(_DEBUGPY_S)
    has_failed = threading.Event()
    _serving = _start_untraced(_serve_debugpy, channel, _mappings(trees), listening, pydevd, has_failed)
    try:
        debugpy.configure(subProcess=False)  # else it patches fork and exec for good, and the script's children fail
        debugpy.connect(listening.getsockname())  # returns once an editor is ready, or the channel is lost
    except BaseException:
        has_failed.set()
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # the thread closes it then
        raise


def _import_debugpy() -> tuple[Any, Any]:
    """Import debugpy and its pydevd, without warnings about frozen modules in the script's output."""
    name = "PYDEVD_DISABLE_FILE_VALIDATION"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        import debugpy
        import debugpy.server  # this reads the variable
        import pydevd  # debugpy has put it into sys.path
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return debugpy, pydevd


def _start_untraced(target: Any, *args: Any) -> threading.Thread:
    """Start a thread that pydevd does not suspend: a suspended one could not carry its messages."""
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.pydev_do_not_trace = thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
    thread.start()
    return thread


def _mappings(trees: list[str]) -> dict[str, str]:
    """Return the folders of this host by their path on the user's machine: those of packages, then all of the code."""
    found = {path[len(tree) :]: path for tree in trees[1:] for path in sys.path if path.startswith(tree + "/")}
    return {**found, "/": trees[0] + "/"} if trees else {}


def _serve_debugpy(
    channel: _Lines, mappings: dict[str, str], listening: socket.socket, pydevd: Any, has_failed: threading.Event
) -> None:
    """Pass on data between debugpy and the editor; at the end let the script continue without them.

    `has_failed` is set if debugpy will not connect; the main thread reports that.
    """
    theirs: socket.socket | None = None
    try:
        with listening:
            while theirs is None:
                theirs, _ = listening.accept()
                if not _is_of_this_process(theirs):
                    theirs.close()
                    theirs = None
            theirs.settimeout(None)  # or it has the script's socket.setdefaulttimeout
    except OSError as error:
        if has_failed.is_set():
            return  # pydevd may now serve the script itself, or another editor
        why = f"it did not connect within {_DEBUGPY_S:g} s" if isinstance(error, TimeoutError) else error
        channel.say(end=f"debugpy could not be opened: {why}")
    else:
        channel.say(ready=mappings)
        editor = channel.connection
        _start_untraced(_pass_on, theirs, editor)
        _pass_on(editor, theirs)
    channel.close()
    if (debugger := pydevd.get_global_debugger()) is not None:
        debugger.ready_to_run = True  # or the main thread would wait for the editor for ever
    with contextlib.suppress(Exception):  # it may have stopped by itself
        pydevd.stoptrace()


def _is_of_this_process(accepted: socket.socket) -> bool:
    """Return whether this process has the other end of a loopback connection; others' connections are refused.

    Touches no descriptor of the script: making a socket object of one may change it (`socket.setdefaulttimeout`).
    """
    host, port = accepted.getpeername()
    address = f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
    with open("/proc/self/net/tcp", encoding="ascii") as connections:
        others = {f"socket:[{fields[9]}]" for fields in map(str.split, connections) if fields[1] == address}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") in others:
                return True
    return False


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_LINE_BYTES):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
