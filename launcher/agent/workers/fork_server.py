"""The fork server: a process that has made a script's imports, and from which the workers of a host are forked.

Started by the agent (warm_start.py) as `python -u .../workers/fork_server.py script|module TARGET NAMES KEEP [LATE]`,
in the workers' working directory, with the variables that they share. NAMES is a JSON array of two lists, for variables
with a value of each worker's own: their prefixes, and known names. Its standard input is a socket to the agent. It
answers whether workers can be forked from it, and if not, why; then, for every request, it forks a process that
becomes the agent's child, and answers with its pid. Requests are JSON in a memory file, sent with the descriptors of
the new process's streams. It ends with its input, or with the agent; but with KEEP `1`, the agent may make it stay for
later runs (keeper.py).

Once the first workers have trained, the agent makes it fork another fork server, which also makes the late imports of
those (late_imports.py). LATE is the same order for a process without other imports.

A process forked here must equal a started one (bootstrap.py), so this one imports and does nothing else. Output of
imports is repeated by each worker.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import math
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import ItemsView, Iterator, Sequence
from functools import partial
from types import FrameType, ModuleType
from typing import Any, NoReturn


def _load(name: str) -> ModuleType:
    """Load a module of this folder so that the script neither finds it nor misses one of the same name."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"dtrain {name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bootstrap = _load("bootstrap")  # removes this folder from sys.path
preload = _load("preload")
late_imports = _load("late_imports")
keeper = _load("keeper")

_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP = 1, 35, 14
_SENT_TO_ALL = (signal.SIGUSR1, signal.SIGUSR2)  # by SLURM, to every process of a step
_NO_NAME = "\0"  # stands for variables unknown so far


_OWN_ROOT = os.path.abspath(__file__).rpartition("/launcher/")[0]
_set_by_imports: dict[str, str | None] = {}  # variables; None: deleted
_set_for_imports: dict[str, str | None] = {}  # variables that the script sets before its imports
_found_by_imports: dict[str, str] = {}  # all variables, except those


class _UnfitError(BaseException):
    """The reason why this process must not be forked. Packages must not catch it by `except Exception`."""

    module = ""  # the late import, or the package left to each worker, that caused it


# These differ in each login: copies of all variables contain them, but a package that needs one asks by its name.
_OF_A_LOGIN = {"SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "XDG_SESSION_ID"}


class _Environ(os._Environ):  # type: ignore[type-arg]  # in Python 3.10 it takes no arguments when run
    """os.environ and os.environb during the imports: record what is read, and may differ between workers.

    Iterating over all variables yields the shared ones and the worker's own, `_Name`s with `_Value`s. That does no harm
    as long as these are neither used nor kept: the result is then the same in each worker.
    """

    per_worker: tuple[str, ...] = ()  # prefixes of the worker's own
    names: tuple[str, ...] = ()  # known ones of them, and others that this process lacks
    read: set[str] = set()  # noqa: RUF012  # shared by the two objects; so are all that follow
    begins: set[str] = set()  # noqa: RUF012  # prefixes that were looked for among all names
    copied = False  # names were put into a dict or set, and any name may have been looked up there
    unfit: list[str] = []  # noqa: RUF012  # uses that differ between workers
    open: list[str] = []  # noqa: RUF012  # places that have not finished iterating over the worker's own
    given: list[tuple[weakref.ref[Any], str]] = []  # noqa: RUF012  # the worker's own, and where it was used
    passed: list[Any] = []  # noqa: RUF012  # names of a login, yielded by iteration: dict() then asks for them

    def __getitem__(self, key: Any) -> Any:
        if type(key) is _Name:
            return _give(_Value())
        name = os.fsdecode(key)
        if not any(key is each for each in self.passed):
            self.read.add(name)
        if name.startswith(self.per_worker):
            _reject(f"reads {name}")
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        keys = {key: os.fsdecode(key) for key in super().__iter__()}
        own = [name for name in keys.values() if name.startswith(self.per_worker)]
        where = _reader()
        self.open.append(where)
        for name in (_NO_NAME, *self.names, *own):
            yield _give(_Name(name))
        self.open.remove(where)
        self.passed += (key for key, name in keys.items() if name in _OF_A_LOGIN)
        yield from (key for key, name in keys.items() if not name.startswith(self.per_worker))

    def __len__(self) -> int:
        raise TypeError("how many variables a worker has is not known yet")  # list() works without it

    def __repr__(self) -> str:
        _reject()

    def items(self) -> ItemsView[Any, Any]:
        return _Items(self)

    @classmethod
    def why_unfit(cls) -> str:
        """Return how variables of the worker's own were used; empty: not at all."""
        if any(own() is not None for own, _ in cls.given):
            gc.collect()
        cls.given = [(own, where) for own, where in cls.given if own() is not None]
        reasons = [
            *cls.unfit,
            *map(_reads, cls.open),
            *(_reads(where, "keeps all variables") for _, where in cls.given),
        ]
        return reasons[0] if reasons else ""


class _Items(ItemsView[Any, Any]):
    """Iterating over a value does not read it: its use depends on its name, which is recorded."""

    _mapping: _Environ

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for key in self._mapping:
            yield key, _give(_Value()) if type(key) is _Name else os._Environ.__getitem__(self._mapping, key)


class _Name(str):
    """The name of a variable that a worker may have. It may be compared with other names, but not equal one."""

    def startswith(self, beginning: Any, *limits: Any) -> bool:
        beginnings = beginning if isinstance(beginning, tuple) else (beginning,)
        _Environ.begins.update(map(os.fsdecode, beginnings))
        return bool(limits or super().startswith(tuple(map(os.fsdecode, beginnings)))) and _reject()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) and other is not self:
            _Environ.begins.add(str(other))
        return self is other or (super().__eq__(other) is True and _reject())

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        _Environ.copied = True
        return super().__hash__()


class _Value:
    """The value of such a variable.

    It is no string: C code that accepts only strings raises TypeError. A package that catches that goes unnoticed.
    """

    def __getattribute__(self, name: str) -> NoReturn:
        _reject()


def _reject(what: str = "reads all variables") -> NoReturn:
    _Environ.unfit.append(_reads(_reader(), what))
    raise _UnfitError(_Environ.unfit[-1])


def _use(*_: object) -> NoReturn:
    _reject()


def _refuse_other_uses() -> None:
    kept = {"__new__", "__init__", "__class__", "__getattribute__", "__init_subclass__", "__subclasshook__", "__doc__"}
    slots = {name for name in (*dir(complex), *dir(int), "__bytes__", "__fspath__") if name.startswith("__")}
    for name in {*slots, *dir(str)} - kept:
        if name not in vars(_Name):
            setattr(_Name, name, _use)
        setattr(_Value, name, _use)


_refuse_other_uses()


def _give(own: Any) -> Any:
    _Environ.given.append((weakref.ref(own), _reader()))
    return own


def _reader() -> str:
    """Return the code that reads variables, as `package file:line`; for the standard library, its caller."""
    frame: FrameType | None = sys._getframe(1)
    found = ""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_globals is not globals():
            file = frame.f_code.co_filename.rpartition("-packages/")[2]
            found = found or f"{package} {file}:{frame.f_lineno}"
            if package not in sys.stdlib_module_names:
                return f"{package} {file}:{frame.f_lineno}"
        frame = frame.f_back
    return found


def _reads(reader: str, what: str = "reads all variables") -> str:
    package, _, place = reader.partition(" ")
    return f"{package} {what} when it is imported ({place})"


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SENT_TO_ALL)
    control = socket.socket(fileno=os.dup(0))
    _open_streams()
    kind, target, names, keep, *late = sys.argv[1:]
    _Environ.per_worker, _Environ.names = map(tuple, json.loads(names))
    atexit.register(_thaw)  # for processes forked here; called after all other exit handlers
    printed = _Printed()
    packages = keeper.Packages() if keep == "1" else None
    gc.disable()  # it would visit all objects of the imports again and again
    found: Any = None
    began = math.inf
    try:
        if late:
            _import_late(json.loads(late[0]), printed)
        else:
            found = _find_imports(kind, target)
            began = time.monotonic()
            _import_packages(found, kind, target, printed)
        answer = _describe("")
    except _UnfitError as error:
        answer = {**_describe(str(error)), "costs_s": max(0.0, time.monotonic() - began), "module": error.module}
    if packages is not None:
        packages.imported()
    _send(control, answer)
    numbers = map(int, os.listdir("/proc/self/fd"))
    open_files = [each for each in numbers if each != control.fileno() and os.path.exists(f"/proc/self/fd/{each}")]
    gc.freeze()  # garbage of the imports as well: collecting it takes as long as 20 forks
    gc.enable()
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 8)
        if not request:
            os._exit(0)
        if request == b"f" and _fork(control):
            _become(_read_json(descriptors[0]), descriptors[1:-1], descriptors[-1])
            os.close(descriptors[0])
            break
        if request == b"l" and _fork(control):
            order, control = _read_json(descriptors[0]), socket.socket(fileno=os.dup(descriptors[1]))
            _become_child_of(order["agent"])
            gc.disable()
            try:
                _import_late(order, _Printed())
                answer = _describe("")
            except _UnfitError as error:
                answer = {**_describe(str(error)), "module": error.module}
            _send(control, answer)
            gc.freeze()
            gc.enable()
        elif request == b"c":
            _send(control, _fits(_read_json(descriptors[0]), found))
        elif request == b"k" and packages is not None:
            order, listening = _read_json(descriptors[0]), socket.socket(fileno=os.dup(descriptors[1]))
            for descriptor in descriptors:
                os.close(descriptor)
            descriptors = []
            keeper.outlive_parent()
            _send(control, {"pid": os.getpid()})
            control.close()
            imported = [*dict.fromkeys(module.partition(".")[0] for module, _ in found.imports)]
            why_not = partial(_why_not_script, found=found)
            control = keeper.Keeper(order, listening, packages, imported, open_files, why_not).wait()
        for descriptor in descriptors:
            os.close(descriptor)
    printed.repeat()
    bootstrap.main()


