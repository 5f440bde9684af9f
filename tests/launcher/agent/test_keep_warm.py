"""Processes that stay warm after a run: who finds them, what they hold, and that nothing else is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from testbed.another_user import ask_as_another_user
from testbed.processes import MARK, Result, run_dtrain, run_program, started_dtrain, wait_until
from testbed.typed import typed
from testbed.write import write

from launcher.agent.warm.folder import open_folder, prefix_of
from launcher.agent.warm.handover import ask
from launcher.agent.warm.kept import describe, extend, new_socket, stop
from launcher.cli.request import read_request
from launcher.errors import SocketError, UsageError

SCRIPT = """
import heavy, own
print("imported by", heavy.pid, own.VALUE, flush=True)
"""
WAITING = (
    SCRIPT
    + """
import os, time
open(f"up-{os.getpid()}", "w")
while not os.path.exists("go"):
    time.sleep(0.05)
"""
)
HEAVY = "import os; pid = os.getpid(); mode = os.environ.get('HEAVY_MODE')"
WARM = "1 host had the packages imported since an earlier run"
NOBODY = 65534
VARYING = {
    "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "DTRAIN_PROGRESS_FILE", "DTRAIN_RUN_KEY", "DTRAIN_AGENT",
    "DTRAIN_GENERATION_PIPE", "DTRAIN_GENERATION_FILE", "DTRAIN_STATE_FILE", "DTRAIN_COPY_FILE", "DTRAIN_COPY_NOTE",
    "DTRAIN_TIMELINE_FILE", "DTRAIN_LEDGER_FILE", "DTRAIN_DEBUGGER_FILE", "TORCH_FR_DUMP_TEMP_FILE", MARK,
}  # fmt: skip


def place(folder: Path) -> None:
    """Make a script and a package that it imports, and a folder for what stays warm."""
    (folder / "runtime").mkdir(mode=0o700, exist_ok=True)
    write(folder, "lib/site-packages/heavy.py", HEAVY)
    write(folder, "own.py", "VALUE = 1")
    write(folder, "script.py", SCRIPT)


@pytest.fixture
def runtime(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib" / "site-packages"))
    monkeypatch.chdir(tmp_path)
    return runtime


@pytest.fixture(scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("warm")
    place(folder)
    yield folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder / "runtime"))
        stop()
        wait_until(lambda: not [*(folder / "runtime").iterdir()], "nothing is left in the runtime folder")


@pytest.fixture
def server(_shared: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """What one run has left warm, for tests that leave it as it is: its pid. The working folder is that run's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(_shared / "runtime"))
    monkeypatch.setenv("PYTHONPATH", str(_shared / "lib" / "site-packages"))
    monkeypatch.chdir(_shared)
    write(_shared, "own.py", "VALUE = 1")
    write(_shared, "script.py", SCRIPT)
    for file in (_shared / "go", *_shared.glob("up-*")):
        file.unlink(missing_ok=True)
    found = describe()
    if len(found) != 1:  # for the first test, or a test has failed
        stop()
        run("--keep-warm", "10m", "script.py", env={MARK: None})  # it outlives the test
        found = describe()
    (each,) = found
    wait_until(lambda: describe()[0]["runs"] == 0, "no run uses it")
    return int(each["pid"])


def run(*argv: object, **options: Any) -> Result:
    result = run_dtrain("run", "-v", *map(str, argv), outlived="--keep-warm" in argv, **options)
    assert result.returncode == 0, result
    return result


def start(*argv: str) -> int:
    """Have the packages of the script imported in a process that stays warm, without a run; return its pid."""
    result = run_dtrain("warm", "--start", *argv, "script.py", outlived=True)
    assert result.returncode == 0, result
    return int(describe()[0]["pid"])


def importer(result: Result) -> int:
    """The process that had imported the package for a run's workers."""
    (pid,) = {int(found) for found in re.findall("imported by ([0-9]+)", result.stdout)}
    return pid


