"""Workers forked from a process with their packages imported: what they find is what a start by exec gives."""

from __future__ import annotations

import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from testbed import REPOSITORY
from testbed.fork_server import prepare_for
from testbed.processes import MARK, Result, run_dtrain, run_program, started_dtrain, wait_until
from testbed.require import require
from testbed.write import write

from launcher.agent.cleanup.run_tag import RunTag
from launcher.agent.observation.evidence import find_py_spy
from launcher.agent.warm.kept import describe
from launcher.agent.workers.preload import find_preloads
from launcher.agent.workers.warm_start import ForkServer, Warmth

# What a process can find out about itself. numpy stands for a package that takes long to import.
LOOK = """
import numpy
import json, os, random, resource, signal, sys, threading, warnings
import ctypes, faulthandler, gc, locale, multiprocessing, pickle


class OfMain:
    pass


def field(name):
    return next(line.split(":", 1)[1].split() for line in open("/proc/self/status") if line.startswith(name))


def environ():
    text = open("/proc/self/environ").read()
    return dict(line.split("=", 1) for line in text.split("\\0") if line)


def files():
    names = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sorted(os.readlink(name).split(":")[0].partition("dtrain-")[0] for name in names if os.path.exists(name))


ones = numpy.ones((300, 300))
look = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
    "executable": sys.executable, "main": [__name__, __file__, __spec__ and __spec__.name, __package__],
    "globals": sorted(name for name in globals() if name.startswith("__")),
    "pickled": pickle.loads(pickle.dumps(OfMain())).__class__.__module__,
    "filters": [str(each) for each in warnings.filters],
    "threads": [thread.name for thread in threading.enumerate()], "tasks": len(os.listdir("/proc/self/task")),
    "first_thread": threading.Thread().name,
    "signals": {number: str(signal.getsignal(number)).partition(" at 0x")[0]
                for number in sorted(signal.valid_signals() - {9, 19, 32, 33})
                if "object at" not in str(signal.getsignal(number))},
    "blocked": field("SigBlk"), "ignored": field("SigIgn"), "caught": field("SigCgt"),
    "limits": [resource.getrlimit(number) for number in range(16) if number != 10],
    "nice": os.getpriority(os.PRIO_PROCESS, 0), "cores": sorted(os.sched_getaffinity(0)), "umask": os.umask(0o22),
    "cwd": os.getcwd(), "is_leader": os.getsid(0) == os.getpid() == os.getpgid(0),
    "streams": [(each.encoding, each.errors, each.line_buffering, each.write_through, each.isatty(), each.name,
                 each.seekable())
                for each in (sys.stdin, sys.stdout, sys.stderr)],
    "stdin": sys.stdin.read(), "files": files(), "faulthandler": faulthandler.is_enabled(),
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()], "locale": locale.setlocale(locale.LC_ALL),
    "comm": open("/proc/self/comm").read(), "cmdline": open("/proc/self/cmdline").read().split("\\0"),
    "environ": {name: value for name, value in os.environ.items() if name != "DTRAIN_AGENT"},
    "same_environ": environ() == dict(os.environ),
    "tracing": [sys.gettrace() is None, sys.getprofile() is None, sys.getrecursionlimit(), sys.getswitchinterval()],
    "method": multiprocessing.get_start_method(allow_none=True), "hook": sys.excepthook is sys.__excepthook__,
    "thread": threading.main_thread().native_id == os.getpid(),
    "kernel": [open(f"/proc/self/{name}").read() for name in ("coredump_filter", "oom_score_adj", "timerslack_ns")],
    "dumps_core": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0),
    "preloaded": "libBrokenLocale" in open("/proc/self/maps").read(),
    "numpy.random": "numpy.random" in sys.modules,
    "blas": float((ones @ ones).sum()),
}
secret = {"random": random.random(), "numpy": float(numpy.random.rand()),
          "authkey": multiprocessing.current_process().authkey.hex()}
open(f"{os.environ['OUT']}-{os.environ['RANK']}", "w").write(json.dumps([look, secret]))
"""