def _send(control: socket.socket, answer: dict[str, Any]) -> None:
    control.send(json.dumps(answer).encode())


def _why_not_script(script: dict[str, str], found: Any) -> str:
    """Return why the imports made differ from those of a script of a later run now. Raises OSError."""
    os.chdir(script["cwd"])
    importlib.invalidate_caches()  # the user's folders may have changed
    now = preload.find_preloads(script["kind"], script["target"], _OWN_ROOT)
    if now.steps != found.steps:
        return "the script imports other packages than it has"
    if hidden := preload.find_hidden(preload.folder_of(script["kind"], script["target"])):
        return f"a module of the script's folder is named {hidden}, as one that was imported"
    return ""


def _fits(order: dict[str, Any], found: Any) -> dict[str, Any]:
    """Check whether the imports made equal those of a script of a later run now, with all that they depended on."""
    reason = _why_not_script(order, found)
    env, libraries = order["env"], tuple(order["read_by_libraries"])
    differing = {name for name, _ in env.items() ^ _found_by_imports.items()}
    looked_for = (*_Environ.begins, *libraries)
    for name in sorted(differing):
        is_in_copies = _Environ.copied and name not in _OF_A_LOGIN
        is_read = is_in_copies or name in _Environ.read or name.startswith(looked_for)
        if is_read and not name.startswith(_Environ.per_worker):
            reason = reason or f"not the same as then: {name}"
    if _Environ.copied and not {*order["names"]} <= {*_Environ.names}:
        reason = reason or f"not known then: {min({*order['names']} - {*_Environ.names})}"
    return _describe(reason)


