"""The first code of a Python worker: runs the script or module as `__main__`, as plain python would.

Started by the agent as `python -u .../workers/bootstrap.py script|module TARGET ARGS...`, or `function PACKAGES NAME
FUNCTION_FILE RESULT_FILE`. Imports nothing of the launcher, so that the script finds a clean process: its own
`__main__`, sys.argv, sys.path and tracebacks. Besides, it writes the error files for an uncaught exception, makes a
crash print its stacks, wakes the rendezvous store when torch is about to be imported, counts the steps of torch's
optimizers, records the script's imports up to the first step, passes on torch's record of its collectives, reports when
pdb waits for a command, lets the agent open a debugger, keeps process groups of torch that the script has closed until
they are at rest, and ends a process that had one.
"""

from __future__ import annotations

import sys

if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # the launcher's own folder, before any other import could look there

import builtins
import importlib.machinery
import os
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself takes 5 ms to import, in every worker
    import traceback
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

STACK_SIGNAL = 51  # the same in evidence.py, which has the reason
DEBUGGER_SIGNAL = 52  # the same in debugging/channels.py
LEAVE_S = 60.0  # for collectives under way when the script ends
_IMPORT_PAUSE_S = 0.02
_DEBUGPY = ("debugpy", "pydevd", "_pydev")  # prefixes of its packages
_STEP_HOOKS = "register_optimizer_step_post_hook"  # of torch.optim.optimizer
_GROUPS, _CLOSE = "torch.distributed.distributed_c10d", "destroy_process_group"
KEPT_S = 1.0
_OUTPUT_FAILED = 120  # Python's exit code if standard output cannot be written

_closed_groups: list[tuple[float, object]] = []  # with the time when each was closed
_recorders: list[Any] = []  # of collectives, once torch's process groups are imported
_had_group = False  # a process group was open, or closed and kept, when the script ended
_pid = 0  # the worker's own; processes forked by the script have others


def main() -> None:
    global _pid
    _pid = os.getpid()
    began_with = frozenset(sys.modules)
    kind, target, *args = sys.argv[1:]
    executable = sys.orig_argv[0] if sys.orig_argv else sys.executable
    sys.argv = [target, *args]
    sys.orig_argv[:] = [executable, *(["-m"] if kind == "module" else []), target, *args]
    _print_stacks()
    imports = _Imports(began_with)
    sys.meta_path.insert(0, imports)
    imports.look()  # a forked worker may have torch already
    try:
        _run(kind, target)
    except BaseException as error:
        imports.ended()
        _end(error)
        raise
    imports.ended()
    _end(None)


def _run(kind: str, target: str) -> None:
    program = {"script": _script, "module": _module, "function": _function}[kind]
    try:
        run = program(target)
        _accept_debuggers()  # may import debugpy: from where the script would
        run()
    except SystemExit:
        raise
    except BaseException as error:
        _fail(error)


