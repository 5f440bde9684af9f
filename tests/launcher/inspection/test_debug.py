"""`dtrain debug`: pdb in a rank that runs. Whatever becomes of the debugger, the rank goes on."""

import json
import os
import queue
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from testbed.processes import Result, run_dtrain, started_dtrain, wait_until
from testbed.sshd import SshHosts
from testbed.terminal import Terminal, dtrain_on_terminal
from testbed.typed import dtrain
from testbed.warm import HEADER

from launcher.cli.runs.debug import _Said
from launcher.runs.control import Question

PROMPT = "(Pdb rank {}) "


def detached(*words: str | Path, workers: int = 2) -> None:
    result = run_dtrain("run", "--detach", "--run-id", "r", *words, outlived=True)
    assert result.returncode == 0, result
    wait_until(lambda: len([*Path().glob("tick*")]) == workers, "the ranks are there")


def end(exit_code: int = 0) -> None:
    Path("go").touch()
    assert dtrain("wait", "r").returncode == exit_code


def tick(rank: int) -> int:
    return int(Path(f"tick{rank}").read_text() or 0)


def debug(rank: int, typed: str) -> Result:
    return run_dtrain("debug", "r", "--rank", str(rank), stdin=typed)


def assert_goes_on(rank: int) -> None:
    before = tick(rank)
    wait_until(lambda: tick(rank) > before + 1, "the rank goes on")


class Debugger:
    """`dtrain debug` on a terminal; `say` types a line and waits for the next prompt."""

    def __init__(self, terminal: Terminal, rank: int) -> None:
        self.terminal = terminal
        self._prompt = PROMPT.format(rank)

    def wait_prompt(self) -> str:
        self.terminal.read_until(self._prompt)
        shown, self.terminal.shown = self.terminal.shown, ""
        return shown

    def wait_count(self) -> str:
        """Go up to the script's own function from what it has called, which knows none of its names."""
        shown = opened = self.wait_prompt()
        while "count()" not in shown and "tick()" not in shown:
            shown = self.say("up")
        return opened

    def say(self, line: str) -> str:
        self.terminal.type(f"{line}\n")
        return self.wait_prompt()


def value(debugger: Debugger, expression: str) -> int:
    """Return a number that the rank has; the line that was typed is shown as well."""
    _, number, _ = debugger.say(f"p {expression}").split("\r\n")
    return int(number)


@pytest.fixture(params=["exec", "fork"])
def start_method(request: pytest.FixtureRequest, folder: Path) -> list[str]:
    """Options by which workers are started by exec, or forked from a process with packages imported."""
    method: str = request.param
    (folder / "script.py").write_text("import psutil\n" + (folder / "script.py").read_text())
    return ["--start-method", method]


def test_variables_are_changed_and_lines_stepped_through(start_method: list[str], folder: Path) -> None:
    detached(*start_method, "--nproc-per-node", "2", "script.py")
    with dtrain_on_terminal("debug", "r", "--rank", "1", cwd=folder) as terminal:
        debugger = Debugger(terminal, 1)
        opened = debugger.wait_prompt()
        assert "rank 1 on " in opened
        assert "torch's own timeouts keep running" in opened
        assert_goes_on(0)
        while "count()" not in opened:
            opened = debugger.say("up")
        debugger.say("!n = 1000000")
        debugger.say("b tick")
        assert "tick()" in debugger.say("c")
        assert value(debugger, "n") - 1000000 in (0, 1), "as the script was before tick or in it"
        assert "bootstrap.py" not in debugger.say("w")
        while "-> tick(n)" not in debugger.say("n"):
            pass
        assert tick(1) - 1000000 in (0, 1)
        debugger.say("!n = 5000000")
        terminal.type("q\n")
        assert terminal.wait() == 0
        assert "rank 1 goes on without the debugger" in terminal.shown
    wait_until(lambda: tick(1) >= 5000000, "it has gone on with what was set")
    end()