def _describe(reason: str) -> dict[str, Any]:
    """Return facts on the imports for the agent, with the reason why no worker can be forked."""
    return {
        "reason": reason,
        "has_torch": "torch" in sys.modules,
        "read": [*_Environ.read],
        "begins": [*_Environ.begins],
        "names": _Environ.names if _Environ.copied else None,
        "costs_s": 0.0,
        "module": "",
    }


def _thaw() -> None:
    """Make the interpreter's end free objects of the imports, as in a process that has imported them itself.

    This includes finalizers, and objects that extensions count, such as the types of nanobind. Visiting them once is
    enough: the end's first collection is made here, without them; the next, after the modules are cleared, has them.
    """
    if bootstrap.ends_without_teardown():  # it ends without the teardown
        return
    if gc.isenabled():
        gc.collect()
    gc.disable()
    gc.unfreeze()


def _open_streams() -> None:
    """Open sys.stdin, stdout and stderr again, on files like a worker's: they know whether they are seekable."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    pipe = os.pipe()
    streams = (("stdin", 0, nothing), ("stdout", 1, pipe[1]), ("stderr", 2, pipe[1]))
    for name, descriptor, file in streams:
        kept = os.dup(descriptor)
        os.dup2(file, descriptor)
        _open_stream(name, descriptor)
        if name != "stdin":
            os.dup2(kept, descriptor)
        os.close(kept)
    for descriptor in (nothing, *pipe):
        os.close(descriptor)


def _open_stream(name: str, descriptor: int) -> None:
    before = getattr(sys, name)
    raw = open(descriptor, before.mode + "b", buffering=-1 if name == "stdin" else 0, closefd=False)  # noqa: SIM115
    (raw.raw if name == "stdin" else raw).name = before.name
    stream = io.TextIOWrapper(
        raw,
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
    stream.mode = before.mode  # type: ignore[misc]  # as the interpreter sets it
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _find_imports(kind: str, target: str) -> Any:
    """Return the imports of the script. Raises _UnfitError if they must not be made here."""
    _refuse_tracers()
    found = preload.find_preloads(kind, target, _OWN_ROOT)
    if not found.imports and found.left_out:
        alone = "starts threads, connects to something or reads its rank"
        error = _UnfitError(f"{found.left_out[0]} is left to each worker: it {alone} when it is imported")
        error.module = found.left_out[0]
        raise error
    if not found.imports:
        raise _UnfitError("the script imports no installed package before it does anything")
    return found


def _refuse_tracers() -> None:
    if sys.gettrace() is not None or sys.getprofile() is not None or _is_monitored():
        raise _UnfitError("a tracer or profiler runs in it")


def _import_packages(found: Any, kind: str, target: str, printed: _Printed) -> None:
    """Make the script's imports in its way. Raises _UnfitError if workers cannot be forked then."""
    open_before = _open_files()
    _found_by_imports.update(os.environ)
    to_set = [*found.variables]
    with _variables_noted():
        try:
            for number, (module, names) in enumerate(found.imports):
                while to_set and to_set[0][0] <= number:
                    _, name, value, replaces = to_set.pop(0)
                    if not name.startswith(_Environ.per_worker) and (replaces or name not in os.environ):
                        _set(name, value)
                _import(module, names)
            if found.imports_dynamo and "torch" in sys.modules:
                _import("torch._dynamo", ())  # imported by an optimizer's first step, which takes seconds
        finally:
            printed.end()
    _check(open_before)
    if hidden := preload.find_hidden(preload.folder_of(kind, target)):
        raise _UnfitError(f"a module of the script's folder is named {hidden}, as one that was imported")


