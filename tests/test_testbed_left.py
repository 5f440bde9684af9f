"""What a program leaves when it has ended is found at that moment, and named; what others have is not taken for it."""

import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from testbed import left
from testbed.left import Watch, nothing_left, own_group
from testbed.processes import MARK, kill, marked, run_program, started, wait_until

from launcher.agent.cleanup.run_tag import RunTag

LISTENS = """
import os, socket, sys, time
read, write = os.pipe()
if os.fork():
    print(os.read(read, 100).decode())
    sys.exit()
listening = socket.create_server(("127.0.0.1", 0))
at = socket.socket(socket.AF_UNIX)
at.bind(sys.argv[1])
at.listen()
nowhere = os.open(os.devnull, os.O_RDWR)
for stream in range(3):
    os.dup2(nowhere, stream)
os.write(write, str(listening.getsockname()[1]).encode())
time.sleep(600)
"""
TAG = "0123456789abcdef"


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Watch]:
    """A test in this test: what its programs leave is no failure of this one, and ends with it."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temp"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("temp", "shm", "dtrain"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(left, "SHARED_MEMORY", str(tmp_path / "shm"))  # where the other tests here cannot see it
    watch = Watch(mark, [])
    outer, Watch.current = Watch.current, watch
    yield watch
    Watch.current = outer
    shutil.rmtree(tmp_path / "shm")
    kill(marked({mark}))


def shell(line: str) -> None:
    assert run_program("sh", "-c", line, timeout=60).returncode == 0


def sleeping(watch: Watch) -> list[psutil.Process]:
    """Wait until the shell's process has become it; return those with the mark."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = [each for each in marked({watch.mark}) if each.name() == "sleep"]
        return bool(found)

    wait_until(is_there, "it sleeps")
    return found


def test_nothing_is_found_where_nothing_is_left(watch: Watch) -> None:
    shell("sleep 0.1 & mkdir $TMPDIR/it; rmdir $TMPDIR/it; wait")
    assert watch.found == []


def test_a_process_in_a_session_of_its_own_is_named(watch: Watch) -> None:
    shell("setsid sleep 600 >/dev/null 2>&1 &")
    (found,) = watch.found
    (process,) = sleeping(watch)
    assert "left when `sh -c setsid sleep 600" in found
    assert f"pid {process.pid} (state " in found


def test_a_process_without_our_variables_is_known_by_its_tag(watch: Watch) -> None:
    tag = RunTag(TAG.ljust(32, "1"), None)
    code = f"""
import os, subprocess
from launcher.agent.cleanup.run_tag import RunTag, make_folder, remove_folder
tag = RunTag({tag.value!r}, None)
make_folder(tag.value, "")
tag.put_on()
print(subprocess.Popen(["sleep", "600"], env={{}}, start_new_session=True, stdout=-3, stderr=-3).pid)
remove_folder(tag.value)
"""
    process = psutil.Process(int(run_program(sys.executable, "-c", code).stdout))
    assert [f"pid {process.pid} " in each and "sleep 600" in each for each in watch.found] == [True]
    kill([process])


def test_where_a_process_that_is_left_listens_is_said(watch: Watch, tmp_path: Path) -> None:
    result = run_program(sys.executable, "-c", LISTENS, tmp_path / "dtrain/socket")
    (found,) = watch.found
    assert f"listens on port {result.stdout.strip()}, listens on {tmp_path}/dtrain/socket\n" in found
    assert found.endswith(f"\n  {tmp_path}/dtrain/socket"), "and the file of the socket itself"


@pytest.mark.parametrize("what", ["temp/folder", "shm/file"])
def test_a_temporary_folder_and_shared_memory_are_named(watch: Watch, tmp_path: Path, what: str) -> None:
    (tmp_path / "temp/older").touch()
    shell(f"mkdir {tmp_path / what}")
    (found,) = watch.found
    assert found.splitlines()[1:] == [f"  {tmp_path / what}"]


def test_shared_memory_of_another_process_is_not_left(watch: Watch, tmp_path: Path) -> None:
    with (tmp_path / "shm/theirs").open("w"):
        os.rename(tmp_path / "shm/theirs", tmp_path / "theirs")
        shell(f"mv {tmp_path / 'theirs'} {tmp_path / 'shm/theirs'}")
        assert watch.found == []
    shell("true")
    assert watch.found == [], "it was there before"


@pytest.mark.skipif(own_group() is None, reason="no control group can be made here")
def test_a_control_group_is_named(watch: Watch) -> None:
    group = f"{own_group()}/dtrain-{TAG}"
    try:
        shell(f"mkdir $TMPDIR/dtrain-{TAG} {group}; rmdir $TMPDIR/dtrain-{TAG}")
        (found,) = watch.found
        assert found.splitlines()[1:] == [f"  {group}"]
    finally:
        os.rmdir(group)


def test_what_is_left_on_purpose_is_not_looked_for_at_once(watch: Watch) -> None:
    assert run_program("sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &", outlived=True).returncode == 0
    assert watch.found == []
    watch.is_sure = True
    with started("sh", "-c", "setsid sleep 600 & echo; wait") as process:
        assert process.stdout.readline()
        process.kill()
        process.wait()
    assert (watch.found, watch.is_sure) == ([], False)


def test_what_another_program_of_the_test_has_is_not_left(watch: Watch, tmp_path: Path) -> None:
    with started("sh", "-c", "mkdir $TMPDIR/its; echo; read end; rmdir $TMPDIR/its", stdin=-1) as other:
        shell("setsid sleep 600 >/dev/null 2>&1 & true")
        assert other.stdout.readline()
        (process,) = sleeping(watch)
        assert [f"pid {process.pid} " in each and "its" not in each for each in watch.found] == [True]
        other.communicate(b"\n")
    assert len(watch.found) == 1


def test_what_a_call_in_this_process_leaves_is_named(watch: Watch) -> None:
    with nothing_left("it()"):
        process = psutil.Popen(["sleep", "600"])
        wait_until(lambda: marked({watch.mark}), "it has its variables")
    assert [f"pid {process.pid} " in each and "left when `it()`" in each for each in watch.found] == [True]
    process.kill()
    process.wait()


def test_a_test_whose_program_leaves_something_fails_by_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from testbed.processes import run_program\n"
        "def test_it():\n"
        "    run_program('sh', '-c', 'setsid sleep 600 >/dev/null 2>&1 & mkdir $TMPDIR/left')\n"
    )
    tests = Path(__file__).parent
    options = ["-p", "conftest", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(tmp_path)]
    argv = [sys.executable, "-m", "pytest", *options, "--basetemp", str(tmp_path / "base"), str(tmp_path)]
    result = run_program(*argv, cwd=tmp_path, env={"PYTHONPATH": str(tests)})
    assert result.returncode == 1
    assert "1 passed, 1 error" in result.stdout
    assert "left when `sh -c setsid sleep 600" in result.stdout
    assert ": sleep 600\n" in result.stdout
    assert "/temp/left\n" in result.stdout