@contextlib.contextmanager
def connected() -> Iterator[socket.socket]:
    """A connection to the process that is warm."""
    with open_folder() as folder:
        assert folder is not None
        connection = folder.connect(folder.names()[0], 10.0)
        assert connection is not None
        with connection:
            yield connection


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_later_run_finds_what_stayed_warm(runtime: Path) -> None:
    first = run("--keep-warm", "5m", "script.py")
    assert re.search("1 host stays warm until [0-9: -]+: dtrain warm --stop\n", first.stderr)
    (found,) = describe()
    assert (found["pid"], found["packages"]) == (importer(first), ["heavy"])  # and nothing of the working folder
    assert 200 < found["left_s"] <= 300
    second = run("script.py")
    assert importer(second) == importer(first)
    assert WARM in second.stderr
    assert "stays warm" not in second.stderr
    assert describe()[0]["left_s"] <= found["left_s"]  # its time goes on
    third = run("--keep-warm", "20m", "script.py")
    assert importer(third) == importer(first)
    (found,) = describe()
    assert 900 < found["left_s"] <= 1200  # begun again


@pytest.mark.parametrize("how", ["time", "stop", "its socket is removed"])
def test_nothing_is_left_at_its_end(runtime: Path, how: str) -> None:
    server = start("--keep-warm", "2s" if how == "time" else "5m")
    if how == "stop":
        result = run_dtrain("warm", "--stop")
        assert (result.returncode, result.stderr) == (0, "dtrain: stopped 1 warm process\n")
    elif how != "time":
        next(runtime.glob("dtrain-warm/*")).unlink()
        os.kill(server, signal.SIGCHLD)  # it looks every few seconds, and when it wakes
    wait_until(lambda: gone(server), "the process has ended")
    wait_until(lambda: not [*runtime.iterdir()], "the folder is gone")
    assert run_dtrain("warm", "--stop").stderr == "dtrain: nothing was warm\n"


def test_nothing_stays_unless_it_was_asked_for(runtime: Path) -> None:
    assert gone(importer(run("script.py")))
    assert not [*runtime.iterdir()]


def test_what_was_killed_is_cleared_away_by_the_next_run(runtime: Path) -> None:
    server = start()
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: gone(server), "the process has ended")
    assert len([*runtime.glob("dtrain-warm/*")]) == 1
    result = run("script.py")
    assert importer(result) != server
    assert "could not be used" not in result.stderr
    assert not [*runtime.iterdir()]


def test_it_lists_and_starts(runtime: Path, tmp_path: Path) -> None:
    assert run_dtrain("warm").stderr == "dtrain: nothing is warm\n"
    started = run_dtrain("warm", "--start", "script.py", outlived=True)
    assert started.returncode == 0, started
    assert re.fullmatch(r"dtrain: 1 host warm until [0-9: -]+: dtrain warm --stop\n", started.stderr)
    (found,) = describe()
    assert 500 < found["left_s"] <= 600
    listed = run_dtrain("warm")
    assert re.match(" since +until +runs +memory +interpreter +packages +script\n", listed.stdout), listed
    assert " heavy " in listed.stdout
    ((each,),) = [host["warm"] for host in json.loads(run_dtrain("warm", "--json").stdout).values()]
    assert (each["packages"], each["runs"], each["pid"]) == (["heavy"], 0, found["pid"])
    assert (each["workdir"], each["script"]) == (str(tmp_path), "script.py")
    assert importer(run("script.py")) == found["pid"]
    refused = run_dtrain("warm", "--start", write(tmp_path, "empty.py", "import json"))
    assert (refused.returncode, "imports only the standard library" in refused.stderr) == (1, True)


def test_own_modules_and_the_script_are_read_again(server: int) -> None:
    write(Path(), "own.py", "VALUE = 22")
    write(Path(), "script.py", SCRIPT + "print('a new line')")
    result = run("script.py")
    assert f"imported by {server} 22" in result.stdout
    assert "a new line" in result.stdout
    write(Path(), "lib/site-packages/other.py", "")
    write(Path(), "own.py", "import other\nVALUE = 333")
    result = run("script.py")
    assert "the script imports other packages than it has" in result.stderr
    assert importer(result) != server
    assert " 333" in result.stdout


def test_another_script_uses_it_with_the_same_packages(server: int) -> None:
    write(Path(), "elsewhere/own.py", "VALUE = 'elsewhere'")
    result = run(write(Path(), "elsewhere/evaluate.py", SCRIPT))
    assert f"imported by {server} elsewhere" in result.stdout
    write(Path(), "lib/site-packages/other.py", "")
    waits = f"import other{WAITING}"
    with started_dtrain("run", "-v", str(write(Path(), "elsewhere/more.py", waits))) as process:
        wait_until(lambda: [*Path().glob("up-*")], "it runs")
        assert describe()[0]["runs"] == 0  # it was not even begun there
        Path("go").touch()
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0
    assert f"imported by {server} " not in out.decode()
    assert "the script imports other packages than it has" in err.decode()