def _import_late(order: dict[str, Any], printed: _Printed) -> None:
    """Make late imports of the first workers, as far as this process is then in their state.

    Raises _UnfitError if workers cannot be forked then, with the import to leave out next time.
    """
    _refuse_tracers()
    try:
        record = late_imports.read_records(order["records"])
    except (OSError, ValueError) as error:  # the attempt has ended
        raise _UnfitError(f"the records of the workers cannot be read: {error}") from error
    importlib.import_module("random")  # to see which imports draw from it
    _set_for_imports.clear()
    _found_by_imports.update(os.environ)
    libraries = tuple(order["read_by_libraries"])
    with _variables_noted():
        try:
            for name, variables, state, drawn in record.imports:
                is_left_out = name in order["left_out"] or name.partition(".")[0] in preload.NEVER
                if name in sys.modules or is_left_out or late_imports.process_state() != state:
                    continue
                if unlike := _take_on(variables, record):
                    _Environ.per_worker = tuple({*_Environ.per_worker, *unlike})
                    if any(each.startswith(libraries) for each in unlike):
                        continue
                try:
                    _import_one(name, drawn, record, printed)
                except _UnfitError as error:
                    error.module = name
                    raise
        finally:
            printed.end()


def _take_on(variables: dict[str, str | None], record: Any) -> list[str]:
    """Set variables that the script had set to constants; return those that still differ from the worker's."""
    unlike = []
    wanted = {**_found_by_imports, **variables}
    now = _all_variables()
    for name in {name for name, _ in wanted.items() ^ now.items()}:
        value = wanted.get(name)
        is_constant = name not in variables or value is None or value in record.constants
        if value == now.get(name):
            continue
        if is_constant and name not in record.differing and not name.startswith(_Environ.per_worker):
            _set(name, value)
        else:
            unlike.append(name)
    return unlike


