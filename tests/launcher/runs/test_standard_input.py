"""What is typed or piped into dtrain reaches one rank, wherever that runs; the others read an empty input."""

import hashlib
import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from testbed.processes import run_dtrain, started_dtrain, wait_until
from testbed.terminal import Terminal, dtrain_on_terminal


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{text}")
    return "script.py"


def test_rank_0_reads_a_pipe_to_its_end_and_the_others_nothing(where: list[str], tmp_path: Path) -> None:
    path = script(tmp_path, "print(rank, repr(open('/dev/stdin').read(4)), end=' ')\nprint(len(sys.stdin.read()))")
    result = run_dtrain("run", *where, path, cwd=tmp_path, stdin="one\n" + "two\n" * 20_000)
    assert result.returncode == 0, result.stderr
    first, second = sorted(line.partition("] ")[2] for line in result.stdout.splitlines())
    # What Python has read ahead by /dev/stdin is not there for sys.stdin, as with any pipe.
    assert first.startswith("0 'one\\n' ")
    assert 0 < int(first.split()[-1]) < 80_000
    assert second == "1 '' 0"


def test_another_rank_can_be_chosen_or_none(tmp_path: Path) -> None:
    path = script(tmp_path, "print(rank, repr(sys.stdin.read()))")
    for option, expected in (("1", ["0 ''", "1 'word'"]), ("none", ["0 ''", "1 ''"])):
        options = ["--stdin", option, "--nproc-per-node", "2"]
        result = run_dtrain("run", *options, path, cwd=tmp_path, stdin="word")
        assert sorted(line.partition("] ")[2] for line in result.stdout.splitlines()) == expected


def test_a_rank_that_there_is_not_is_said(tmp_path: Path) -> None:
    options = ["--stdin", "9", "--nproc-per-node", "2"]
    result = run_dtrain("run", *options, script(tmp_path, ""), cwd=tmp_path, stdin="word")
    assert result.returncode == 0
    assert "--stdin 9: there were only ranks 0 to 1; none read it" in result.stderr


def test_a_script_from_standard_input_is_for_one_worker(tmp_path: Path) -> None:
    for path in ("/dev/stdin", "/proc/self/fd/0"):
        result = run_dtrain("run", path, cwd=tmp_path, stdin="print('ran')")
        assert (result.returncode, result.stdout.split()[1:]) == (0, ["ran"])
        result = run_dtrain("run", "--nproc-per-node", "2", path, cwd=tmp_path, stdin="print('ran')")
        assert result.returncode == 2
        assert "save the script to a file" in result.stderr
        assert "ran" not in result.stdout