def _print_stacks() -> None:
    """Print every thread's stack on a crash, and into the agent's file on its signal.

    That handler runs at once, whichever thread holds the interpreter, and system calls are resumed (SA_RESTART).
    """
    import faulthandler

    if "PYTHONFAULTHANDLER" not in os.environ:
        faulthandler.enable()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    import _signal  # type: ignore[import-not-found]  # built in, no stub; importing `signal` takes 2 ms more

    try:
        file = os.open(path + ".stack", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # closed by exec
        # In effect once the interpreter has removed its handlers: the signal must not end the process then.
        _signal.signal(STACK_SIGNAL, _signal.SIG_IGN)
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
    except (OSError, ValueError, RuntimeError) as error:  # the script runs without it
        print(f"dtrain: stacks of this worker cannot be requested: {error}", file=sys.stderr)


def _accept_debuggers() -> None:
    """Open a debugger in the main thread on the agent's signal: see debugging/in_worker.py.

    Unlike the other signal it interrupts system calls: a wait in Python returns to the handler at once.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    import _signal
    import _thread
    import time  # all built in: the handler itself must import nothing

    def open_debugger(_: int, frame: types.FrameType | None) -> None:
        if os.getpid() != _pid:
            return
        if _imports_what_debuggers_need(frame):
            _thread.start_new_thread(signal_again, (_thread.get_ident(),))
            return
        try:
            debugger = in_worker()
        except Exception as error:  # the script's folder may have a pdb.py of its own
            print(f"dtrain: no debugger can be imported: {type(error).__name__}: {error}", file=sys.stderr)
            return
        debugger.open_debugger(path + ".debugger", frame)

    def signal_again(main_thread: int) -> None:
        time.sleep(_IMPORT_PAUSE_S)
        _signal.pthread_kill(main_thread, DEBUGGER_SIGNAL)

    def in_worker() -> Any:
        if not _debugging:
            from importlib.util import module_from_spec, spec_from_file_location

            folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
            spec = spec_from_file_location("dtrain debugger", os.path.join(folder, "debugging", "in_worker.py"))
            assert spec is not None
            assert spec.loader is not None
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            _debugging.append(module)
        return _debugging[0]

    try:
        _signal.signal(DEBUGGER_SIGNAL, open_debugger)
    except (OSError, ValueError) as error:  # the script runs without it
        print(f"dtrain: no debugger can be opened in this worker: {error}", file=sys.stderr)


def _imports_what_debuggers_need(frame: types.FrameType | None) -> bool:
    """Return whether the main thread was interrupted in the import of a module that a debugger imports too.

    The debugger would find that module half imported. But a script's own module may take the whole training to
    import: the debugger opens in such a one.
    """
    if frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        return True  # it may hold locks
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load" and frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            package = frame.f_locals["name"].partition(".")[0]
            if package in sys.stdlib_module_names or package.startswith(_DEBUGPY):
                return True
        frame = frame.f_back
    return False


def _script(path: str) -> Callable[[], object]:
    """Return a function that runs a file, or a folder or archive with a `__main__.py`."""
    main = _new_main()
    if os.path.isdir(path) or _is_archive(path):
        import runpy

        sys.path.insert(0, os.path.abspath(path))
        run: Callable[..., object] = runpy._run_module_as_main  # type: ignore[attr-defined]  # as CPython's own main
        return lambda: run("__main__", False)
    full = os.path.abspath(path)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main.__file__ = full
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", full)
    with open(full, "rb") as file:
        source = file.read()

    def run_file() -> None:
        exec(compile(source, full, "exec", dont_inherit=True), main.__dict__)

    return run_file


def _module(name: str) -> Callable[[], object]:
    import runpy

    _new_main()
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    run: Callable[..., object] = runpy._run_module_as_main  # type: ignore[attr-defined]  # what `python -m` calls
    return lambda: run(name, True)


def _function(_: str) -> Callable[[], object]:
    """Return a function that calls a function from another process; see call_function.py."""
    _new_main()
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "call_function.py")
    module = types.ModuleType("launcher.agent.workers.call_function")  # not in sys.modules: the script must not find it
    importlib.machinery.SourceFileLoader(module.__name__, path).exec_module(module)
    _own_files.add(path)
    _keep.append(module)
    return lambda: module.call_function(*sys.argv[1:])


def _new_main() -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __spec__=None, __package__=None, __cached__=None)
    if sys.version_info < (3, 14):
        module.__dict__.update(__annotations__={})
    _keep.append(sys.modules["__main__"])
    sys.modules["__main__"] = module
    return module


_own_files = {__file__}  # their frames are removed from tracebacks
_debugging: list[types.ModuleType] = []  # the module for debuggers, once it was loaded
_keep: list[types.ModuleType] = []  # this module must outlive its place in sys.modules


def _is_archive(path: str) -> bool:
    if path.endswith((".py", ".pyw")) or not os.path.isfile(path):
        return False
    import zipfile

    return zipfile.is_zipfile(path)


def _fail(error: BaseException) -> NoReturn:
    """Report an uncaught exception and end like plain python, without a frame of this file."""
    import _signal

    try:  # torch's DataLoader has a handler that raises in any code when one of its workers was killed
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    except RuntimeError as reason:  # it just did: this is the cause of the other exception
        error = reason
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _own_files:
        trace = trace.tb_next
    error.__traceback__ = trace
    if "DTRAIN_REPLAY" in os.environ:
        if type(error).__name__ == "BdbQuit":  # the user has seen enough
            raise SystemExit(0)
        _call_hook(error)  # first: pdb may be open in it, and a worker that has written the files is soon killed
        _report(error)
    else:
        _report(error)
        _call_hook(error)
    # Raised again to end like it (status 1, or death by SIGINT), but it is already printed.
    sys.excepthook = lambda *_: None
    raise error


def _call_hook(error: BaseException) -> None:
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as problem:
        print("Error in sys.excepthook:", problem, file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)


def _report(error: BaseException) -> None:
    try:
        _write_error_files(error)
    except Exception as problem:  # a full disk, or an exception without a text, must not hide the traceback
        print(f"dtrain: the error file could not be written: {problem}", file=sys.stderr)


def _write_error_files(error: BaseException) -> None:
    """Write torch elastic's error file (unless its own `record` did), and a file with facts for the report."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.getpid() != _pid:
        return
    import json
    import time
    import traceback

    name = type(error).__qualname__
    # Limited: a recursion error has a thousand times more frames and characters, and takes seconds to format.
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-100))[-100_000:]
    message = _text(error)[:10_000]
    where, inside = _position(error)
    facts = {"type": name, "message": message, "where": where, "inside": inside}
    if isinstance(ranks := getattr(error, "failed_ranks", None), tuple):  # see ddp/errors.py
        facts["failed_ranks"] = " ".join(map(str, ranks))
    _write_facts(facts)
    if not os.path.exists(path):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump({"message": {"message": f"{name}: {message}", "extraInfo": extra}}, file)