def test_another_script_in_a_missing_folder_does_not_use_it(server: int) -> None:
    script = {"kind": "script", "target": "/nowhere/script.py", "cwd": "/nowhere"}
    text = "import json; from launcher.agent.warm.surroundings import find_surroundings as f; print(json.dumps(f()))"
    surroundings = json.loads(run_program(sys.executable, "-c", text).stdout)  # as an agent finds them
    with connected() as connection:
        answer = ask(connection, "check", surroundings=surroundings, script=script)
    assert answer["reason"] == "the script cannot be read: [Errno 2] No such file or directory: '/nowhere'"
    assert describe()[0]["pid"] == server


def test_scripts_with_other_packages_have_one_each(runtime: Path, tmp_path: Path) -> None:
    write(tmp_path, "lib/site-packages/other.py", "")
    other = write(tmp_path, "other_script.py", f"import other{SCRIPT}")
    first, second = (importer(run("--keep-warm", "5m", script)) for script in ("script.py", other))
    assert {each["pid"] for each in describe()} == {first, second}
    assert (importer(run("script.py")), importer(run(other))) == (first, second)
    third = importer(run("--keep-warm", "5m", "script.py", env={"OMP_NUM_THREADS": "7"}))
    assert {each["pid"] for each in describe()} == {second, third}  # in the place of that script's