def _all_variables() -> dict[str, str]:
    """Return all variables, without recording that."""
    found = os.environ._data  # type: ignore[attr-defined]
    return {os.fsdecode(name): os.fsdecode(value) for name, value in found.items()}


def _set(name: str, value: str | None) -> None:
    _set_for_imports[name] = value
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value


def _import_one(name: str, drawn: Sequence[str], record: Any, printed: _Printed) -> None:
    """Import a module that workers have imported late. Raises _UnfitError if it cannot be imported early."""
    files, modules, random = _open_files(), {*sys.modules}, late_imports.random_states()
    _import(name, ())
    _check(files)
    if not_alike := record.why_not_alike(modules):
        raise _UnfitError(not_alike)
    if printed.has_text():
        raise _UnfitError(f"{name} prints when it is imported")
    after = late_imports.random_states()
    if any(random.get(kind) != after.get(kind) for kind in drawn):
        raise _UnfitError(f"{name} draws random numbers when it is imported")


def _import(module: str, names: Sequence[str]) -> None:
    failed = ""
    try:
        imported = importlib.import_module(module)
        for name in names:
            if name != "*" and not hasattr(imported, name):
                importlib.import_module(f"{module}.{name}")
    except BaseException as error:  # the script will raise and report it itself
        failed = type(error).__name__
    if reason := _Environ.why_unfit():
        raise _UnfitError(reason)
    if failed:
        raise _UnfitError(f"{module} cannot be imported ({failed})")
    now = _all_variables()
    if changed := [name for name, value in _set_for_imports.items() if now.get(name) != value]:
        raise _UnfitError(f"{module} sets {changed[0]} when it is imported, after the script has set it")


def _check(open_before: set[str]) -> None:
    """Raise _UnfitError unless this process has one thread, no child, no new open file and no CUDA context."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise _UnfitError("CUDA is in use after the imports")
    if opened := sorted(_open_files() - open_before):
        raise _UnfitError(f"the imports left {opened[0]} open")
    # NumPy's OpenBLAS ends its threads before a fork and starts them again when needed. So after a first fork, of a
    # process that exits at once, only threads are left that a fork does not end. It takes about 20 ms.
    if _threads():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    if threads := _threads():
        raise _UnfitError(f"the imports left {len(threads)} threads running ({', '.join(threads)})")
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return
    raise _UnfitError("the imports left a process running")


def _threads() -> list[str]:
    """Return the names of other threads of this process that would be missing after a fork.

    jemalloc, which comes with pyarrow, stops its own thread around a fork, and works without it after that.
    """
    names = []
    for number in sorted(map(int, os.listdir("/proc/self/task"))):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{number}/comm", encoding="utf-8") as file:
            if number != os.getpid() and (name := file.read().strip()) != "jemalloc_bg_thd":
                names.append(name)
    return names


@contextlib.contextmanager
def _variables_noted() -> Iterator[None]:
    """Record the variables that imports read meanwhile, then those that they have set; then restore the others."""
    before = _all_variables()
    for environ in (os.environ, os.environb):
        environ.__class__ = _Environ
    try:
        yield
    finally:
        for environ in (os.environ, os.environb):
            environ.__class__ = os._Environ
    after = _all_variables()
    for name in {name for name, _ in before.items() ^ after.items()}:
        if name not in _set_for_imports:
            _set_by_imports[name] = after.get(name)
        elif name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


def _is_monitored() -> bool:
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    return monitoring is not None and any(monitoring.get_tool(tool) is not None for tool in range(6))


def _open_files() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # descriptor of the listing itself
            continue
    return found - {os.devnull, "/dev/urandom", "/dev/random"}


class _Printed:
    """Captures output and errors from now on, for the workers."""

    def __init__(self) -> None:
        self._streams = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
        self._texts: dict[int, bytes] = {}
        for descriptor in self._streams:
            file = os.memfd_create("printed")
            os.dup2(file, descriptor)
            os.close(file)

    def end(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, stream in self._streams.items():
            self._texts[descriptor] = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            os.dup2(stream, descriptor)
            os.close(stream)

    def has_text(self) -> bool:
        sys.stdout.flush()
        sys.stderr.flush()
        return any(os.fstat(descriptor).st_size for descriptor in self._streams)

    def repeat(self) -> None:
        for descriptor, text in self._texts.items():
            while text:
                text = text[os.write(descriptor, text) :]


def _fork(control: socket.socket) -> bool:
    """Fork a process that becomes the agent's child; return True there, once it has been adopted.

    An intermediate process ends at once: its child is adopted by the agent, which is a subreaper.
    """
    passed_read, passed_write = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.write(passed_write, f"-{error.errno}".encode())
            os._exit(1)
        if pid:
            os.write(passed_write, str(pid).encode())
            os._exit(0)
        os.close(passed_read)
        os.close(passed_write)
        control.close()
        while os.getppid() == between:
            time.sleep(0.0002)
        return True
    os.close(passed_write)
    with os.fdopen(passed_read, "rb") as passed:
        pid = int(passed.read() or b"-11")
    control.send(json.dumps({"pid": pid}).encode())  # first, so that the agent continues while the other process ends
    os.waitpid(between, 0)
    return False


def _read_json(descriptor: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    return found


def _become_child_of(agent: int) -> None:
    """End together with the agent from now on, at once if it has ended already; start a session."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)
    os.setsid()