def _write_exit_facts(status: int, error: SystemExit) -> None:
    """Write the exit code and the line that set it, unless an exception that led to it is known."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path + ".facts"):
        return
    try:
        where, inside = _position(error)
    except Exception as problem:  # the script's folder may have a traceback.py of its own
        where = inside = ""
        print(f"dtrain: where sys.exit was called is not known: {problem}", file=sys.stderr)
    _write_facts({"status": str(status), "where": where, "inside": inside})


def _write_facts(facts: dict[str, str]) -> None:
    """Write the facts about this worker's failure for the agent, with the time."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.getpid() != _pid:
        return
    import json
    import time

    for recorder in _recorders:
        recorder.write()
    try:
        with open(path + ".facts", "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump({**facts, "time": repr(time.monotonic())}, file)
    except OSError as problem:
        print(f"dtrain: the error file could not be written: {problem}", file=sys.stderr)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:
        return f"<its text cannot be read: {type(problem).__name__}>"


def _position(error: BaseException) -> tuple[str, str]:
    """Return `file:line in function` of the deepest frame of the user's own code, and the function that raised.

    Installed packages, the standard library, launcher and ddp are not the user's own. If ddp raised, the function is
    the one that was called: `backward`, not an internal part of ddp.
    """
    import sysconfig
    import traceback

    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}", ""
    ours = os.path.abspath(__file__).rpartition("/launcher/")[0]
    library = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    foreign = ("<", *(folder + os.sep for folder in (*library, f"{ours}/launcher", f"{ours}/ddp")))
    installed = ("/site-packages/", "/dist-packages/")  # pip's and Debian's, in any place

    def read(error: BaseException) -> tuple[list[traceback.FrameSummary], list[traceback.FrameSummary]]:
        found = [*traceback.extract_tb(error.__traceback__, limit=-1000), *_frames_elsewhere(_text(error))]
        return found, [
            f for f in found if not (f.filename.startswith(foreign) or any(part in f.filename for part in installed))
        ]

    frames, own = read(error)
    if error.__cause__ is not None and frames and frames[-1].filename.startswith(f"{ours}/ddp{os.sep}"):
        cause, own_of_cause = read(error.__cause__)  # ddp re-raises exceptions of the user's functions
        frames, own = (cause, own_of_cause) if own_of_cause else (frames, own)
    if not frames:
        return "", ""
    deepest = (own or frames)[-1]
    below = frames[frames.index(deepest) + 1 :]
    of_ddp = [frame.filename.startswith(f"{ours}/ddp{os.sep}") for frame in below]
    inside = frames[-1].name
    if of_ddp and of_ddp[-1]:
        called = [frame.name for frame in below[: of_ddp.index(True) + 1] if frame.name[0] not in "_<"]
        inside = called[-1] if called else inside
    return f"{deepest.filename}:{deepest.lineno} in {deepest.name}", inside


def _frames_elsewhere(message: str) -> list[traceback.FrameSummary]:
    """Return the frames in a message of torch that re-raises the exception of a DataLoader worker.

    If several workers have passed the exception on, they are those of the innermost.
    """
    import itertools
    import re
    import traceback

    _, is_again, text = message.rpartition("\nOriginal Traceback (most recent call last):\n")
    # Exceptions that led to the last one come before it.
    lines = text.rpartition("Traceback (most recent call last):\n")[2].splitlines() if is_again else []
    found = (re.match(r'  File "(.*)", line (\d+), in (.*)', line) for line in itertools.takewhile(_is_indented, lines))
    return [traceback.FrameSummary(m[1], int(m[2]), m[3], lookup_line=False) for m in found if m]


def _is_indented(line: str) -> bool:
    return line.startswith(" ")