# A module that the debugger imports too, here in the script's folder. Half of it is there when the debugger is asked.
SLOW_MODULE = """
import os, pathlib, signal
reads, writes = os.pipe()
os.set_blocking(writes, False)
signal.set_wakeup_fd(writes)
pathlib.Path("tick0").touch()
while os.read(reads, 1)[0] != 52:
    pass
signal.set_wakeup_fd(-1)
exec(compile(pathlib.Path(os.__file__).with_name("bdb.py").read_text(), "bdb.py", "exec"))
"""


def test_a_rank_that_imports_the_debugger_s_modules_opens_later(folder: Path) -> None:
    """The script trains in an import of its own, which does not end: in that the debugger opens."""
    (folder / "bdb.py").write_text(SLOW_MODULE)
    (folder / "script.py").rename(folder / "training.py")
    (folder / "script.py").write_text("import bdb\nimport training\n")
    detached("script.py", workers=1)
    result = debug(0, "p 'open'\nq\n")
    assert (result.returncode, "'open'" in result.stdout) == (0, True), result
    assert_goes_on(0)
    assert "'open'" in debug(0, "p 'open'\nq\n").stdout
    end()


def test_a_breakpoint_is_hit_until_it_is_cleared(counting: Path) -> None:
    with dtrain_on_terminal("debug", "r", "--rank", "0", cwd=counting) as terminal:
        debugger = Debugger(terminal, 0)
        debugger.wait_count()
        debugger.say("b tick")
        numbers = []
        for _ in range(3):
            assert "tick()" in debugger.say("c")
            numbers.append(value(debugger, "n"))
        assert numbers == [*range(numbers[0], numbers[0] + 3)]
        assert "count()" in debugger.say("r") + debugger.say("n") + debugger.say("n")
        debugger.say("cl 1")
        terminal.type("c\n")
        assert terminal.wait() == 0
    assert_goes_on(0)


def test_each_way_to_leave_lets_the_rank_go_on(counting: Path) -> None:
    for keys in ("q\n", "exit\n", "\x04", "\x03", "c\n"):
        with dtrain_on_terminal("debug", "r", "--rank", "0", cwd=counting) as terminal:
            Debugger(terminal, 0).wait_prompt()
            terminal.type(keys)
            assert terminal.wait() == 0, repr(keys)
            assert "rank 0 goes on without the debugger" in terminal.shown, repr(keys)
        assert_goes_on(0)
        again = debug(0, "p 'again'\nq\n")
        assert again.returncode == 0, (keys, again)
        assert "'again'" in again.stdout, repr(keys)


@pytest.mark.parametrize("at", ["the prompt", "a breakpoint's way"])
def test_a_killed_command_lets_the_rank_go_on(at: str, counting: Path) -> None:
    with dtrain_on_terminal("debug", "r", "--rank", "0", cwd=counting) as terminal:
        debugger = Debugger(terminal, 0)
        debugger.wait_count()
        if at != "the prompt":
            debugger.say("b tick, n < 0")  # traced, and never there
            terminal.type("c\n")
            assert_goes_on(0)
        terminal.process.kill()
    assert_goes_on(0)
    wait_until(lambda: "'free'" in debug(0, "p 'free'\nq\n").stdout, "another may come")


def test_the_end_of_the_rank_is_reported(folder: Path) -> None:
    detached("--nproc-per-node", "2", "script.py")
    with dtrain_on_terminal("debug", "r", "--rank", "1", cwd=folder) as terminal:
        debugger = Debugger(terminal, 1)
        debugger.wait_prompt()
        pid = value(debugger, "__import__('os').getpid()")
        os.kill(pid, signal.SIGKILL)
        assert terminal.wait() == 1
        assert "rank 1 on " in terminal.shown
        assert "was killed by SIGKILL" in terminal.shown
    end(128 + signal.SIGKILL)