def look(folder: Path, method: str, *argv: str | Path, preloaded: str = "") -> list[list[Any]]:
    """What each of two workers finds: itself, and what must be its alone. The user has set what a process inherits."""
    out = folder / method
    result = run_program(
        "sh", "-c", 'umask 27; ulimit -n 400 -c 0; exec nice -n 3 "$@"', "-", sys.executable, "-m", "launcher",
        "run", "--start-method", method, "--nproc-per-node", "2", "--run-id", "r", "--export", f"OUT={out}", *argv,
        cwd=folder, env={"LD_PRELOAD": preloaded or None}, outlived="--keep-warm" in argv,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads(Path(f"{out}-{rank}").read_text()) for rank in (0, 1)]


VARYING = {
    "OUT", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "DTRAIN_PROGRESS_FILE", "DTRAIN_RUN_KEY",
    "DTRAIN_GENERATION_PIPE", "DTRAIN_GENERATION_FILE", "DTRAIN_STATE_FILE", "DTRAIN_COPY_FILE", "DTRAIN_COPY_NOTE",
    "DTRAIN_TIMELINE_FILE", "DTRAIN_LEDGER_FILE", "DTRAIN_DEBUGGER_FILE", "TORCH_FR_DUMP_TEMP_FILE", MARK,
}  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "preloaded"),
    [
        pytest.param(("look.py", "--lr", "1"), "", id="script"),
        pytest.param(("-m", "look", "x"), "libBrokenLocale.so.1", id="module, LD_PRELOAD", marks=pytest.mark.slow),
    ],
)
def test_a_forked_worker_is_what_a_started_one_is(
    runtime: Path, tmp_path: Path, argv: tuple[str, ...], preloaded: str
) -> None:
    """Also if it is forked from a process that an earlier run has left warm."""
    write(tmp_path, "look.py", LOOK)
    started = look(tmp_path, "exec", "-x", "OF_RUN=1", *argv, preloaded=preloaded)
    forked = look(tmp_path, "fork", "-x", "OF_RUN=1", *argv, preloaded=preloaded)
    look(tmp_path, "fork", "--keep-warm", "5m", "-x", "OF_THE_FIRST=1", *argv, preloaded=preloaded)
    kept = [(each["pid"], each["runs"]) for each in describe()]
    warm = look(tmp_path, "auto", "--keep-warm", "5m", "-x", "OF_RUN=1", *argv, preloaded=preloaded)
    assert [(each["pid"], each["runs"]) for each in describe()] == kept
    assert forked[0][0]["preloaded"] == bool(preloaded)
    for found in (started, forked, warm):
        for mine, _ in found:
            assert set(mine["environ"]) >= VARYING
            mine["environ"] = {k: v for k, v in mine["environ"].items() if k not in VARYING}
    for found in (forked, warm):
        for (mine, _), (theirs, _) in zip(found, started, strict=True):
            assert {key: (mine[key], theirs[key]) for key in mine if mine[key] != theirs[key]} == {}
        (_, first), (_, second) = found
        assert all(first[key] != second[key] for key in first), "workers share what must be random"


def test_what_ps_shows_of_a_forked_worker_outlives_its_modules() -> None:
    code = """
        import launcher.agent.workers.fork_server as server
        server._show_as(["train.py", "x" * 1000], {"RANK": "0"})
        vars(server).clear()  # as the interpreter does at its end
        print(*(open(f"/proc/self/{name}").read() for name in ("cmdline", "environ")))
    """
    result = run_program(sys.executable, "-c", textwrap.dedent(code))
    assert result.stdout == f"train.py\0{'x' * 1000}\0 RANK=0\0\n", result.stderr