def _end(error: BaseException | None) -> None:
    """Report a non-zero exit code to the agent, since exiting may take long; end the process if it has a group."""
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        status = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
        if status:
            _write_exit_facts(status, error)
        error.__traceback__ = error.__context__ = None  # they would keep the script's objects alive
    global _had_group
    _had_group = bool(_closed_groups) or _has_open_group()
    if not _had_group:
        return
    if isinstance(error, SystemExit) and not isinstance(error.code, int | None):
        print(error.code, file=sys.stderr)
        error.code = 1
    import atexit
    import threading

    if error is not None and not isinstance(error, SystemExit):  # exit handlers look there for the reason
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = error
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]  # as the interpreter's end
        try:
            step()
        except BaseException as problem:
            sys.excepthook(type(problem), problem, problem.__traceback__)
    _end_without_teardown(status, by_sigint=isinstance(error, KeyboardInterrupt))


def ends_without_teardown() -> bool:
    """Return whether the process ends without the interpreter's teardown; known when the script has ended.

    An exit handler may have closed the group since, as ddp's does. The teardown would be safe then, but takes a second
    of CPU time where torch is imported.
    """
    return _had_group


def _has_open_group() -> bool:
    is_open = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    return is_open is not None and is_open()


def _end_without_teardown(status: int, *, by_sigint: bool) -> NoReturn:
    """End the process after its exit handlers, but without the interpreter's teardown.

    A thread of gloo that has just finished a collective needs the interpreter to release its tensors. During the
    teardown Python ends such a thread, and with it, by std::terminate, the process: SIGABRT after a successful
    training (torch 2.13, Python before 3.14). The teardown's effects on the script are reproduced here: objects in its
    globals are dropped, and open files are flushed. Objects in globals of imported modules are not dropped: a gzip or
    zip file there stays incomplete unless it is closed.
    """
    import _io  # torch has imported all of these
    import ctypes
    import gc

    _drop_globals(sys.modules["__main__"].__dict__)
    gc.collect()
    if status == 0 and os.getpid() == _pid and _has_open_group():  # otherwise a collective of this rank may never end
        _close_groups()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception as problem:
            status = _OUTPUT_FAILED
            print(f"dtrain: {stream!r} could not be written: {problem}", file=sys.__stderr__)
    for each in gc.get_objects():
        if _io._IOBase in type(each).__mro__:
            try:
                each.flush()
            except Exception:  # closed, or it cannot be written: Python's teardown ignores that as well
                continue
    libc = ctypes.PyDLL(None)  # keeps the interpreter's lock: no other thread runs meanwhile
    libc.fflush(None)
    if by_sigint:
        import _signal

        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        os.kill(os.getpid(), _signal.SIGINT)
    if "LD_PRELOAD" in os.environ:  # a profiler may write its results at exit
        libc.exit(status)
    os._exit(status)


def _drop_globals(names: dict[str, object]) -> None:
    """Drop a script's objects, unless a thread still runs in it; keep modules, functions and classes for `__del__`."""
    frames: list[types.FrameType | None] = list(sys._current_frames().values())
    while frames:
        if (frame := frames.pop()) is not None:
            if frame.f_globals is names:
                return
            frames.append(frame.f_back)
    for name in [*names]:
        if not name.startswith("__") and not issubclass(
            type(names[name]), types.ModuleType | types.FunctionType | type
        ):
            names[name] = None


def _close_groups() -> None:
    """Close all process groups. Blocks until collectives under way have ended, LEAVE_S at most."""
    import threading

    def close() -> None:
        try:
            sys.modules["torch.distributed"].destroy_process_group()
        except Exception as problem:
            print(f"dtrain: the process group could not be closed: {problem}", file=sys.stderr)

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(LEAVE_S)