def test_the_end_of_the_run_is_reported_and_is_not_held_up(folder: Path) -> None:
    detached("--nproc-per-node", "2", "script.py")
    with dtrain_on_terminal("debug", "r", "--rank", "1", cwd=folder) as terminal:
        debugger = Debugger(terminal, 1)
        debugger.wait_prompt()
        assert dtrain("stop", "r").returncode == 0
        assert terminal.wait() == 1
        assert "the attempt ends" in terminal.shown or "rank 1 on" in terminal.shown
    assert dtrain("wait", "r").returncode == 128 + signal.SIGTERM


def test_a_rank_has_one_debugger_and_others_may_have_theirs(counting: Path) -> None:
    with dtrain_on_terminal("debug", "r", "--rank", "1", cwd=counting) as terminal:
        Debugger(terminal, 1).wait_prompt()
        refused = debug(1, "")
        assert (refused.returncode, refused.stdout) == (1, ""), refused
        assert "rank 1 is debugged already" in refused.stderr
        other = debug(0, "p 1 + 1\nq\n")
        assert (other.returncode, "2\n" in other.stdout) == (0, True), other
        terminal.type("q\n")
        assert terminal.wait() == 0
    missing = debug(9, "")
    assert (missing.returncode, "there is no rank 9" in missing.stderr) == (1, True), missing


def test_a_program_that_is_no_python_script_has_no_debugger(folder: Path) -> None:
    result = run_dtrain("run", "--detach", "--run-id", "r", "--no-python", "sleep", "600", outlived=True)
    assert result.returncode == 0, result
    refused = debug(0, "")
    assert refused.returncode == 1, refused
    assert "dtrain did not start as a Python script" in refused.stderr or "takes no debugger" in refused.stderr
    assert dtrain("stop", "r").returncode == 0


def test_a_script_that_uses_the_signal_itself_keeps_it(folder: Path) -> None:
    (folder / "own.py").write_text("import signal\nsignal.signal(52, signal.SIG_DFL)\n" + Path("script.py").read_text())
    detached("own.py", workers=1)
    refused = debug(0, "")
    assert refused.returncode == 1, refused
    assert "rank 0 takes no debugger: it has given signal 52 another meaning" in refused.stderr
    assert_goes_on(0)
    end()


def test_what_goes_wrong_at_the_prompt_is_not_the_script_s(counting: Path) -> None:
    typed = ["!import sys; sys.exit(3)", "p nothing", "interact", "run", "!raise KeyboardInterrupt", "p 'x' * 300000"]
    result = debug(0, "\n".join(typed) + "\n")
    assert result.returncode == 0, result
    assert "SystemExit: 3" in result.stdout
    assert "NameError" in result.stdout
    assert "x" * 300000 in result.stdout
    assert_goes_on(0)


COLLECTIVE = f"""{HEADER}
import pathlib, time
dist.init_process_group("gloo")
rank = dist.get_rank()
pathlib.Path("tick" + str(rank)).write_text("1")
if rank == 0:
    while not pathlib.Path("come").exists():
        time.sleep(0.05)
dist.all_reduce(torch.ones(4))
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""


@pytest.mark.usefixtures("warm")
def test_a_rank_in_a_collective_opens_when_it_comes_back(folder: Path) -> None:
    (folder / "script.py").write_text(COLLECTIVE)
    detached("--nproc-per-node", "2", "script.py")
    with dtrain_on_terminal("debug", "r", "--rank", "1", cwd=folder) as terminal:
        terminal.read_until("the debugger opens when it returns to Python")
        assert f"rank 1 is at {folder}/script.py:12 in <module>, inside all_reduce" in terminal.shown
        assert PROMPT.format(1) not in terminal.shown
        terminal.type("\x03")
        assert terminal.wait() == 0
    with dtrain_on_terminal("debug", "r", "--rank", "1", cwd=folder) as terminal:
        terminal.read_until("the debugger opens when it returns to Python")
        (folder / "come").touch()
        Debugger(terminal, 1).wait_prompt()
        terminal.type("q\n")
        assert terminal.wait() == 0
    end()


# All wait for rank 1 in backward, and give up after 3 s.
TRAINING = f"""{HEADER}
import os, pathlib, time
ddp.init()
rank = int(os.environ["RANK"])
model = ddp.DistributedDataParallel(torch.nn.Linear(2, 2), stall_timeout_s=3)
n = 0
while True:
    n += 1
    there = torch.zeros(1)
    if n % 50 == 0:  # else all wait in backward, as ddp does
        there += pathlib.Path("go").exists()
        torch.distributed.broadcast(there, 0)
    model(torch.ones(1, 2)).sum().backward()
    pathlib.Path("tick" + str(rank)).write_text(str(n))
    if there.item():
        break
    time.sleep(0.02)