MATHS = """
import numpy, torch
import json, os

torch.set_printoptions(precision=20)
torch.manual_seed(1)
one, rest = torch.rand(200, 200), torch.rand(500, 500)
look = {
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), os.environ["OMP_NUM_THREADS"]],
    "torch": [(one @ one).double().sum().item(), rest.exp().sum().item()], "lapack": torch.linalg.det(one).item(),
    "numpy": [float((each @ each).sum()) for each in (one.double().numpy(), rest.numpy())],
    "tasks": len(os.listdir("/proc/self/task")),
}
secret = {}
open(f"{os.environ['OUT']}-{os.environ['RANK']}", "w").write(json.dumps([look, secret]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 3])
def test_mathematics_with_threads_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    write(tmp_path, "look.py", MATHS)
    forked, started = look(tmp_path, "fork", "look.py"), look(tmp_path, "exec", "look.py")
    assert forked == started
    assert forked[0][0]["threads"][2] == str(threads)


def run_verbose(folder: Path, *argv: str | Path) -> Result:
    """What a run of two workers said, with how they were started."""
    return run_dtrain("run", "-v", "--nproc-per-node", "2", *argv, cwd=folder)


FORKED = "dtrain: 2 workers were forked from processes that had imported their packages\n"


def test_why_workers_are_not_forked_is_said_if_asked(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import json")
    said = "dtrain: workers were started by exec: the script imports only the standard"
    result = run_dtrain("run", "--start-method", "fork", script, cwd=tmp_path)
    assert result.stderr.startswith(said), result
    assert said in run_verbose(tmp_path, script).stderr
    assert said not in run_dtrain("run", script, cwd=tmp_path).stderr


def test_a_script_from_a_pipe_runs_as_ever(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    text = "import numpy\nprint('ran')"
    threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,), daemon=True).start()
    result = run_dtrain("run", "-v", "pipe", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "ran\n" in result.stdout
    assert "workers were started by exec: the script is no plain file" in result.stderr


def test_a_script_of_another_role_is_started_by_exec(installed: Path, tmp_path: Path) -> None:
    write(installed, "heavy.py", "import os; pid = os.getpid()")
    script = write(tmp_path, "script.py", "import heavy, os\nprint('mine', heavy.pid == os.getpid())")
    other = write(tmp_path, "other.py", "import heavy, os\nprint('other', heavy.pid == os.getpid())")
    result = run_verbose(tmp_path, "--role", f"other:1:{other}", script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("mine False") == 2, result
    assert result.stdout.count("other True") == 1
    assert "workers were started by exec: it runs another program than most" in result.stderr


def test_simulated_hosts_have_a_fork_server_each(installed: Path, tmp_path: Path) -> None:
    write(installed, "heavy.py", "import os; pid = os.getpid(); cores = os.sched_getaffinity(0)")
    script = write(
        tmp_path, "script.py", "import heavy, os\nprint('by', heavy.pid, heavy.cores == os.sched_getaffinity(0))"
    )
    result = run_verbose(tmp_path, "--simulate", "--nnodes", "2", script)
    assert "4 workers were forked" in result.stderr, result
    assert len(set(re.findall("by ([0-9]+) True", result.stdout))) == 2


def test_a_package_hidden_by_the_scripts_folder(installed: Path, tmp_path: Path) -> None:
    write(installed, "heavy.py", "import evaluating")
    write(installed, "evaluating.py", "whose = 'installed'")
    write(tmp_path, "evaluating.py", "whose = 'own'")
    script = write(tmp_path, "script.py", "import heavy\nprint(heavy.evaluating.whose)")
    result = run_verbose(tmp_path, script)
    assert result.stdout.count("own\n") == 2, result
    assert "a module of the script's folder is named evaluating" in result.stderr
    safe = run_dtrain("run", "-v", script, cwd=tmp_path, env={"PYTHONSAFEPATH": "1"})
    if sys.version_info >= (3, 11):
        assert "installed\n" in safe.stdout, safe
        assert "1 worker was forked" in safe.stderr


def test_a_tracer_is_in_every_worker(installed: Path, tmp_path: Path) -> None:
    write(installed, "heavy.py", "")
    write(installed, "sitecustomize.py", "import sys; sys.settrace(lambda *_: None)")
    result = run_verbose(tmp_path, write(tmp_path, "script.py", "import heavy, sys\nprint(sys.gettrace())"))
    assert result.stdout.count("<function <lambda>") == 2, result
    assert "a tracer or profiler runs in it" in result.stderr


def test_imports_that_take_too_long_are_not_waited_for(installed: Path, tmp_path: Path) -> None:
    write(installed, "slow.py", "import sys, time; 'fork_server' in sys.argv[0] and time.sleep(200)")
    script = write(tmp_path, "script.py", "import slow\nprint('ran')")
    result = run_verbose(tmp_path, "--start-timeout-s", "24", script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ran\n") == 2
    assert "workers were started by exec: the imports of its process take too long" in result.stderr


@pytest.mark.parametrize(
    ("victim", "signum", "imports"),
    [
        ("dtrain", signal.SIGINT, True),
        ("dtrain", signal.SIGKILL, True),
        ("agent", signal.SIGKILL, True),
        ("guard", signal.SIGKILL, True),
        ("dtrain", signal.SIGKILL, False),
    ],
)
def test_nothing_is_left_of_a_run_that_ends(
    installed: Path, tmp_path: Path, victim: str, signum: signal.Signals, imports: bool
) -> None:
    """While it imports, and while it trains."""
    write(installed, "slow.py", f"import os, time; open(f'pid-{{os.getpid()}}', 'w'); time.sleep({200 * imports})")
    script = write(tmp_path, "script.py", "import slow, time\nopen('ran', 'w')\ntime.sleep(100)")
    with started_dtrain("run", "--nproc-per-node", "2", script, cwd=tmp_path) as process:
        wait_until(lambda: bool([*tmp_path.glob("pid-*" if imports else "ran")]), "it imports, or runs")
        server = psutil.Process(int(next(tmp_path.glob("pid-*")).name.partition("-")[2]))
        agent = server.ppid()
        pids = {"dtrain": process.pid, "agent": agent, "guard": psutil.Process(agent).ppid()}
        os.kill(pids[victim], signum)
        wait_until(lambda: not server.is_running(), "the fork server has ended")
        assert process.wait(100) != 0
    assert (tmp_path / "ran").exists() != imports


def test_where_a_forked_worker_stands_is_shown(tmp_path: Path) -> None:
    source = "import numpy, os, time\ndef hang():\n    open(f'pid-{os.getpid()}', 'w')\n    time.sleep(1000)\nhang()"
    with started_dtrain("run", "--grace-s", "1", write(tmp_path, "script.py", source), cwd=tmp_path) as process:
        wait_until(lambda: bool([*tmp_path.glob("pid-*")]), "it runs")
        process.send_signal(signal.SIGQUIT)
        said = b""
        while b"stacks of all ranks" not in said:
            said += process.stderr.readline()
        assert re.search(rb"script.py:[34] in hang", said), said
        assert b"fork_server.py" not in said
        program = find_py_spy()
        require(program, "py-spy", "pip install py-spy")
        pid = next(tmp_path.glob("pid-*")).name.partition("-")[2]
        dump = subprocess.run([str(program), "dump", "--pid", pid], capture_output=True, text=True, check=False)
    if "ermission" in dump.stderr:
        pytest.skip("py-spy may not look into another process here")
    assert re.search(r"hang \(.*script.py:[34]\)", dump.stdout), dump
    assert "bootstrap.py script" in dump.stdout  # the command of a worker


def test_a_dead_fork_server_is_replaced_however_that_is_found(installed: Path, tmp_path: Path) -> None:
    write(installed, "heavy.py", "")
    write(tmp_path, "script.py", "import heavy")
    prepare = prepare_for(tmp_path)
    selector = selectors.DefaultSelector()
    server = ForkServer(RunTag.new(), selector, Warmth())
    command = ([sys.executable, "-c", ""], {**os.environ})
    streams: dict[str, Any] = {"cwd": "/", "stdout": 1, "stderr": 2}
    children = []

    def loading() -> bool:
        return server.is_loading

    def load() -> None:
        assert server.pid is not None
        children.append(server.pid)
        assert loading()
        # Its imports may take as long as those of the first, and the store does not wait for them.
        assert server.pause_s(time.monotonic()) == math.inf
        children.append(server.fork_or_spawn(*command, **streams))
        while loading():
            for chosen, _ in selector.select(60):
                chosen.data()
        assert server.why_not == ""
        server.has_torch = True  # whose import takes seconds

    try:
        server.prepare(prepare, 1)
        load()
        server.wait_s(0.0)  # a limit that is past
        os.kill(children[0], signal.SIGKILL)
        os.waitid(os.P_PID, children[0], os.WEXITED | os.WNOWAIT)
        with pytest.raises(TimeoutError, match="does not answer"):
            server.fork(*command, **streams)
        load()
        server.wait_s(0.0)
        os.kill(children[2], signal.SIGKILL)
        os.waitid(os.P_PID, children[2], os.WEXITED | os.WNOWAIT)
        server.ended()
        load()
    finally:
        server.kill()
        for pid in children:
            os.waitpid(pid, 0)


def test_a_worker_restarted_alone_waits_for_a_new_fork_server(installed: Path, tmp_path: Path) -> None:
    write(installed, "heavy.py", "import os, time; pid = os.getpid(); os.path.exists('slow') and time.sleep(4)")
    source = """
        import os, heavy, signal, struct, time
        if os.environ["RANK"] == "1":
            while not os.path.exists("back"):
                time.sleep(0.01)
        elif os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            with open(os.environ["DTRAIN_PROGRESS_FILE"], "r+b") as file:  # its failure is its own
                file.seek(16)
                file.write(struct.pack("<Q", 1))
            open("slow", "w").close()
            os.kill(heavy.pid, signal.SIGKILL)
            raise SystemExit(3)
        else:
            print("imported here", heavy.pid == os.getpid())
            open("back", "w").close()
    """
    result = run_verbose(tmp_path, "--max-restarts", "1", write(tmp_path, "script.py", source))
    assert "only this worker restarts" in result.stderr, result
    assert "imported here False" in result.stdout, result


def test_what_an_import_does_and_prints_each_worker_has(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        import atexit, faulthandler, os, signal, sys, warnings
        atexit.register(print, "end")
        print("out")
        print("err", file=sys.stderr)
        warnings.warn("old")
        os.environ["MADE"] = "1"
        os.environ["CHANGED"] += "b"
        del os.environ["GONE"]
        signal.signal(signal.SIGUSR1, print)
        faulthandler.register(signal.SIGUSR2)
    """
    write(installed, "heavy.py", source)
    monkeypatch.setenv("CHANGED", "a")
    monkeypatch.setenv("GONE", "1")
    text = """
        import heavy
        import os, signal
        print([os.environ.get(name) for name in ("MADE", "CHANGED", "GONE")], signal.getsignal(signal.SIGUSR1) is print)
        os.kill(os.getpid(), signal.SIGUSR2)
    """
    result = run_verbose(tmp_path, write(tmp_path, "script.py", text))
    assert FORKED in result.stderr, result
    for rank in (0, 1):
        out, err = (
            [line.partition("] ")[2] for line in stream.splitlines() if f":{rank}]" in line]
            for stream in (result.stdout, result.stderr)
        )
        assert out == ["out", "['1', 'ab', None] True", "end"]
        assert err.count("err") == 1
        assert len([line for line in err if "UserWarning: old" in line]) == 1
        assert len([line for line in err if 'script.py", line 5 in <module>' in line]) == 1