def test_a_rank_that_does_not_read_loses_nothing(tmp_path: Path) -> None:
    """What waits is bounded on the whole way: here, in the stream, at the agent and in the worker's pipe."""
    path = script(
        tmp_path,
        "import hashlib\nprint('up')\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
        "data = sys.stdin.buffer.read()\nprint(len(data), hashlib.md5(data).hexdigest())",
    )
    data = os.urandom(4 << 20)
    with started_dtrain("run", "-q", path, cwd=tmp_path, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout.readline().endswith(b"up\n")
        descriptor = process.stdin.fileno()
        os.set_blocking(descriptor, False)
        sent, since = 0, time.monotonic()
        while time.monotonic() < since + 1.0:  # since it took anything
            try:
                sent += os.write(descriptor, data[sent : sent + (1 << 16)])
                since = time.monotonic()
            except BlockingIOError:
                time.sleep(0.02)
        assert 0 < sent <= 5 << 16
        os.set_blocking(descriptor, True)
        (tmp_path / "go").touch()
        process.stdin.write(data[sent:])
        process.stdin.close()
        assert process.stdout.readline().split()[1:] == [
            str(len(data)).encode(),
            hashlib.md5(data).hexdigest().encode(),
        ]
        assert process.wait(timeout=60) == 0


def test_a_rank_that_has_closed_its_input_is_no_error(tmp_path: Path) -> None:
    path = script(tmp_path, "os.close(0)\nopen('closed', 'w').close()\ntime.sleep(1)\nprint('done')")
    with started_dtrain("run", path, cwd=tmp_path, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        wait_until(lambda: (tmp_path / "closed").exists(), "its input is closed")
        process.stdin.write(b"nobody reads this\n")
        process.stdin.flush()
        assert process.wait(timeout=60) == 0


# What ddp.monitoring.progress.set_restart_policy does, without the seconds that torch takes to be imported.
STANDS_ALONE = """\
import struct
with open(os.environ["DTRAIN_PROGRESS_FILE"], "r+b") as file:
    file.seek(16)
    file.write(struct.pack("<Q", 1))
"""


@pytest.mark.parametrize("alone", [False, True])
def test_the_process_that_takes_its_place_reads_on(tmp_path: Path, alone: bool) -> None:
    path = script(
        tmp_path,
        f"{STANDS_ALONE if alone else ''}print('asks')\nline = sys.stdin.readline()\nprint('got', line, end='')\n"
        "if 'first' in line: sys.exit(7)",
    )
    with started_dtrain("run", "--max-restarts", "1", path, cwd=tmp_path, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        for word in (b"first", b"second"):
            assert process.stdout.readline().endswith(b"asks\n")
            process.stdin.write(word + b"\n")
            process.stdin.flush()
            assert process.stdout.readline().endswith(b"got " + word + b"\n")
        assert process.wait(timeout=60) == 0


def test_no_clock_ends_a_run_that_waits_for_someone(tmp_path: Path) -> None:
    path = script(tmp_path, "print('up')\nbreakpoint()\nprint('over')")
    options = ["--stall-timeout-s", "2", "--start-timeout-s", "5"]
    with started_dtrain("run", *options, path, cwd=tmp_path, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdout.readline()
        time.sleep(9)
        assert process.poll() is None
        process.stdin.write(b"c\n")
        process.stdin.close()
        assert process.wait(timeout=60) == 0


# ---- On a terminal ----

ASKS = """\
if rank == 0:
    x = 41
    breakpoint()
    print("after", x + 1)
else:
    number = 0
    while not os.path.exists("over"):
        print("other", number := number + 1)
        time.sleep(0.02)
"""


def test_a_breakpoint_has_the_terminal_alone(where: list[str], tmp_path: Path) -> None:
    with dtrain_on_terminal("run", "--run-id", "r", *where, script(tmp_path, ASKS), cwd=tmp_path) as terminal:
        terminal.read_until("(Pdb) ")
        kept = tmp_path / "runs/r/attempt_0/1/stdout.log"
        lines = len(kept.read_text().splitlines())
        wait_until(lambda: len(kept.read_text().splitlines()) > lines + 20, "the other rank goes on")
        await_prompt(terminal)
        terminal.type("p x * 1000\n")
        terminal.read_until("41000\r\n")  # which the other rank never counts to
        await_prompt(terminal)
        assert "(Pdb) p x * 1000\r\n" in terminal.shown  # what is typed is not torn
        (tmp_path / "over").touch()
        terminal.type("c\n")
        assert terminal.wait() == 0
    assert "after 42" in terminal.shown


def await_prompt(terminal: Terminal) -> None:
    """Read until a prompt has the terminal, and nothing comes behind it."""
    deadline = time.monotonic() + 60
    quiet_for(terminal, 0.5)
    while not terminal.shown.endswith("(Pdb) "):  # nothing came, but the other rank was only slow
        assert time.monotonic() < deadline, terminal.shown[-500:]
        quiet_for(terminal, 0.5)


def quiet_for(terminal: Terminal, duration_s: float) -> None:
    """Read until nothing has come for so long; raise TimeoutError with what came if it never ends."""
    before, since = None, time.monotonic()
    deadline = since + 60
    while time.monotonic() < since + duration_s:
        if before != terminal.shown:
            before, since = terminal.shown, time.monotonic()
        if since > deadline:
            raise TimeoutError(f"it goes on and on: {terminal.shown[:2000]} ... {terminal.shown[-500:]}")
        terminal._read(0.05)


def test_ctrl_c_at_a_prompt_ends_the_run(tmp_path: Path) -> None:
    path = script(tmp_path, "input('name? ')")
    with dtrain_on_terminal("run", path, cwd=tmp_path) as terminal:
        terminal.read_until("name? ")
        terminal.type("\x03")
        assert terminal.wait() == 130
    assert "stopped by SIGINT" in terminal.shown


def test_ctrl_c_at_a_debugger_says_how_to_end_the_run(tmp_path: Path) -> None:
    path = script(tmp_path, "breakpoint()\nprint('after')")
    with dtrain_on_terminal("run", "--grace-s", "600", path, cwd=tmp_path) as terminal:
        terminal.read_until("(Pdb) ")
        quiet_for(terminal, 0.5)  # the prompt has the terminal
        terminal.type("\x03")
        terminal.read_until("a second Ctrl-C kills")
        terminal.type("\x03")
        assert terminal.wait() == 130


def test_ctrl_d_ends_the_input(tmp_path: Path) -> None:
    with dtrain_on_terminal("run", script(tmp_path, "print('all:', sys.stdin.read())"), cwd=tmp_path) as terminal:
        terminal.type("line\n\x04")
        assert terminal.wait() == 0
    assert "all: line" in terminal.shown


def test_a_breakpoint_on_another_rank_says_what_to_do(tmp_path: Path) -> None:
    path = script(tmp_path, "if rank == 1: breakpoint()\nelse: time.sleep(600)")
    result = run_dtrain("run", "--run-id", "r", "--nproc-per-node", "2", path, cwd=tmp_path, stdin="")
    assert result.returncode == 1
    assert "BdbQuit" in result.stderr
    assert "no one can answer rank 1: its standard input is empty" in result.stderr
    assert "to let it read the terminal in the next run: dtrain run --stdin 1 ...\n" in result.stderr
    assert "dtrain debug" not in result.stderr, "the run has ended"


SHELL = """\
import os, signal, subprocess, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
run = subprocess.Popen([sys.executable, "-m", "launcher", "run", "script.py"], preexec_fn=os.setpgrp)
print("shell:", input(), flush=True)
os.tcsetpgrp(0, run.pid)
print("status:", run.wait(), flush=True)
"""


def test_a_background_run_leaves_the_terminal_to_the_shell(tmp_path: Path) -> None:
    """It is not stopped by SIGTTIN, takes nothing that is typed for others, and reads once it is in the foreground."""
    script(tmp_path, "print('up')\nprint('got', sys.stdin.readline())")
    (tmp_path / "shell.py").write_text(SHELL)
    with dtrain_on_terminal(cwd=tmp_path, program=("shell.py",)) as terminal:
        terminal.read_until("up")
        (run,) = psutil.Process(terminal.process.pid).children()
        time.sleep(0.5)
        assert run.status() != psutil.STATUS_STOPPED
        terminal.type("for the shell\n")
        terminal.read_until("shell: for the shell")
        terminal.type("for the rank\n")
        terminal.read_until("got for the rank")
        terminal.read_until("status: 0")
