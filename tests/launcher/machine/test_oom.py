"""A worker that the kernel killed for want of memory is distinguished from one that someone else killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import REPOSITORY
from testbed.processes import run_program

from launcher.machine import oom
from launcher.machine.cgroup import folder_in
from launcher.machine.oom import OomWatch

LIMIT_BYTES = 48 << 20
# The second before Linux 5.19.
REACHED = ("48 MiB of 48 MiB of its memory limit were in use", "its memory limit is 48 MiB")
EAT = "while True: eaten.append(bytearray(1 << 20))"

# In the group: two workers that want too much, and one that someone else kills.
AGENT = f"""
import json, os, subprocess, sys
folder, sees_log = sys.argv[1], sys.argv[2] == "log"
with open(f"{{folder}}/cgroup.procs", "w") as file: file.write("0")
from launcher.machine import oom
if not sees_log: oom.INITIAL_PID_NAMESPACE = ""
watch = oom.OomWatch()
said = []
for _ in range(2):
    worker = subprocess.Popen([sys.executable, "-c", "eaten = []\\n{EAT}"])
    status = worker.wait(60)
    said.append([status, watch.killed(worker.pid)])
other = subprocess.Popen(["sleep", "60"])
other.kill()
said.append([other.wait(60), watch.killed(other.pid)])
print(json.dumps(said))
"""


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup with a small limit, of either version; skips where this user can make none."""
    own = oom._own_group()
    if own is None:
        pytest.skip("no memory cgroup can be seen here")
    folder = Path(own.mount, f"dtrain-test-{os.getpid()}")
    name = "memory.max" if own.counts_below else "memory.limit_in_bytes"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        if not (folder / name).exists():
            pytest.skip("a cgroup made here has no memory limit")
        (folder / name).write_text(str(LIMIT_BYTES))
        if (swap := folder / "memory.swap.max").exists():
            swap.write_text("0")
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            return folder.rmdir()
        except OSError:  # the last member is on its way out
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def in_group(folder: Path, mode: str) -> list[tuple[int, str]]:
    result = run_program(sys.executable, "-c", AGENT, folder, mode, cwd=REPOSITORY, timeout=60)
    assert result.returncode == 0, result.stderr
    return [(status, text) for status, text in json.loads(result.stdout)]


def test_worker_that_reached_the_memory_limit_is_recognised(limited: Path) -> None:
    *killed, other = in_group(limited, "counters")
    assert [status for status, _ in killed] == [-signal.SIGKILL] * 2
    assert {text for _, text in killed} <= {f"the out-of-memory killer: {why}" for why in REACHED}
    assert other == (-signal.SIGKILL, "")


def test_kernel_log_says_how_much_it_held(limited: Path) -> None:
    if not oom._KernelLog().is_complete:
        pytest.skip("this user may not read the kernel log, or its pids are others")
    *killed, other = in_group(limited, "log")
    for status, text in killed:
        assert status == -signal.SIGKILL
        assert text.startswith("the out-of-memory killer: it held ")
        assert text.endswith(REACHED)
    assert other == (-signal.SIGKILL, "")


