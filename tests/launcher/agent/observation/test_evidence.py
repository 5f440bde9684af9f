"""Where workers stand is found out within the limit, and they go on as if nothing had happened."""

import ast
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from testbed import REPOSITORY
from testbed.ports import free_port
from testbed.present import present
from testbed.processes import Program, started, wait_until
from testbed.require import require

from launcher.agent.observation import evidence as evidence_module
from launcher.agent.observation.evidence import MAX_BYTES, STACK_SIGNAL, Collection, Subject
from launcher.agent.workers.worker import Files
from launcher.hangs.positions import rank_position
from launcher.protocol.reports import Evidence

BOOTSTRAP = REPOSITORY / "launcher/agent/workers/bootstrap.py"
LIMIT_S = 60.0  # only those that never answer take it


class Workers:
    """Scripts that were started as the agent starts them, rank by rank, and say `up` where they are to be looked at."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.processes: list[Program] = []

    def start(
        self, text: str, *, wait: bool = True, through: Sequence[str] = (str(BOOTSTRAP), "script"), **env: str
    ) -> Path:
        """Start a worker; return its script."""
        rank = len(self.processes)
        script = self._folder / f"script{rank}.py"
        # No function of the script's own, where it could still be when the line was read.
        script.write_text("up = __import__('functools').partial(print, 'up', flush=True)\n" + textwrap.dedent(text))
        env = {"TORCHELASTIC_ERROR_FILE": str(self._folder / f"0-{rank}.json"), **env}
        self.processes.append(
            self._stack.enter_context(started(sys.executable, "-u", *through, script, env=env, cwd=self._folder))
        )
        if wait:
            self.wait_up(rank)
        return script

    def wait_up(self, rank: int) -> None:
        said = self.processes[rank].stdout
        assert said.readline() == b"up\n"

    def stack_file(self, rank: int) -> Path:
        return self._folder / f"0-{rank}.json.stack"

    def subjects(self) -> list[Subject]:
        return [Subject(0, rank, each.pid, self.stack_file(rank)) for rank, each in enumerate(self.processes)]

    def collect(self, limit_s: float = LIMIT_S) -> list[Evidence]:
        began = time.monotonic()
        collection = Collection(7, self.subjects(), limit_s)
        try:
            while (found := collection.step()) is None:
                time.sleep(collection.pause_s)
                reap(collection)
        finally:
            collection.close()
        assert time.monotonic() - began < limit_s + 20
        wait_until(lambda: reap(collection), "every py-spy is gone")
        return found

    def go(self) -> None:
        """Let those go on that wait for the file `go`."""
        (self._folder / "go").touch()

    def end(self, rank: int) -> bytes:
        """Wait until a worker has ended well; return what it said since it was up."""
        out, err = self.processes[rank].communicate(timeout=60)
        assert self.processes[rank].returncode == 0, err
        return out


def reap(collection: Collection) -> bool:
    """Reap as the agent does, but for the workers; return whether no py-spy is left."""
    left = False
    for pid in filter(None, [look._spy for look in collection._looks]):
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                collection.reaped(pid)
            else:
                left = True
    return not left


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.setattr(evidence_module, "ANSWER_S", LIMIT_S)  # or a busy machine has py-spy asked
    with ExitStack() as stack:
        yield Workers(tmp_path, stack)


def states_in(pid: int, name: str) -> str:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(line.split()[1] for line in text.splitlines() if line.startswith(f"{name}:"))


# ---- what is found -------------------------------------------------------------------------------------------


def test_agent_and_worker_know_the_same_signal() -> None:
    assignments = [node for node in ast.parse(BOOTSTRAP.read_text()).body if isinstance(node, ast.Assign)]
    values = {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in assignments}
    assert values["STACK_SIGNAL"] == str(STACK_SIGNAL)
    assert signal.SIGRTMIN < STACK_SIGNAL < signal.SIGRTMAX


def test_every_rank_says_where_it_stands(workers: Workers) -> None:
    use_cpu = "while time.process_time() < 0.1: pass"
    for rank in range(8):
        workers.start(f"import time\ndef step{rank}(): up(); time.sleep(600)\n{use_cpu}\nstep{rank}()", wait=False)
    for rank in range(8):
        workers.wait_up(rank)
    found = workers.collect()
    assert [(each.number, each.attempt, each.rank) for each in found] == [(7, 0, rank) for rank in range(8)]
    for each, process in zip(found, workers.processes, strict=True):
        assert each.pid == process.pid
        assert each.state in "RS"
        assert each.rss_bytes > 1 << 20
        assert 0 < each.cpu_s < 60
        assert rank_position(each).where.endswith(f"script{each.rank}.py:3 in step{each.rank}")


def test_only_the_newest_stack_counts(workers: Workers) -> None:
    script = workers.start(
        """
        import os, threading, time
        def first(): up(); go.wait()
        def second(): up(); threading.Event().wait(600)
        def watch():
            while not os.access("go", os.F_OK): time.sleep(0.01)
            go.set()
        go = threading.Event()
        threading.Thread(target=watch).start()
        first()
        second()
        """
    )
    (one,) = workers.collect()
    assert rank_position(one).where == f"{script}:4 in first"
    workers.go()
    workers.wait_up(0)
    (two,) = workers.collect()
    assert rank_position(two).where == f"{script}:5 in second"
    assert "in first" not in two.stack
    assert "in first" not in workers.stack_file(0).read_text(), "the file does not grow for ever"


def test_main_thread_is_distinguished_from_others(workers: Workers) -> None:
    workers.start(
        """
        import threading, time
        def other(): time.sleep(60)
        def main(): up(); time.sleep(60)
        for _ in range(3): threading.Thread(target=other, daemon=True).start()
        main()
        """
    )
    (found,) = workers.collect()
    assert rank_position(found).where.endswith("in main")
    assert found.stack.count(" in other") == 3


def test_no_more_than_64_kib_a_rank_with_the_main_thread_in_it(workers: Workers) -> None:
    workers.start(
        """
        import threading, time
        ready = threading.Semaphore(0)
        def deep(n):
            if n: deep(n - 1)
            else: ready.release(); time.sleep(60)
        for _ in range(60): threading.Thread(target=deep, args=(90,), daemon=True).start()
        for _ in range(60): ready.acquire()
        def main(): up(); time.sleep(60)
        main()
        """
    )
    (found,) = workers.collect()
    assert MAX_BYTES / 2 < len(found.stack) < MAX_BYTES + 100
    assert workers.stack_file(0).stat().st_size > 2 * MAX_BYTES
    assert rank_position(found).where.endswith("in main")


def test_a_stack_that_is_still_written_is_waited_for(workers: Workers) -> None:
    """On a busy machine a worker may pause in the middle of it: a handler in Python, which does, stands for it."""
    workers.start(
        f"""
        import os, signal, time
        stacks = open(os.environ["TORCHELASTIC_ERROR_FILE"] + ".stack", "ab", buffering=0)
        def write(*_):
            stacks.write(b"the first half\\n")
            end = time.monotonic() + 10 * {evidence_module.QUIET_S}
            while time.monotonic() < end: pass
            stacks.write(b"the second half\\n")
        signal.signal({STACK_SIGNAL}, write)
        up()
        while True: time.sleep(60)
        """,
        through=(),
    )
    (found,) = workers.collect()
    assert found.stack == "the first half\nthe second half\n"


def test_an_earlier_answer_is_not_taken_for_the_new_one(workers: Workers, tmp_path: Path) -> None:
    """The test answers in the worker's place, when that has written its stack."""
    workers.start("import time; up(); time.sleep(600)")
    files, (subject,) = Files(str(tmp_path), 0, 9), workers.subjects()
    os.mkfifo(files.asked)
    listens = os.open(files.asked, os.O_RDWR)

    def answer(operation: str) -> None:
        entry = {"pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 1, "is_p2p": False}
        entry |= {"profiling_name": f"nccl:{operation}", "input_sizes": [[2]], "input_dtypes": ["Float"]}
        entry |= {"state": "started", "retired": False}
        text = json.dumps({"groups": [("0", "default_pg")], "traces": [{"entries": [entry]}]})
        files.collectives.with_suffix(".new").write_text(text)
        files.collectives.with_suffix(".new").replace(files.collectives)

    answer("broadcast")
    collection = Collection(7, [replace(subject, files=files)], LIMIT_S)
    wait_until(lambda: evidence_module._LAST_LINE.search(subject.stack_file.read_bytes()), "its stack is there")
    assert collection.step() is None
    answer("all_reduce")
    (found,) = present(collection.step())
    collection.close()
    os.close(listens)
    assert [call.operation for call in present(found.collectives).calls] == ["all_reduce"]


def test_worker_that_ended_is_left_out(workers: Workers) -> None:
    workers.start("up()")
    workers.start("import time; up(); time.sleep(60)")
    wait_until(lambda: states_in(workers.processes[0].pid, "State") == "Z", "it has ended")
    assert [each.rank for each in workers.collect()] == [1]


def test_worker_that_ends_meanwhile_holds_nothing_up(workers: Workers) -> None:
    workers.start("import time; up(); time.sleep(60)")
    process = workers.processes[0]
    collection = Collection(1, workers.subjects(), 10.0)
    process.kill()
    process.wait()
    collection.reaped(process.pid)
    found = collection.step()
    collection.close()
    assert found is not None
    assert [each.pid for each in found] == [process.pid]


# ---- what it does to a worker --------------------------------------------------------------------------------

# What each does until the file `go` is there; and what it waits for comes then.
WAITS_BEGIN = """\
import os, socket, subprocess, threading, time
def goes(): return os.access("go", os.F_OK)
def repeat(f):
    while not goes(): f()
def later(f, *args): threading.Thread(target=lambda: (repeat(lambda: time.sleep(0.01)), f(*args))).start()
def nap():
    began = time.monotonic()
    time.sleep(0.5)
    assert time.monotonic() - began >= 0.5
"""
WAITS = {
    "sleep": "up(); repeat(nap)",
    "receive": "a, b = socket.socketpair(); later(a.send, b'x'); up(); assert b.recv(1) == b'x'",
    "receive in time": "a, b = socket.socketpair(); b.settimeout(99); later(a.send, b'x'); up(); assert b.recv(1)",
    "read a pipe": "r, w = os.pipe(); later(os.write, w, b'x'); up(); assert os.read(r, 1) == b'x'",
    "wait for a child": "up(); assert os.system('until [ -e go ]; do sleep 0.1; done') == 0",
    "wait for a lock": "a = threading.Lock(); a.acquire(); later(a.release); up(); assert a.acquire(timeout=99)",
    "C code that keeps the interpreter": "up(); repeat(lambda: sum(range(20_000_000)))",
}
WAITS_LINE = WAITS_BEGIN.count("\n") + 2


def test_worker_goes_on_undisturbed(workers: Workers) -> None:
    scripts = [workers.start(f"{WAITS_BEGIN}{code}\nprint('done')", wait=False) for code in WAITS.values()]
    for rank in range(len(scripts)):
        workers.wait_up(rank)
    for _ in range(3):
        found = workers.collect()
        assert len(found) == len(scripts)
    for each, script in zip(found, scripts, strict=True):
        assert f'"{script}", line {WAITS_LINE} in <module>' in each.stack
    workers.go()
    assert {name: workers.end(rank) for rank, name in enumerate(WAITS)} == dict.fromkeys(WAITS, b"done\n")


def test_gloo_collective_goes_on_undisturbed(workers: Workers) -> None:
    port = free_port()
    for rank in range(2):
        workers.start(
            """
            import os, time, torch, torch.distributed as dist
            dist.init_process_group("gloo")
            dist.barrier()
            def step():
                value, rank = torch.ones(4), dist.get_rank()
                up()
                while rank == 1 and not os.access("go", os.F_OK): time.sleep(0.05)
                dist.all_reduce(value)
                print(value.tolist(), flush=True)
            step()
            dist.destroy_process_group()
            """,
            wait=False,
            RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
        )
    for rank in range(2):
        workers.wait_up(rank)
    wait_until(lambda: rank_position(workers.collect()[0]).inside == "all_reduce", "it is in the collective")
    for _ in range(3):
        waiting, sleeping = (rank_position(each) for each in workers.collect())
        assert (waiting.where.rpartition(":")[2], waiting.inside) == ("10 in step", "all_reduce")
        assert (sleeping.where.rpartition(":")[2], sleeping.inside) == ("9 in step", "")
    workers.go()
    assert [workers.end(rank) for rank in range(2)] == [b"[2.0, 2.0, 2.0, 2.0]\n"] * 2


def test_scripts_own_fault_handler_is_its_own(workers: Workers) -> None:
    workers.start(
        """
        import faulthandler, os, signal, time
        mine = open("mine.txt", "w+")
        faulthandler.enable(mine)
        faulthandler.register(signal.SIGUSR1, mine)
        up()
        time.sleep(60)
        """
    )
    assert "<module>" in workers.collect()[0].stack
    mine = workers.stack_file(0).with_name("mine.txt")
    assert mine.read_text() == ""
    workers.processes[0].send_signal(signal.SIGUSR1)
    wait_until(lambda: "<module>" in mine.read_text(), "its own handler ran")


def test_a_worker_s_child_has_neither_its_file_nor_its_handler(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "import os\nfiles = (f'/proc/self/fd/{n}' for n in range(3, 1000))\n"
        "print(open('/proc/self/status').read(), [os.readlink(file) for file in files if os.path.exists(file)])"
    )
    workers.start(
        """
        import subprocess, sys
        subprocess.run([sys.executable, "other.py"], close_fds=False)
        """,
        wait=False,
    )
    said = workers.end(0).decode()
    assert ".stack" not in said
    fields = dict(line.split(":", 1) for line in said.splitlines() if line.startswith("Sig"))
    assert not (int(fields["SigCgt"], 16) | int(fields["SigIgn"], 16)) >> (STACK_SIGNAL - 1) & 1


def test_signal_after_the_handlers_are_taken_down_ends_no_one(workers: Workers) -> None:
    workers.start(f"import faulthandler, time; faulthandler.unregister({STACK_SIGNAL}); up(); time.sleep(1)")
    os.kill(workers.processes[0].pid, STACK_SIGNAL)
    workers.end(0)


def test_worker_without_the_handler_is_never_signalled(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_module, "find_py_spy", lambda: None)
    workers.start("import time; up(); time.sleep(60)", through=())
    workers.start(  # its own handler, and no file of ours
        f"import os, signal, time; signal.signal({STACK_SIGNAL}, lambda *_: print('hit', flush=True)); up()\n"
        "while not os.access('go', os.F_OK): time.sleep(0.01)",
        through=(),
    )
    found = workers.collect(4.0)
    assert [each.stack for each in found] == ["", ""]
    workers.go()
    assert workers.end(1) == b""
    assert workers.processes[0].poll() is None


def test_files_that_reuse_the_closed_descriptor_get_no_stack(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_module, "find_py_spy", lambda: None)
    workers.start(
        """
        import os, time
        os.closerange(3, 1000)
        files = [open(f"mine{n}", "w") for n in range(20)]
        up()
        time.sleep(60)
        """
    )
    assert workers.collect(1.0)[0].stack == ""
    assert [path.stat().st_size for path in workers.stack_file(0).parent.glob("mine*")] == [0] * 20


# ---- those that do not answer --------------------------------------------------------------------------------


@pytest.fixture
def py_spy() -> None:
    """Skip where there is no py-spy, which is optional, or where it may not look into another process."""
    program = evidence_module.find_py_spy()
    require(program, "py-spy", "pip install py-spy")
    with started(sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)") as process:
        process.stdout.readline()
        argv = [str(program), "dump", "--nonblocking", "--pid", str(process.pid)]
        tried = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        if tried.returncode != 0 and "ermission" in tried.stderr:
            pytest.skip("this user may not look into processes")


SILENT: dict[str, tuple[str, Callable[[int], None]]] = {
    "stopped": ("", lambda pid: os.kill(pid, signal.SIGSTOP)),
    "without handler": (f"faulthandler.unregister({STACK_SIGNAL})", lambda _: None),
    "blocked": (f"signal.pthread_sigmask(signal.SIG_BLOCK, [{STACK_SIGNAL}])", lambda _: None),
}


@pytest.mark.usefixtures("py_spy")
@pytest.mark.parametrize(("code", "then"), SILENT.values(), ids=SILENT.keys())
def test_py_spy_looks_at_one_that_does_not_answer(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, code: str, then: Callable[[int], None]
) -> None:
    monkeypatch.setattr(evidence_module, "ANSWER_S", 1.0)
    script = workers.start(
        f"""
        import faulthandler, signal, threading, time
        {code}
        def other(): time.sleep(60)
        threading.Thread(target=other, daemon=True).start()
        def stuck(): up(); time.sleep(60)
        stuck()
        """
    )
    workers.start("import time\ndef well(): up(); time.sleep(60)\nwell()")
    pid = workers.processes[0].pid
    then(pid)
    is_stopped = then is SILENT["stopped"][1]
    wait_until(lambda: not is_stopped or states_in(pid, "State") == "T", "it is stopped")
    silent, answering = workers.collect()
    assert rank_position(silent).where == f"{script}:7 in stuck"
    assert " other " in silent.stack
    assert rank_position(answering).where.endswith("in well")
    assert (states_in(pid, "State") == "T") == is_stopped


def test_nothing_takes_longer_than_the_limit(workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "py-spy"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(evidence_module, "find_py_spy", lambda: str(hanging))
    for _ in range(6):
        workers.start("import time; up(); time.sleep(60)", through=())
    assert [each.stack for each in workers.collect(0.5)] == [""] * 6
    assert not list(tmp_path.glob("*.py-spy"))


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_worker_stopped_and_continued_goes_on(workers: Workers) -> None:
    workers.start("import os, time; up()\nwhile not os.access('go', os.F_OK): time.sleep(0.01)\nprint('done')")
    with _stopped(workers.processes[0].pid):
        wait_until(lambda: states_in(workers.processes[0].pid, "State") == "T", "it is stopped")
        assert workers.collect(4.0)[0].state == "T"
    workers.go()
    assert workers.end(0) == b"done\n"
