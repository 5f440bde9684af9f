"""What the workers write arrives whole, in the right place, as fast as the reader takes it."""

import os
import pty
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from testbed.left import Program
from testbed.outcomes import STOOD, evidence
from testbed.processes import run_dtrain, run_program, started, started_dtrain, wait_until, watched
from testbed.terminal import dtrain_on_terminal

from launcher.controller.controller import Controller
from launcher.hosts.host import Host, HostKind
from launcher.job.events import SaveEvidence
from launcher.output.console import Console
from launcher.output.logfiles import LogFiles
from launcher.output.stacks import write_out
from launcher.output.writer import OutputThread
from launcher.placement.job_spec import CommandKind, JobSpec, WorkerCommand


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_streams_stay_apart_and_lines_carry_host_and_rank(tmp_path: Path) -> None:
    path = script(tmp_path, "import sys\nprint('to out')\nprint('to err', file=sys.stderr)")
    result = run_dtrain("run", "-q", "--simulate", "--nnodes", "2", "--nproc-per-node", "2", path, cwd=tmp_path)
    assert sorted(result.stdout.splitlines()) == [
        "[sim0:0] to out", "[sim0:1] to out", "[sim1:2] to out", "[sim1:3] to out",
    ]  # fmt: skip
    assert sorted(result.stderr.splitlines()) == [
        "[sim0:0] to err", "[sim0:1] to err", "[sim1:2] to err", "[sim1:3] to err",
    ]  # fmt: skip


def test_lines_are_live(tmp_path: Path) -> None:
    path = script(tmp_path, "import sys, time\nprint('first')\ntime.sleep(600)")
    with started_dtrain("run", path, cwd=tmp_path) as process:
        assert process.stdout.readline().endswith(b"first\n")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def test_lines_of_many_workers_are_never_mixed(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import os, sys\nr = os.environ['RANK']\n"
        "for i in range(2000):\n    sys.stdout.write(r * 40)\n    sys.stdout.write(r * 40 + '\\n')",
    )
    result = run_dtrain("run", "--nproc-per-node", "4", path, cwd=tmp_path)
    lines = result.stdout.splitlines()
    assert len(lines) == 8000
    assert all(re.fullmatch(r"\[.+:(\d)\] \1{80}", line) for line in lines)


def test_any_bytes_and_unfinished_lines_survive(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import sys\nsys.stdout.buffer.write(b'caf\\xe9 \\xff\\x00|\\nno newline at the end')\nsys.stdout.flush()",
    )
    with started_dtrain("run", "--run-id", "r", path, cwd=tmp_path) as process:
        stdout, _ = process.communicate(timeout=60)
    assert re.fullmatch(rb"\[.+:0\] caf\xe9 \xff\x00\|\n\[.+:0\] no newline at the end\n", stdout)
    kept = (tmp_path / "runs/r/attempt_0/0/stdout.log").read_bytes()
    assert kept == b"caf\xe9 \xff\x00|\nno newline at the end"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_nested_bars_never_move_the_cursor_to_lines_of_others(tmp_path: Path, size: int) -> None:
    """As tqdm draws nested bars, whatever parts of it arrive together."""
    drawn = b"".join(
        b"\repochs %d/2\n\rsteps 1/1\x1b[A\n\r         \r\x1b[A\r         \rdone %d\n\repochs %d/2" % (n, n, n + 1)
        for n in range(2)
    )
    drawn += b"\nTraceback:\n  line\nError\n"
    with (tmp_path / "shown").open("wb") as shown:
        console = Console(out=shown.fileno(), err=shown.fileno())
        console.add_worker(0, "a")
        for first in range(0, len(drawn), size):
            console.write(0, 2, drawn[first : first + size])
        console.finish()
    lines = (tmp_path / "shown").read_text().splitlines()
    expected = [f"[a:0] {text}" for text in ("done 0", "done 1", "epochs 2/2", "Traceback:", "  line", "Error")]
    # That the first bar has one below is known when the cursor comes back from there.
    assert (lines[:-6], lines[-6:]) in [([], expected), (["[a:0] epochs 0/2"], expected)]