@pytest.mark.parametrize(
    ("text", "imports"),
    [
        ('"""Doc."""\nfrom __future__ import annotations\nimport a, os\nfrom b.c import d', ["a", "b.c"]),
        ("X = 1\nY: int = -X\ndef f(): import a\nimport b", ["b"]),
        ("try:\n    import a\nexcept ImportError:\n    a = None\nimport b", ["b"]),
        ("if X:\n    import a\nelse:\n    b = 1\nimport b", ["b"]),
        ("import a\nprint()\nimport b", ["a"]),
        ("import a\nx.y = 1\nimport b", ["a"]),
        ("import a\nX = f()\nimport b", ["a"]),
        ("import time\nX = time.time()\nY = round(time.time())\nimport a", []),
        ("import a, time, os\nX = max(0.0, time.time()) + int(os.environ['RANK'])\nimport b", ["a", "b"]),
        ("import a\nos.environ['A'] = 'b'\nos.environ.setdefault('A', 'b')\nimport b", ["a", "b"]),
        ("import a\nos.environ['A'] = str(f())\nimport b", ["a"]),
        ("import a\nos.environ['A'] = B\nimport b", ["a"]),
        ("import a\nothers['A'] = 'b'\nimport b", ["a"]),
        ("import a\nX[0] = 1\nimport b", ["a"]),
        ("import a\nfor x in y: pass\nimport b", ["a"]),
        ("import a\nif f(): pass\nimport b", ["a"]),
        ("import tensorflow, a", ["a"]),
        ("import lightning, a", ["torch", "a"]),
        ("import a\nfrom . import c\nimport b", ["a"]),
        ("import a\nimport", []),
        ("import own.model, a", ["b", "a"]),
    ],
)
def test_reading_ends_at_what_may_have_an_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, imports: list[str]
) -> None:
    folder = tmp_path / "site-packages"
    for name in ("a.py", "b/__init__.py", "b/c.py", "lightning.py"):
        write(folder, name, "raise AssertionError('it was imported')")
    write(tmp_path, "own/__init__.py", "from .model import VALUE")
    write(tmp_path, "own/model.py", "import os\nimport b\nVALUE = 1\npid = -VALUE")
    monkeypatch.syspath_prepend(str(folder))
    script = write(tmp_path, "script.py", text)
    found = find_preloads("script", str(script), str(REPOSITORY))
    assert [module for module, _ in found.imports] == imports