def test_kill_in_a_group_below_is_found_without_the_log(limited: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that is not the agent's own: cgroup v1 counts it there only, and the host's counter is less sure."""
    if (limited / "memory.events").exists():
        pytest.skip("cgroup v2 counts in all groups above as well")
    monkeypatch.setattr(oom, "INITIAL_PID_NAMESPACE", "")
    watch = OomWatch()
    enter = f"with open('{limited}/cgroup.procs', 'w') as file: file.write('0')"
    with subprocess.Popen([sys.executable, "-c", f"{enter}\neaten = []\n{EAT}"]) as worker:
        assert worker.wait(60) == -signal.SIGKILL
    said = watch.killed(worker.pid)
    assert said.removeprefix("probably ").startswith("the out-of-memory killer: the host has ")


def test_a_worker_killed_by_a_user_is_not_put_down_to_the_kernel() -> None:
    watch = OomWatch()
    with subprocess.Popen(["sleep", "60"]) as process:
        process.kill()
    assert watch.killed(process.pid) == ""


# ---- counters ------------------------------------------------------------------------------------------------


@pytest.fixture
def events(tmp_path: Path) -> Path:
    path = tmp_path / "memory.events"
    path.write_text("low 0\noom 9\noom_kill 7\noom_group_kill 0\n")
    return path


def count(path: Path, kills: int) -> None:
    path.write_text(f"low 0\noom 9\noom_kill {kills}\n")


def test_each_kill_is_put_down_to_one_worker(events: Path) -> None:
    counter = oom._Counter(str(events))
    counter.look(100.0)
    assert not counter.use_up()  # the 7 were before our time
    count(events, 9)
    counter.look(101.0)
    assert [counter.use_up() for _ in range(3)] == [True, True, False]
    counter.look(102.0)
    assert not counter.use_up()


def test_old_kill_is_not_put_down_to_a_new_death(events: Path) -> None:
    counter = oom._Counter(str(events))
    count(events, 8)
    counter.look(100.0)
    counter.look(100.0 + oom.RECENT_S + 1)
    assert not counter.use_up()


def test_counter_that_is_missing_or_begins_again_counts_nothing(events: Path, tmp_path: Path) -> None:
    missing = oom._Counter(str(tmp_path / "none"))
    counter = oom._Counter(str(events))
    count(events, 2)
    for each in (missing, counter):
        each.look(1.0)
        assert not each.use_up()


# ---- the group -----------------------------------------------------------------------------------------------


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")
    return folder


@pytest.mark.parametrize(
    ("path", "root", "found"),
    [
        ("/", "", ""),
        ("/job/step", "", "/job"),  # a group without the controller: its members count above it
        ("/docker/abc", "/docker/abc", ""),  # without a namespace of its own a container sees the host's path
        ("/docker/abc/job", "/docker/abc", "/job"),
        ("/docker/other", "/docker/abc", None),
        ("/docker/abcdef", "/docker/abc", None),
        ("/../../elsewhere", "", None),
    ],
)
def test_group_is_found_in_whatever_part_is_mounted(tmp_path: Path, path: str, root: str, found: str | None) -> None:
    write(tmp_path, memory__events="oom_kill 0")
    write(tmp_path / "job", memory__events="oom_kill 0")
    (tmp_path / "job" / "step").mkdir()
    folder = folder_in(path, root, str(tmp_path))
    group = None if folder is None else oom._nearest_group(folder, str(tmp_path), True)
    assert (None if group is None else group.folder) == (None if found is None else f"{tmp_path}{found}")


def test_the_lowest_limit_of_all_groups_is_the_one_reached(tmp_path: Path) -> None:
    write(tmp_path, memory__max="max")
    write(tmp_path / "a", memory__max=8 << 30, memory__peak=7 << 30)
    write(tmp_path / "a/b", memory__max=64 << 30, memory__peak=6 << 30)
    group = oom._Group(str(tmp_path / "a/b"), str(tmp_path), counts_below=True)
    assert group.lowest_limit() == (8 << 30, 7 << 30)
    old = write(tmp_path / "old", memory__limit_in_bytes=9223372036854771712, memory__max_usage_in_bytes=1)
    assert oom._Group(str(old), str(old), counts_below=False).lowest_limit() == (None, None)


# ---- the kernel log ------------------------------------------------------------------------------------------

RECORDS = {
    "group": (
        "3,1234,567890,-;Memory cgroup out of memory: Killed process 812 (python) total-vm:78308kB, "
        "anon-rss:1048576kB, file-rss:1024kB, shmem-rss:1024kB, UID:0 pgtables:196kB oom_score_adj:0\n",
        "the out-of-memory killer: it held 1.0 GiB, ",
    ),
    "host": (
        "3,1234,567890,-;Out of memory: Killed process 812 (my (odd) name) total-vm:1kB, anon-rss:4096kB, "
        "file-rss:0kB, shmem-rss:0kB\n",
        "the out-of-memory killer: it held 4 MiB, the host has ",
    ),
    "old": (
        "3,1234,567890,-;Killed process 812 (python) total-vm:1kB, anon-rss:4096kB, file-rss:0kB, shmem-rss:0kB\n",
        "the out-of-memory killer: it held 4 MiB, the host has ",
    ),
    "another pid": ("3,1,5,-;Out of memory: Killed process 8120 (python) total-vm:1kB, anon-rss:4096kB\n", ""),
    "not the kernel": ("12,1,5,-;Out of memory: Killed process 812 (python) total-vm:1kB, anon-rss:4096kB\n", ""),
    "about something else": ("6,1,5,-;usb 1-1: new device\n SUBSYSTEM=usb\n DEVICE=c189:5\n", ""),
}


@pytest.mark.parametrize(("record", "said"), RECORDS.values(), ids=RECORDS.keys())
def test_record_of_the_kernel_log_is_understood(record: str, said: str) -> None:
    watch = OomWatch()
    kernel, watch_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a record a read, as /dev/kmsg
    with kernel, watch_end:
        watch_end.setblocking(False)
        watch._log._file, watch._log.is_complete = watch_end.fileno(), True
        kernel.send(b"6,1,1,-;something before\n")
        kernel.send(record.encode())
        text = watch.killed(812)
        assert text.startswith(said)
        assert bool(text) == bool(said)
        assert watch.killed(812) == ""