def _become(order: dict[str, Any], streams: Sequence[int], go: int) -> None:
    """Turn this process into a worker once the agent allows it, equal to one started by exec."""
    _become_child_of(order["agent"])
    if not os.read(go, 1):
        os._exit(1)
    os.close(go)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SENT_TO_ALL)
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    if order["has_input"]:  # a pipe, which is not seekable
        _open_stream("stdin", 0)
    if (threading := sys.modules.get("threading")) is not None:
        threading.main_thread()._set_native_id()  # a fork keeps the old one until Python 3.13
    os.environ.clear()
    os.environ.update(order["env"])
    for name, value in _set_by_imports.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.chdir(order["cwd"])
    _show_as(order["argv"], order["env"])
    sys.argv = order["argv"][2:]
    sys.orig_argv[:] = order["argv"]
    _renew_secrets()
    if "LD_PRELOAD" not in os.environ:  # a profiler may write its results at exit
        _skip_destructors()


def _renew_secrets() -> None:
    """Reseed this process, as the start of an interpreter does. The module `random` does that itself."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)


def _skip_destructors() -> None:
    """Make exit() skip the handlers of libraries loaded so far, such as destructors of torch's tables.

    They would copy 40 MB of shared memory in each worker, which is half of the time that its end takes (torch 2.13).
    Handlers that are registered later are called, and the streams of C are flushed.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # the GNU C library
        libc.on_exit(libc._exit, None)
        libc.__cxa_atexit(libc.fflush, None, None)


class _MemoryMap(ctypes.Structure):
    """The kernel's struct prctl_mm_map."""

    _fields_ = [  # in the form of ctypes
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack", "arg_start",
            "arg_end", "env_start", "env_end", "auxv",
        )),
        ("auxv_size", ctypes.c_uint32), ("exe_fd", ctypes.c_uint32),
    ]  # fmt: skip


def _show_as(argv: Sequence[str], env: dict[str, str]) -> None:
    """Show this command and these variables in ps and /proc/PID/environ.

    If the kernel does not support that, those of the fork server are shown.
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    number = {name: int(fields[at - 3]) for name, at in (
        ("start_code", 26), ("end_code", 27), ("start_stack", 28), ("start_data", 45), ("end_data", 46),
        ("start_brk", 47),
    )}  # fmt: skip
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    arguments = b"".join(os.fsencode(each) + b"\0" for each in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    memory = ctypes.create_string_buffer(arguments + variables, len(arguments) + len(variables))
    start = ctypes.addressof(memory)
    end = start + len(arguments)
    described = _MemoryMap(
        **number, brk=libc.sbrk(0), arg_start=start, arg_end=end, env_start=end, env_end=end + len(variables),
        exe_fd=0xFFFFFFFF,
    )  # fmt: skip
    size = ctypes.c_ulong(ctypes.sizeof(described))
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(described), size, 0) == 0:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # never freed: the kernel reads it until the process ends


if __name__ == "__main__":
    main()