def test_flood_to_a_stopped_reader_grows_no_process(tmp_path: Path) -> None:
    """A worker writes without end and no one reads: it waits, and every process of dtrain stays under 100 MB."""
    path = script(tmp_path, "import sys\nline = 'x' * 99 + '\\n'\nwhile True: sys.stdout.write(line * 1000)")
    with started_dtrain("run", "--log-dir", tmp_path / "logs", path, cwd=tmp_path) as process:
        everyone = psutil.Process(process.pid)

        def written() -> int:
            return sum(p.io_counters().write_chars for p in everyone.children(recursive=True))

        wait_until(lambda: written() > 4 << 20, "the worker writes")
        wait_until(lambda: _settled(written), "the worker waits for its reader", timeout=60)
        peaks = [p.memory_info().rss >> 20 for p in [everyone, *everyone.children(recursive=True)]]
        assert max(peaks) < 100, peaks
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130  # though its console is still stuck


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_wait_for_a_stopped_reader_after_the_run(tmp_path: Path, signum: signal.Signals) -> None:
    path = script(tmp_path, "print(('x' * 99 + '\\n') * 3000)")
    with started_dtrain("run", "--run-id", "r1", path, cwd=tmp_path) as process:
        everyone, folder = psutil.Process(process.pid), tmp_path / "runs" / "r1"
        wait_until(lambda: (folder / "attempt_0" / "0" / "stdout.log").exists(), "the worker writes")
        wait_until(lambda: not everyone.children(), "the run ends")
        process.send_signal(signum)
        assert process.wait(timeout=60) == 0
    assert "finished successfully" in (folder / "report.txt").read_text()


LATE = """
import signal
from launcher.controller import controller
from launcher.__main__ import main

close = controller.close_links

def close_links(links):
    signal.raise_signal(signal.SIGINT)
    close(links)

controller.close_links = close_links
main()
"""


def test_so_does_a_signal_after_the_last_event_of_the_run(tmp_path: Path) -> None:
    path = script(tmp_path, "print(('x' * 99 + '\\n') * 3000)")
    with started(sys.executable, "-c", LATE, "run", "--run-id", "r1", path, cwd=tmp_path) as process:
        assert process.wait(timeout=60) == 0
    assert "finished successfully" in (tmp_path / "runs" / "r1" / "report.txt").read_text()


def _settled(count: "object") -> bool:
    assert callable(count)
    before = count()
    time.sleep(0.3)
    return bool(count() == before)


def test_much_output_passes_without_growing_anything(tmp_path: Path) -> None:
    path = script(
        tmp_path, "import sys\nblock = ('x' * 99 + '\\n') * 10000\nfor _ in range(150): sys.stdout.write(block)"
    )
    argv = [sys.executable, "-m", "launcher", "run", "--log-dir", str(tmp_path / "logs"), str(path)]
    peak = 0
    with open(os.devnull, "wb") as sink, started(*argv, cwd=tmp_path) as process:
        everyone = psutil.Process(process.pid)
        received = 0
        while block := process.stdout.read(1 << 20):
            received += len(block)
            sink.write(block)
            for p in [everyone, *everyone.children(recursive=True)]:
                try:
                    peak = max(peak, p.memory_info().rss >> 20)
                except psutil.Error:
                    continue
        process.wait(timeout=60)
    assert received > 150_000_000
    assert 5 < peak < 100
    (tmp_path / "logs").rename(tmp_path / "seen")


def test_closed_stdout_does_not_end_the_run(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import time\nfor i in range(20):\n    print(i)\n    time.sleep(0.02)\nopen('finished', 'w').close()",
    )
    with started_dtrain("run", "--run-id", "r", path, cwd=tmp_path) as process:
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
        assert process.wait(timeout=60) == 0
    assert (tmp_path / "finished").exists()
    assert said.count("stdout is closed") == 1
    assert (tmp_path / "runs/r/attempt_0/0/stdout.log").read_text().splitlines()[-1] == "19"