@pytest.mark.parametrize(
    ("text", "is_imported"),
    [
        ("import torch\ntorch.optim.SGD", True),
        ("import torch, os\nos.environ['TORCHELASTIC_RUN_ID']\ntorch.optim.SGD", True),
        ("import torch, os\nos.environ['TORCH_LOGS'] = 'all'\ntorch.optim.SGD", False),
        ("import torch", False),
    ],
)
def test_what_an_optimizer_imports_unless_variables_change(tmp_path: Path, text: str, is_imported: bool) -> None:
    script = write(tmp_path, "script.py", text)
    assert find_preloads("script", str(script), str(REPOSITORY)).imports_dynamo is is_imported


def test_a_restart_forks_again_and_reads_the_script_again(installed: Path, tmp_path: Path) -> None:
    write(installed, "heavy.py", "import os; pid = os.getpid()")
    script = write(
        tmp_path,
        "script.py",
        """
        import os, sys, heavy
        print("imported by", heavy.pid, "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "0":
                text = open(__file__).read()
                open(__file__, "w").write(text + "\\nprint('a new line')\\n")
            raise SystemExit(3)
        """,
    )
    result = run_verbose(tmp_path, "--max-restarts", "1", script)
    assert result.returncode == 0, result.stderr
    assert len(set(re.findall("imported by ([0-9]+)", result.stdout))) == 1
    assert result.stdout.count("a new line") == 2


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fork_server_that_fails_costs_nothing_but_time(
    installed: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    write(installed, "heavy.py", f"import os; pid = os.getpid(); signum = {int(signum)}")
    script = write(
        tmp_path,
        "script.py",
        """
        import os, heavy
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "0":
                os.kill(heavy.pid, heavy.signum)
            raise SystemExit(3)
        print("imported here", heavy.pid == os.getpid())
        """,
    )
    result = run_verbose(tmp_path, "--max-restarts", "1", script)
    assert result.returncode == 0, result.stderr
    if signum == signal.SIGKILL:  # another has taken its place
        assert "imported here False" in result.stdout, result
    else:
        assert result.stdout.count("imported here True") == 2, result
        assert "workers were started by exec: its process does not answer" in result.stderr


def test_the_store_is_forked_too_and_random_states_differ(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        """
        import os, psutil, torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        agent = psutil.Process(os.getppid())
        if dist.get_rank() == 0:
            shown = [child.cmdline() for child in agent.children()]
            print("store", [each[2:] for each in shown if "launcher.agent.store_process" in each])
        print("random", torch.initial_seed(), float(torch.rand(1)))
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    result = run_verbose(tmp_path, script)
    assert FORKED in result.stderr, result
    assert "'module', 'launcher.agent.store_process']]" in result.stdout
    first, second = re.findall(r"random (\d+) (\S+)", result.stdout)
    assert all(mine != theirs for mine, theirs in zip(first, second, strict=True))


ENDINGS = {
    "of Python": {
        "raise ValueError('wrong')": "ValueError: wrong",
        "int('wrong')": "ValueError: invalid literal",
        "sys.exit(7)": "code 7",
    },
    "at once": {
        "os._exit(9)": "code 9",
        "os.kill(os.getpid(), signal.SIGSEGV)": "SIGSEGV",
        "os.abort()": "SIGABRT",
    },
}


@pytest.mark.parametrize(("kind", "code"), [("of Python", 7), ("at once", 134)])
def test_ends_are_reported_alike(tmp_path: Path, kind: str, code: int) -> None:
    """One end in each attempt of a run."""
    calls = "".join(f"    case {number}: {ending}\n" for number, ending in enumerate(ENDINGS[kind]))
    attempt = "int(os.environ['TORCHELASTIC_RESTART_COUNT'])"
    write(tmp_path, "script.py", f"import numpy, os, sys, signal\nmatch {attempt}:\n{calls}")
    forked, started = (
        run_dtrain("run", "-v", "--start-method", method, "--max-restarts", "2", "script.py", cwd=tmp_path)
        for method in ("fork", "exec")
    )
    assert "forked" in forked.stderr, forked
    assert forked.returncode == started.returncode == code
    for said in ENDINGS[kind].values():
        assert said in forked.stderr, forked
    frames = [re.findall(r"^\[.*?\] +File .*", each.stderr, re.MULTILINE) for each in (forked, started)]
    own = [[frame for frame in each if "/launcher/agent/" not in frame] for each in frames]
    assert own[0] == own[1]
    assert len(own[0]) > 1 or kind == "at once"


def test_what_c_libraries_hold_back_is_written_at_exit(tmp_path: Path) -> None:
    text = """
        import numpy
        import ctypes, os
        libc = ctypes.CDLL(None)
        libc.fopen.restype = ctypes.c_void_p
        file = libc.fopen(os.environ["RANK"].encode(), b"w")
        libc.fputs(b"held back", ctypes.c_void_p(file))
    """
    result = run_verbose(tmp_path, write(tmp_path, "script.py", text))
    assert FORKED in result.stderr, result
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["held back"] * 2


def test_what_packages_hold_is_freed_at_the_end(installed: Path, tmp_path: Path) -> None:
    source = """
        import os

        class Held:
            def __init__(self):
                self.me, self.write = self, os.write

            def __del__(self):
                self.write(1, b"freed\\n")

        held = Held()
    """
    write(installed, "heavy.py", source)
    text = "import heavy, atexit, gc\natexit.register(lambda: print('collects', gc.isenabled()))\nprint('ran')"
    script = write(tmp_path, "script.py", text)
    for method in ("fork", "exec"):
        result = run_verbose(tmp_path, "--start-method", method, script)
        assert (FORKED in result.stderr) == (method == "fork"), result
        for rank in (0, 1):
            lines = [line.partition("] ")[2] for line in result.stdout.splitlines() if f":{rank}]" in line]
            assert lines == ["ran", "collects True", "freed"], method


def test_children_of_every_kind_work_in_a_forked_worker(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "script.py",
        """
        import multiprocessing, os, sys
        import numpy

        def work(x):
            return x * x

        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(method, pool.map(work, [1, 2, 3]), flush=True)
        """,
    )
    result = run_verbose(tmp_path, script)
    assert FORKED in result.stderr, result
    for method in ("fork", "spawn", "forkserver"):
        assert result.stdout.count(f"{method} [1, 4, 9]") == 2