"""
HELD_S = 12.0  # longer than each of the limits


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("where", [["--nproc-per-node", "2"], ["--simulate", "--nnodes", "2", "--nproc-per-node", "1"]])
def test_a_debugger_may_be_held_for_longer_than_every_timeout(where: list[str], folder: Path) -> None:
    (folder / "script.py").write_text(TRAINING)
    limits = ["--stall-timeout-s", "8", "--hang", "8s", "--heartbeat-timeout-s", "10"]
    detached(*limits, *where, "script.py")
    with dtrain_on_terminal("debug", "r", "--rank", "1", cwd=folder) as terminal:
        debugger = Debugger(terminal, 1)
        debugger.wait_prompt()
        seen = []
        for half in (1, 2):
            until = time.monotonic() + HELD_S / 2
            while time.monotonic() < until:
                debugger.say(f"p {half}")
                time.sleep(0.2)
            seen.append(tick(0))
        assert seen[0] == seen[1], "it waits for rank 1"
        terminal.type("q\n")
        assert terminal.wait() == 0
    for rank in (0, 1):
        assert_goes_on(rank)
    end()
    assert "hang" not in (folder / "runs/r/console.log").read_text()


@pytest.mark.usefixtures("warm")
@pytest.mark.control
def test_without_a_debugger_the_same_limits_end_the_run(folder: Path) -> None:
    (folder / "script.py").write_text(TRAINING)
    detached("--stall-timeout-s", "3", "--nproc-per-node", "2", "script.py")
    pid = json.loads(dtrain("stacks", "r", "--json").stdout)["ranks"][1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert dtrain("wait", "r").returncode != 0


def test_a_rank_of_an_ssh_host_is_debugged(ssh_hosts: SshHosts, folder: Path) -> None:
    where = ["--hosts", "node1,node2", "--ssh-config", str(ssh_hosts.ssh_config), "--nproc-per-node", "1"]
    with started_dtrain("run", "--run-id", "r", *where, "script.py") as run:
        wait_until(lambda: len([*folder.glob("tick*")]) == 2, "the ranks are there")
        with dtrain_on_terminal("debug", "r", "--rank", "1", cwd=folder) as terminal:
            debugger = Debugger(terminal, 1)
            assert "rank 1 on node2 of run r" in debugger.wait_prompt()
            assert "'1'" in debugger.say("p __import__('os').environ['RANK']")
            terminal.type("q\n")
            assert terminal.wait() == 0
        assert_goes_on(1)
        (folder / "go").touch()
        out, _ = run.communicate(timeout=60)
        assert run.returncode == 0
        assert b"Pdb" not in out


def test_a_signal_does_not_prolong_the_wait_for_an_answer() -> None:
    """As Ctrl-C after three seconds without a prompt; queue.SimpleQueue of CPython 3.11 waits for ever then."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    said = _Said(Question(ours), 0)
    said.start()
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    too_late = threading.Timer(30, theirs.close)  # which ends the wait by another error
    too_late.start()
    try:
        for number in range(400):
            signal.setitimer(signal.ITIMER_REAL, 0.002 + (number % 40 - 20) * 5e-6)
            with pytest.raises(queue.Empty):
                said.next(0.002)
    finally:
        too_late.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        theirs.close()
        ours.close()