CHANGES = {  # those of surroundings.py have tests of their own
    "hidden": ({}, "the script imports other packages than it has"),
    "read variable": ({"HEAVY_MODE": "2"}, "not the same as then: HEAVY_MODE"),
    "threads": ({"OMP_NUM_THREADS": "7"}, "not the same as then: OMP_NUM_THREADS"),
    "surroundings": ({"LD_LIBRARY_PATH": "/nowhere"}, "not the same as then: LD_LIBRARY_PATH"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_after_a_change_it_is_not_used_which_is_said(server: int, kind: str) -> None:
    variables, reason = CHANGES[kind]
    if kind == "hidden":
        write(Path(), "heavy/__init__.py", "pid = 1")
    try:
        result = run("script.py", env=variables)
    finally:
        shutil.rmtree("heavy", ignore_errors=True)
    assert reason in result.stderr, result
    assert WARM not in result.stderr
    if kind != "hidden":
        assert importer(result) != server
    assert describe()[0]["pid"] == server  # which stays for others


def test_what_is_out_of_date_for_all_ends(runtime: Path, tmp_path: Path) -> None:
    server = start()
    write(tmp_path, "lib/site-packages/heavy.py", f"{HEAVY}; later = True")
    result = run("script.py")
    assert re.search("changed since then: /.*/heavy.py", result.stderr), result
    assert importer(result) != server
    wait_until(lambda: gone(server), "it has ended")
    assert not [*runtime.iterdir()]


def test_it_holds_nothing_of_the_run(runtime: Path) -> None:
    first = run("--keep-warm", "5m", "-x", "MINE=of the run", "-x", "OTHER_API_KEY=secret", "script.py",
                env={"SOME_TOKEN": "secret", "HF_TOKEN": "secret", "PGPASSWORD": "secret", "MYSQL_PWD": "secret",
                     "GITHUB_PAT": "secret", "SENTRY_DSN": "secret", "https_proxy": "http://me:secret@proxy",
                     "OLDPWD": "/stays", "TOKENIZERS_PARALLELISM": "1"})  # fmt: skip
    server = importer(first)
    assert "1 worker was forked" in first.stderr
    environ = Path(f"/proc/{server}/environ").read_bytes()
    assert b"TOKENIZERS_PARALLELISM=1\0" in environ
    assert b"OLDPWD=/stays\0" in environ
    for word in (b"of the run", b"secret", b"DTRAIN_AGENT", b"DTRAIN_RUN_KEY", b"MASTER_"):
        assert word not in environ
    files = {os.readlink(f"/proc/{server}/fd/{name}").split(":")[0] for name in os.listdir(f"/proc/{server}/fd")}
    assert files <= {"/dev/null", "socket", "pipe"}
    pipes = [name for name in os.listdir(f"/proc/{server}/fd") if "pipe:" in os.readlink(f"/proc/{server}/fd/{name}")]
    assert len(pipes) == 2  # both ends of its own
    assert os.readlink(f"/proc/{server}/cwd") == "/"
    assert Path(f"/proc/{server}/cgroup").read_text() == Path("/proc/self/cgroup").read_text()
    assert os.getsid(server) == server
    second = run("-x", "MINE=of another", "script.py", env={"HF_TOKEN": "another", "TOKENIZERS_PARALLELISM": "1"})
    assert importer(second) == server


def test_a_forked_agent_is_as_one_that_was_started(server: int) -> None:
    text = (
        SCRIPT
        + """
import json, os
agent = os.getppid()
status = open(f"/proc/{agent}/status").read().splitlines()
same = ("Umask", "SigBlk", "SigIgn", "SigCgt", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "Cpus_allowed_list")
print(json.dumps({
    **{line.split(":")[0]: line for line in status if line.startswith(same)},
    "cwd": os.readlink(f"/proc/{agent}/cwd"), "limits": open(f"/proc/{agent}/limits").read(),
    "group": open(f"/proc/{agent}/cgroup").read(), "nice": os.getpriority(os.PRIO_PROCESS, agent),
    "oom": open(f"/proc/{agent}/oom_score_adj").read(), "title": open(f"/proc/{agent}/cmdline").read().split("\\0")[:3],
    "environ": sorted(os.environ.items()), "files": len(os.listdir(f"/proc/{agent}/fd")),
}))
"""
    )
    write(Path(), "script.py", text)
    looks = {}
    for name, options in (("warm", ()), ("cold", ("--start-method", "exec"))):
        result = run("--run-id", "one", *options, "script.py", env={"OF_THIS_RUN": "1"})
        looks[name] = json.loads(re.findall(r"\{.*\}", result.stdout)[0])
    assert looks["warm"]["environ"]
    for look in looks.values():
        look["environ"] = {k: v for k, v in look["environ"] if k not in VARYING}
        look.pop("files")
    assert looks["warm"] == looks["cold"]


def test_it_stays_warm_after_a_run_that_failed(runtime: Path, tmp_path: Path) -> None:
    write(tmp_path, "script.py", SCRIPT + "raise SystemExit(3)")
    result = run_dtrain("run", "--keep-warm", "5m", "script.py", outlived=True)
    assert result.returncode == 3
    assert "1 host stays warm until" in result.stderr
    server = importer(result)
    again = run_dtrain("run", "-v", "script.py")
    assert (again.returncode, importer(again)) == (3, server)
    assert WARM in again.stderr


def test_a_restart_within_a_warm_run_forks_again(server: int) -> None:
    write(Path(), "script.py", SCRIPT + "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.abort()")
    result = run_dtrain("run", "-v", "--max-restarts", "1", "script.py")
    assert result.returncode == 0, result
    assert result.stdout.count(f"imported by {server} 1") == 2


def test_two_runs_use_one_process_at_the_same_time(server: int) -> None:
    write(Path(), "script.py", WAITING)
    with started_dtrain("run", "-v", "script.py") as one, started_dtrain("run", "-v", "script.py") as two:
        wait_until(lambda: len([*Path().glob("up-*")]) == 2, "both run")
        assert describe()[0]["runs"] == 2
        Path("go").touch()
        for each in (one, two):
            out, err = each.communicate(timeout=100)
            assert f"imported by {server}" in out.decode()
            assert WARM in err.decode()
    wait_until(lambda: describe()[0]["runs"] == 0, "the process knows that they have ended")


@pytest.mark.parametrize("how", ["time", "stop"])
def test_a_run_that_uses_it_is_not_disturbed_by_its_end(runtime: Path, tmp_path: Path, how: str) -> None:
    server = start()
    write(tmp_path, "script.py", WAITING)
    with started_dtrain("run", "-v", "script.py") as process:
        wait_until(lambda: [*tmp_path.glob("up-*")], "it runs")
        if how == "stop":
            stopped = run_dtrain("warm", "--stop").stderr
            assert "1 of them are in use by a run" in stopped
        else:
            assert extend("", 1.0)
            wait_until(lambda: describe()[0]["left_s"] == 0.0, "the time is over")
        assert not gone(server)
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert f"imported by {server}" in out.decode()
    wait_until(lambda: gone(server), "it ends with the run")
    assert not [*runtime.iterdir()]


def test_a_run_goes_on_when_its_warm_process_is_killed(runtime: Path, tmp_path: Path) -> None:
    server = start()
    write(tmp_path, "script.py", WAITING)
    with started_dtrain("run", "--keep-warm", "5m", "script.py", outlived=True) as process:
        wait_until(lambda: [*tmp_path.glob("up-*")], "it runs")
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: gone(server), "it is dead")
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert f"imported by {server}" in out.decode()
    (found,) = describe()  # the fork server of that run stays in its place
    assert found["pid"] != server
    assert importer(run("script.py")) == server  # which imported it, before it was forked


@pytest.mark.parametrize("victim", ["dtrain", "agent", "guard", "waiting"])
def test_nothing_is_left_of_a_warm_run_that_is_killed(server: int, victim: str) -> None:
    write(Path(), "script.py", WAITING)
    with started_dtrain("run", "--grace-s", "1", "script.py") as process:
        wait_until(lambda: [*Path().glob("up-*")], "it runs")
        worker = psutil.Process(int(next(Path().glob("up-*")).name.partition("-")[2]))
        agent = worker.ppid()
        waiting = next(each.pid for each in psutil.Process(process.pid).children())
        pids = {"dtrain": process.pid, "agent": agent, "guard": psutil.Process(agent).ppid(), "waiting": waiting}
        os.kill(pids[victim], signal.SIGKILL)
        assert process.wait(100) != 0
        wait_until(lambda: not worker.is_running() or gone(worker.pid), "the worker is gone")
    wait_until(lambda: describe()[0]["runs"] == 0, "the run is over")
    assert describe()[0]["pid"] == server  # of another run's making
    wait_until(lambda: gone(pids["guard"]) and gone(agent), "nothing of it is left")
    Path("go").touch()
    assert importer(run("script.py")) == server


def test_nothing_stays_warm_when_dtrain_is_killed(runtime: Path) -> None:
    write(Path(), "script.py", WAITING)
    with started_dtrain("run", "--keep-warm", "5m", "--grace-s", "1", "script.py") as process:
        wait_until(lambda: [*Path().glob("up-*")], "it runs")
        agent = psutil.Process(int(next(Path().glob("up-*")).name.partition("-")[2])).ppid()
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(100) != 0
    wait_until(lambda: gone(agent), "its agent is gone")
    assert describe() == []


def test_simulated_hosts_keep_one_each(runtime: Path) -> None:
    options = ("--simulate", "--nnodes", "2", "--nproc-per-node", "1")
    first = run("--keep-warm", "5m", *options, "script.py")
    assert "2 hosts stay warm until" in first.stderr
    pids = {each["pid"] for each in describe()}
    second = run(*options, "script.py")
    assert "2 hosts had the packages imported" in second.stderr
    assert {int(found) for found in re.findall("imported by ([0-9]+)", second.stdout)} == pids
    assert "stopped 2 warm processes" in run_dtrain("warm", "--stop", *options).stderr


def test_what_is_warm_elsewhere_is_not_seen_from_here() -> None:
    result = run_dtrain("warm", "--hosts", "node1")
    assert (result.returncode, "dtrain warm is for this machine" in result.stderr) == (2, True), result


def test_a_slurm_job_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("JOB_ID", "7"), ("JOB_NODELIST", "localhost"), ("JOB_NUM_NODES", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(UsageError, match="which a SLURM job must not have"):
        read_request(typed("--keep-warm", "5m", "script.py"))


def test_why_nothing_stays_is_said(runtime: Path, tmp_path: Path) -> None:
    write(tmp_path, "lib/site-packages/heavy.py", "import os, threading, time; pid = os.getpid()\n"
          "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()")  # fmt: skip
    result = run("--keep-warm", "5m", "script.py")
    assert re.search("nothing stays warm: .*: the imports left 1 threads running", result.stderr), result
    assert "stays warm until" not in result.stderr


@pytest.mark.parametrize("fault", ["mode", "owner", "link"])
def test_a_folder_that_others_have_a_hand_in_is_refused(runtime: Path, tmp_path: Path, fault: str) -> None:
    if fault == "owner" and os.getuid() != 0:
        pytest.skip("only root gives folders away")
    folder = runtime / "dtrain-warm"
    if fault == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir(mode=0o700)
    if fault == "mode":
        folder.chmod(0o770)
        result = run("--keep-warm", "5m", "script.py")
        assert result.stderr.count("is no folder of yours alone") == 2, result  # neither used nor made use of
    if fault == "owner":
        os.chown(folder, NOBODY, -1)
    for use in (describe, lambda: new_socket("0").__enter__()):
        with pytest.raises(SocketError, match=r"is no folder of yours alone .*; remove it"):
            use()
    folder.unlink() if fault == "link" else folder.rmdir()


def test_a_runtime_folder_of_someone_else_is_not_used(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.agent.warm.folder.FALLBACK", str(tmp_path / "fallback-{}"))
    runtime.chmod(0o755)
    with open_folder(make=True) as folder:
        assert folder is not None
        assert folder.path == str(tmp_path / f"fallback-{os.geteuid()}")
    os.rmdir(folder.path)
    runtime.chmod(0o700)


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes somebody else")
def test_another_user_is_given_no_answer(server: int) -> None:
    path = next(Path("runtime").glob("dtrain-warm/*"))
    result = ask_as_another_user(path, '{"ask": "describe"}')
    assert result.stdout == "b''\n", result
    path.chmod(0o700)
    assert describe()[0]["pid"] == server


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes somebody else")
def test_a_socket_of_another_user_is_not_used(runtime: Path) -> None:
    with open_folder(make=True) as folder, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        assert folder is not None
        listening.bind(f"{folder.path}/somebody")
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
        try:
            listening.listen()  # whose it is then counts
        finally:
            os.seteuid(0)
            os.setegid(0)
        with pytest.raises(SocketError, match=f"is user {NOBODY}'s"):
            folder.connect("somebody", 5.0)
        folder.remove("somebody")


def test_one_that_does_not_answer_is_not_waited_for(server: int) -> None:
    os.kill(server, signal.SIGSTOP)
    try:
        result = run("script.py")
        assert "the process kept warm does not answer" in result.stderr
        assert importer(result) != server
    finally:
        os.kill(server, signal.SIGCONT)
    wait_until(lambda: describe(), "it answers again")
    assert describe()[0]["runs"] == 0  # what it was asked meanwhile is of no use to anybody


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "hangs"])
def test_one_that_ends_before_it_has_a_run_does_no_harm(runtime: Path, ends: bool) -> None:
    asked: list[str] = []

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            while data := connection.recv(1 << 16):
                asked.append(json.loads(data)["ask"])
                if asked[-1] == "check":
                    connection.send(b'{"reason": ""}')
                elif ends:
                    return

    with new_socket(prefix_of("0")) as (path, listening):
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        result = run("script.py")
        thread.join(60)
        os.unlink(path)
        os.rmdir(os.path.dirname(path))
    assert asked == ["check", "run"]
    assert "warm processes could not be used" in result.stderr
    assert importer(result)  # one worker, of one agent


def test_sockets_of_earlier_boots_are_removed_others_stay(runtime: Path) -> None:
    with open_folder(make=True) as folder:
        assert folder is not None
        host, boot, rest = prefix_of("0-0").split("-", 2)
        other = f"{int(host, 16) ^ 1:08x}-{boot}-{rest}1"
        folder.bind(other).close()
        assert describe() == []
        assert os.listdir(folder.path) == [other]
        of_an_earlier_boot = f"{host}-{int(boot, 16) ^ 1:08x}-{rest}1"
        for own in (f"{prefix_of('0-0')}1", of_an_earlier_boot, f".{of_an_earlier_boot}"):
            folder.bind(own).close()
            assert describe() == []
            assert os.listdir(folder.path) == [other]
        folder.remove(other)


def test_an_unknown_order_ends_only_its_connection(server: int) -> None:
    for order in (b"no JSON", b"[1]", b'{"ask": "run"}', b'{"ask": "what"}', b"{}"):
        with connected() as connection:
            connection.send(order)
            assert connection.recv(100) == b"", order
    with connected() as connection:
        assert ask(connection, "describe")["pid"] == server