def test_a_log_folder_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = script(tmp_path, "print('trained')")
    result = run_dtrain("run", "--nproc-per-node", "3", "--log-dir", "file", path, cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout.count("trained") == 3
    assert result.stderr.count("cannot be written") == 1
    assert "--log-dir" in result.stderr


def test_full_disk_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    """A limit on the size of files, of 512 bytes, stands in for the disk."""
    path = script(tmp_path, "for i in range(100): print('trained', i)")
    ours = [sys.executable, "-m", "launcher", "run", "--run-id", "r", str(path)]
    result = run_program("sh", "-c", 'ulimit -f 1; exec "$@"', "sh", *ours, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "trained 99" in result.stdout
    assert result.stderr.count("cannot be written (File too large)") == 1


def test_second_run_of_the_same_name_keeps_the_first_ones_files(tmp_path: Path) -> None:
    path = script(tmp_path, "import os\nprint(os.environ['WORD'])")
    for word in ("first", "second"):
        result = run_dtrain("run", "--run-id", "r", path, cwd=tmp_path, env={"WORD": word})
    assert "moved the files of an earlier run r to runs/r.1" in result.stderr
    assert (tmp_path / "runs/r.1/attempt_0/0/stdout.log").read_text() == "first\n"
    assert (tmp_path / "runs/r/attempt_0/0/stdout.log").read_text() == "second\n"


def terminal_run(folder: Path, *argv: str) -> bytes:
    """Run dtrain on a terminal of its own and return all that the terminal was sent."""
    with dtrain_on_terminal("run", *argv, cwd=folder) as terminal:
        terminal.wait()
    return terminal.shown.encode()


def test_terminal_shows_progress_colours_and_redrawn_bars(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import sys, time\nprint('plain')\n"
        "for i in range(0, 101, 10):\n    sys.stderr.write(f'\\r{i:3}%')\n    sys.stderr.flush()\n"
        "    time.sleep(0.15)\n"
        "sys.stderr.write('\\n')",
    )
    seen = terminal_run(tmp_path, "--simulate", "--nnodes", "2", "--nproc-per-node", "1", str(path))
    # Each by itself where the machine is slow.
    assert re.search(rb"\x1b\[1m\[all 2\]\x1b\[0m plain\r\n|\[sim1:1\]\x1b\[0m plain\r\n", seen)
    redrawn = re.findall(rb"\r\x1b\[K[^\n]*?(\d+)%", seen)
    assert redrawn
    assert re.search(rb"\[sim0:0\]\x1b\[0m 100%\r\n", seen)
    assert seen.endswith((b"\n", b"\r\x1b[K"))  # no status line stays behind


def test_terminal_shows_how_many_hosts_are_ready(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = tmp_path / "ssh_config"
        config.write_text(f"Host slow\n  HostName 127.0.0.1\n  Port {silent.getsockname()[1]}\n")
        path = script(tmp_path, "")
        options = ["--ssh-config", str(config), "--hosts", "slow,localhost", "--start-timeout-s", "12"]
        seen = terminal_run(tmp_path, *options, str(path))
    assert b"dtrain: 1 of 2 hosts ready; waiting for slow" in seen
    assert b"slow: was not reached within 12 s" in seen or b"does not answer" in seen


def test_quiet_says_nothing_of_its_own(tmp_path: Path) -> None:
    path = script(tmp_path, "print('x')")
    seen = terminal_run(tmp_path, "--quiet", str(path))
    assert b"dtrain" not in seen
    assert b"hosts ready" not in seen


def test_bars_are_cut_to_a_narrow_terminal(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import sys, time\n"
        "for i in range(8):\n    sys.stderr.write(f'\\r{i}' + '#' * 110)\n    sys.stderr.flush()\n"
        "    time.sleep(0.2)\n"
        "sys.stderr.write('\\r' + ' ' * 111 + '\\r')",
    )
    seen = terminal_run(tmp_path, "-q", str(path))
    drawn = [part for part in seen.split(b"\r") if b"#" in part]
    assert drawn
    # The terminal has no size of its own, which counts as 80 columns; colours take no room.
    assert all(len(re.sub(rb"\x1b\[[0-9;]*[mK]", b"", part)) == 79 for part in drawn)
    assert seen.endswith(b"\r\x1b[K")  # the bar has removed itself


def test_terminal_that_vanishes_does_not_stop_the_run(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import sys, time\nfor i in range(30):\n    sys.stderr.write(f'\\r{i}')\n    sys.stderr.flush()\n"
        "    time.sleep(0.03)\n"
        "for i in range(20000): print('x' * 99)\nopen('finished', 'w').close()",
    )
    main, secondary = pty.openpty()
    argv = ["nohup", sys.executable, "-m", "launcher", "run", "--run-id", "r", str(path)]
    streams: dict[str, Any] = {"stdin": secondary, "stdout": secondary, "stderr": secondary}
    process = watched(lambda env: Program(argv, env=env, cwd=tmp_path, **streams), argv)
    os.close(secondary)
    time.sleep(0.6)
    os.close(main)
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "finished").exists()
    assert (tmp_path / "runs/r/attempt_0/0/stdout.log").stat().st_size == 2_000_000


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-", "2>/dev/full", ">/dev/full"])
def test_closed_or_full_streams_change_neither_run_nor_exit_code(tmp_path: Path, closed: str) -> None:
    path = script(
        tmp_path, "import os, sys\nprint(1)\nprint(2, file=sys.stderr)\nopen(os.environ['RANK'], 'w')\nsys.exit(3)"
    )
    command = f'exec "$0" -m launcher run --grace-s 5 --nproc-per-node 2 {path} {closed}'
    assert run_program("sh", "-c", command, sys.executable, cwd=tmp_path).returncode == 3
    assert (tmp_path / "0").exists() or (tmp_path / "1").exists()


def test_report_shows_the_end_of_a_bar_and_no_escapes(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import sys\nprint('the reason', file=sys.stderr)\n"
        "for i in range(100): sys.stderr.write(f'\\rstep {i}/100')\n"
        "sys.stderr.write('\\n\\x1b[2Jgone\\n')\nsys.exit(9)",
    )
    result = run_dtrain("run", path, cwd=tmp_path)
    report = [line.partition("| ")[2] for line in result.stderr.splitlines() if line.startswith("dtrain:   |")]
    assert report == ["the reason", "step 99/100", "gone"]
    assert result.returncode == 9


# ---- several attempts ----


@dataclass
class Sink:
    """An output thread whose console is two files."""

    output: OutputThread
    folder: Path

    def seen(self, stream: str = "out") -> str:
        return (self.folder / stream).read_text()

    def kept(self, path: str) -> str:
        return (self.folder / "logs" / path).read_text()


@contextmanager
def output_thread(folder: Path) -> Iterator[Sink]:
    complaints: list[str] = []
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        logs = LogFiles(folder / "logs", complaints.append)
        output = OutputThread(Console(out=out.fileno(), err=err.fileno()), logs)
        output.start()
        try:
            yield Sink(output, folder)
        finally:
            output.close()
    assert complaints == []


def test_every_attempt_has_files_of_its_own(tmp_path: Path) -> None:
    with output_thread(tmp_path) as sink:
        for attempt, words in enumerate(("first", "second")):
            for rank in (0, 1):
                sink.output.add_worker(rank, "sim0", attempt)
            for rank in (0, 1):
                sink.output.write(rank, 1, f"{words} {rank}\n".encode())
                sink.output.error_file(rank, attempt, f"error {words}")
    assert sink.kept("attempt_0/1/stdout.log") == "first 1\n"
    assert sink.kept("attempt_1/1/stdout.log") == "second 1\n"
    assert sink.kept("attempt_0/0/error.json") == "error first"
    assert sink.kept("attempt_1/0/error.json") == "error second"


def test_a_rank_on_another_host_has_another_prefix(tmp_path: Path) -> None:
    with output_thread(tmp_path) as sink:
        sink.output.add_worker(0, "alpha", 0)
        sink.output.add_worker(1, "beta", 0)
        sink.output.write(1, 1, b"unfinished")
        sink.output.add_worker(0, "alpha", 1)
        sink.output.add_worker(1, "gamma", 1)
        sink.output.write(1, 1, b"anew\n")
    assert sink.seen() == "[beta:1] unfinished\n[gamma:1] anew\n"
    assert sink.kept("attempt_0/1/stdout.log") == "unfinished"


def test_same_last_line_in_two_attempts_is_shown_twice(tmp_path: Path) -> None:
    with output_thread(tmp_path) as sink:
        for attempt in (0, 1):
            sink.output.add_worker(0, "alpha", attempt)
            sink.output.write(0, 2, b"\rstep 7")
    assert sink.seen("err") == "[alpha:0] step 7\n" * 2


def test_tail_is_of_the_newest_attempt_only(tmp_path: Path) -> None:
    with output_thread(tmp_path) as sink:
        sink.output.add_worker(0, "alpha", 0)
        sink.output.write(0, 2, b"old\n")
        sink.output.write(0, 1, b"old\n")
        sink.output.add_worker(0, "alpha", 1)
        sink.output.write(0, 2, b"new\n")
    assert sink.output.tail(0, 2) == ["new"]
    assert sink.output.tail(0, 1) == []


def test_the_tail_is_of_the_process_that_replaced_a_dead_one(tmp_path: Path) -> None:
    with output_thread(tmp_path) as sink:
        sink.output.add_worker(0, "sim0", 0)
        sink.output.write(0, 2, b"KeyboardInterrupt\nlast words")
        sink.output.replace_worker(0)
        sink.output.write(0, 2, b"of its successor\n")
    assert sink.output.tail(0, 2) == ["of its successor"]
    assert sink.kept("attempt_0/0/stderr.log") == "KeyboardInterrupt\nlast wordsof its successor\n"


def test_a_thousand_attempts_keep_no_files_open(tmp_path: Path) -> None:
    with output_thread(tmp_path) as sink:
        for attempt in range(1000):
            for rank in (0, 1):
                sink.output.add_worker(rank, "sim0", attempt)
        wait_until(lambda: (tmp_path / "logs/attempt_999/1/stderr.log").exists(), "the last attempt has begun")
        ours = [each for each in psutil.Process().open_files() if str(tmp_path / "logs") in each.path]
        assert 0 < len(ours) <= 4


def test_attempt_with_fewer_ranks_closes_the_files_of_the_others(tmp_path: Path) -> None:
    with output_thread(tmp_path) as sink:
        for rank in range(4):
            sink.output.add_worker(rank, "sim0", 0)
        sink.output.add_worker(0, "sim0", 1)
        wait_until(lambda: (tmp_path / "logs/attempt_1/0/stderr.log").exists(), "the second attempt has begun")
        ours = [each.path for each in psutil.Process().open_files() if str(tmp_path / "logs") in each.path]
        assert all("attempt_1" in path for path in ours)


class Stack(str):
    """Notes in which threads it is read."""

    readers: ClassVar[set[str]] = set()

    def splitlines(self, keepends: bool = False) -> list[str]:
        self.readers.add(threading.current_thread().name)
        return super().splitlines(keepends)


def test_evidence_is_kept_and_shown_where_someone_asked(tmp_path: Path) -> None:
    one = evidence(0, "caf\xe9 \udcff")
    with output_thread(tmp_path) as sink:
        sink.output.keep_evidence(2, 1, [one], say=False)
        sink.output.keep_evidence(2, 2, [one], say=True)
        paths = [sink.output.evidence_path(2, number) for number in (1, 2)]
    assert paths[0] == tmp_path / "logs/attempt_2/evidence-1.txt"
    assert {path.read_text(encoding="utf-8") for path in paths} == {write_out([one]).replace("\udcff", "\\udcff")}
    assert "rank 0 is at /home/me/train.py:12 in café" in sink.seen("err")
    assert sink.seen("err").count(f"stacks of all ranks: {paths[1]}") == sink.seen("err").count("stacks of") == 1


def test_stacks_are_read_by_the_output_thread_only(tmp_path: Path) -> None:
    spec = JobSpec(WorkerCommand(CommandKind.SCRIPT, "t.py"), (Host("here", HostKind.LOCAL),), run_id="r", python="p")
    found = tuple(replace(one, stack=Stack(one.stack)) for one in STOOD)
    with output_thread(tmp_path) as sink:
        output = sink.output
        controller = Controller(spec, output, show_progress=output.show_status, notify_user=output.say, opened={})
        controller._carry_out([SaveEvidence(0, 1, found, asked=False), SaveEvidence(0, 2, found, asked=True)])
    assert controller._evidence_file == (0, output.evidence_path(0, 1))
    assert output.evidence_path(0, 1).read_text() == write_out(STOOD)
    assert Stack.readers == {"output"}