class _Imports:
    """Finds no module: observes when torch, its optimizers and pdb are imported.

    Records imports for the fork server (late_imports.py), until an optimizer has made a step.

    On the first import of torch, rank 0 connects once to the store's port. The store's process imports torch as well,
    which takes seconds, and starts at the first connection: connecting now runs both imports side by side, and a script
    without torch never costs a store. Once torch has its optimizers, their steps are counted (step_counter.py).

    It stays in `sys.meta_path`: removing it while the import iterates over that list would skip the next finder, and
    with it the import hooks of tracers and profilers.
    """

    def __init__(self, began_with: frozenset[str]) -> None:
        self._wakes_store = os.environ.get("RANK") == "0"
        self._keeps_groups = self._counts_steps = self._watches_prompts = False
        self._error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        self._recorder = (
            _load("late_imports").Recorder(began_with) if self._error_file else None
        )  # until the first step

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if self._recorder is not None and name.partition(".")[0] not in sys.stdlib_module_names:
            try:
                self._recorder.note(name)
            except Exception:  # a substitute for numpy or torch that lacks attributes; the import continues
                self._recorder = None
        if name == "pdb":
            self._watch_prompts()
        if not name.startswith("torch"):
            return
        self.look()
        if name == "torch" and self._wakes_store:
            self._wakes_store = False
            _wake_store()

    def look(self) -> None:
        """Keep closed groups, and count the steps of torch's optimizers, from now on, if torch has them."""
        if "pdb" in sys.modules:  # in a forked worker
            self._watch_prompts()
        groups = sys.modules.get(_GROUPS)
        if not self._keeps_groups and groups is not None and hasattr(groups, _CLOSE):
            self._keeps_groups = True
            _keep_closed_groups(groups)
            if self._error_file:
                _recorders.append(_load("collectives").Recorder(groups, self._error_file))
        if self._counts_steps or not hasattr(sys.modules.get("torch.optim.optimizer"), _STEP_HOOKS):
            return
        self._counts_steps = True
        _load("step_counter").count_optimizer_steps(self._stepped)

    def _watch_prompts(self) -> None:
        if self._watches_prompts or not self._error_file:
            return
        self._watches_prompts = True
        try:
            _report_prompts(f"{self._error_file}.asks")
        except Exception as error:  # the script's folder may have a cmd.py of its own
            print(f"dtrain: no prompt of pdb can be seen in this worker: {error}", file=sys.stderr)

    def _stepped(self) -> None:
        """Write the imports up to the first step; later ones are not recorded."""
        self._write("imports")

    def ended(self) -> None:
        """Write the durations of imports, if no optimizer has made a step."""
        self._write("took")

    def _write(self, kind: str) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None or os.getpid() != _pid:
            return
        try:
            write = recorder.write if kind == "imports" else recorder.write_times
            write(f"{self._error_file}.{kind}")
        except Exception as error:  # a full disk, or the script's folder has a json.py of its own
            print(f"dtrain: the imports of this worker could not be recorded: {error}", file=sys.stderr)


def _load(name: str) -> Any:
    """Load a module of this folder, but not into sys.modules: the script must not find it."""
    module = types.ModuleType(f"dtrain {name}")
    path = module.__file__ = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    importlib.machinery.SourceFileLoader(module.__name__, path).exec_module(module)
    return module


def _report_prompts(path: str) -> None:
    """Make pdb keep this file while it waits for commands from standard input: see standard_input.py."""
    import cmd  # pdb is about to import it
    import functools

    loop = cmd.Cmd.cmdloop

    @functools.wraps(loop)
    def cmdloop(self: cmd.Cmd, *args: Any, **kwargs: Any) -> None:
        is_ours = os.getpid() == _pid and self.stdin is sys.stdin and hasattr(self, "set_trace")
        if not is_ours or os.path.exists(path):  # nested in a loop of the same debugger
            return loop(self, *args, **kwargs)
        try:
            open(path, "wb").close()
            return loop(self, *args, **kwargs)
        finally:
            os.unlink(path)

    cmd.Cmd.cmdloop = cmdloop  # type: ignore[method-assign]  # until the process ends


def _keep_closed_groups(groups: Any) -> None:
    """Make torch's destroy_process_group keep the groups, unused, for KEPT_S, while they may still be at work.

    A thread of gloo that releases the tensors of the last collective needs the interpreter for that. But the thread
    that drops the last reference to a group, often with the model, holds the interpreter and waits for that thread:
    torch 2.13 hangs.
    """
    import functools
    import time

    close = getattr(groups, _CLOSE)

    @functools.wraps(close)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        now = time.monotonic()
        at_work = [(at, group) for at, group in _closed_groups if now - at < KEPT_S]
        open_groups = [(now, group) for group in getattr(getattr(groups, "_world", None), "pg_map", ())]
        _closed_groups[:] = at_work + open_groups
        return close(*args, **kwargs)

    for module in (groups, sys.modules.get("torch.distributed")):
        if getattr(module, _CLOSE, None) is close:
            setattr(module, _CLOSE, destroy_process_group)


def _wake_store() -> None:
    import socket

    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    try:
        socket.create_connection((address, int(port or "")), timeout=1).close()
    except (OSError, ValueError):  # the script chose another address: init_process_group will report it
        return


if __name__ == "__main__":
    main()
