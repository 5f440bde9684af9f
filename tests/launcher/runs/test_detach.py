"""A run has a name and outlives the terminal: --detach, ps, logs, attach, stop, wait, history, rerun."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from testbed.another_user import ask_as_another_user
from testbed.processes import Result, run_dtrain, run_program, started_dtrain, wait_until
from testbed.terminal import dtrain_on_terminal
from testbed.typed import dtrain

from launcher.errors import SocketError
from launcher.machine.socket_folder import SocketFolder
from launcher.runs.control import ask
from launcher.runs.detach import logout_notice
from launcher.runs.registry import connect, entries, place, registered

# Says that it is up, then waits for a file, and says when it was there.
SCRIPT = """
import os, pathlib, sys, time
print("rank", os.environ["RANK"], "up", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
print("rank", os.environ["RANK"], "went", flush=True)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""
NOBODY = 65534


@pytest.fixture(autouse=True)
def folder(own_runs: Path) -> Path:
    (own_runs / "script.py").write_text(SCRIPT)
    return own_runs


def detached(*words: str) -> Result:
    return run_dtrain("run", "--detach", "--nproc-per-node", "2", *words, outlived=True)


def ps(*words: str) -> list[dict[str, Any]]:
    result = dtrain("ps", "--json", *words)
    assert result.returncode == 0, result
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def manifest(run_id: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("runs", run_id, "run.json").read_text())
    return content


def start(run_id: str, *words: str) -> None:
    result = detached("--run-id", run_id, *words, "script.py")
    assert (result.returncode, result.stdout) == (0, f"{run_id}\n"), result


def test_a_detached_run_goes_on_and_gives_its_exit_code(folder: Path) -> None:
    result = detached("script.py", "7")
    run_id = result.stdout.strip()
    reported = [line for line in result.stderr.splitlines() if "logind" not in line and "systemd-run" not in line]
    assert result.returncode == 0, result
    assert all(line.endswith("up") for line in reported), result
    (run,) = ps()
    assert (run["run_id"], run["state"], run["hosts"], run["workers"]) == (run_id, "running", 1, 2)
    assert run["folder"] == str(folder / "runs" / run_id)
    controller = psutil.Process(run["pid"])
    assert controller.terminal() is None
    assert os.getsid(controller.pid) == controller.pid
    wait_until(lambda: dtrain("logs", run_id).stdout.count(" up\n") == 2, "both workers have printed")
    (folder / "go").touch()
    waited = run_dtrain("wait", run_id[:10])
    assert (waited.returncode, waited.stdout) == (7, ""), waited
    assert "exited with code 7" in waited.stderr
    assert ps() == []
    (run,) = ps("--all")
    assert (run["state"], run["exit_code"], run["hosts"], run["workers"]) == ("failed", 7, 1, 2)
    assert dtrain("wait").returncode == 7
    lines = dtrain("logs", run_id).stdout.splitlines()
    host = socket.gethostname()
    assert {f"[{host}:{rank}] rank {rank} up" for rank in (0, 1)} < set(lines)
    assert 3 <= len(lines) <= 4, "the second may be stopped before it went"
    assert "exited with code 7" in (folder / "runs" / run_id / "console.log").read_text()
    assert [path.name for path in (folder / "state/dtrain").iterdir() if not path.name.startswith("run-")] == []


def test_a_detached_run_that_does_not_start_says_why(folder: Path) -> None:
    missing = detached("missing.py")
    assert (missing.returncode, missing.stdout) == (2, ""), missing
    assert "missing.py does not exist" in missing.stderr
    (folder / "no-interpreter").write_text("#!/no/such\n")
    (folder / "no-interpreter").chmod(0o755)
    for program in ("no-such-program", "./no-interpreter"):
        here = ["run", "--nproc-per-node", "1", "--no-python", program]
        foreground, detached_one = run_dtrain(*here), run_dtrain("run", "--detach", *here[1:])
        assert (detached_one.returncode, detached_one.stdout) == (foreground.returncode, ""), detached_one
        assert foreground.returncode != 0
        assert program in detached_one.stderr
    assert ps() == []


def test_a_foreground_run_is_listed_and_stopped(folder: Path) -> None:
    with started_dtrain("run", "--nproc-per-node", "2", "--run-id", "front", "script.py") as run:
        wait_until(lambda: any(each["state"] == "running" for each in ps()), "it is listed")
        wait_until(lambda: dtrain("logs", "front").stdout.count("up") == 2, "its output is there")
        stopped = run_dtrain("stop", "fro")
        assert (stopped.returncode, run.wait()) == (0, 143), stopped
        assert "run front has ended: stopped, exit code 143" in stopped.stderr
        assert b"stopped by SIGTERM" in run.stderr.read()


def test_stop_kill_does_not_wait_for_workers_that_ignore_it(folder: Path) -> None:
    (folder / "script.py").write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SCRIPT)
    start("stubborn", "--grace-s", "1000")
    wait_until(lambda: dtrain("logs", "stubborn").stdout.count("up") == 2, "they ignore it")
    assert dtrain("stop", "--kill", "stubborn").returncode == 0
    assert "2 workers stopped" in (folder / "runs/stubborn/console.log").read_text()


def test_a_run_of_which_the_controller_was_killed_is_lost(folder: Path) -> None:
    start("gone", "--heartbeat-timeout-s", "10")
    (run,) = ps()
    workers = psutil.Process(run["pid"]).children(recursive=True)
    os.kill(run["pid"], signal.SIGKILL)
    wait_until(lambda: not any(each.is_running() for each in workers), "the host has ended its workers")
    (lost,) = ps("--all")
    assert (lost["state"], lost["exit_code"], lost["workers"]) == ("lost", None, 2)
    assert ps() == []
    waited = dtrain("wait", "gone")
    assert waited.returncode == 1
    assert "run gone is lost" in waited.stderr
    assert "1 run lost, gone the newest" in dtrain("ps").stderr
    assert dtrain("stop", "gone").returncode == 0
    assert dtrain("attach", "gone").returncode == 1
    assert [path.name for path in (folder / "state/dtrain").iterdir() if not path.name.startswith("run-")] == []


def test_a_run_in_another_container_is_not_taken_for_lost(folder: Path) -> None:
    start("outside")
    there = {path.name for path in (folder / "state/dtrain").iterdir()}
    container = ["unshare", "--pid", "--fork", "--mount-proc"]
    if run_program(*container, "true").returncode != 0:
        pytest.skip("no container can be made here")
    inside = run_program(*container, sys.executable, "-m", "launcher", "ps", "--json")
    assert [each["state"] for each in json.loads(inside.stdout)] == [f"on {socket.gethostname()}"], inside
    assert {path.name for path in (folder / "state/dtrain").iterdir()} == there
    assert [each["state"] for each in ps()] == ["running"]


def test_the_list_forgets_no_run_that_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.runs.registry.KEPT", 1)
    place().parent.mkdir()
    runs = []
    for name in "abc":
        runs.append(registered(name, folder, "", detached=False))
        time.sleep(0.002)  # the list is ordered by milliseconds
    for run in runs[1:]:
        run.end("finished", 0)
    assert [entry.run_id for entry in entries()] == ["c", "a"]
    runs[0].end("finished", 0)
    assert [entry.run_id for entry in entries()] == ["c"]
    for run in runs:
        run.close()


def test_lost_runs_are_listed_where_the_home_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place().parent.mkdir()
    run = registered("gone", folder, "", detached=False)
    (entry,) = entries()
    file = place() / entry.name
    file.write_text(json.dumps({**json.loads(file.read_text()), "start": 1}))

    def remove(_folder: SocketFolder, _name: str) -> None:
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patched:
        patched.setattr(SocketFolder, "remove", remove)
        assert [each.is_lost for each in entries()] == [True]
    run.close()


@pytest.mark.parametrize("state", ["", "failed"])
def test_the_socket_of_a_killed_run_is_removed_whatever_it_has_recorded(folder: Path, state: str) -> None:
    place().parent.mkdir()
    run = registered("gone", folder, "", detached=False)
    (entry,) = entries()
    file, socket_file = place() / entry.name, place() / entry.socket
    file.write_text(json.dumps({**json.loads(file.read_text()), "state": state}))
    entries()
    assert socket_file.exists(), "its process lives"
    file.write_text(json.dumps({**json.loads(file.read_text()), "start": 1}))
    entries()
    assert not socket_file.exists()
    run.close()


def test_a_user_without_a_home_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def expanduser(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "expanduser", expanduser)
    with pytest.raises(SocketError, match="has no home; set HOME or XDG_STATE_HOME"):
        place()


def test_who_no_longer_waits_leaves_no_descriptor(folder: Path) -> None:
    start("long")
    (entry,) = entries()

    def descriptors() -> int:
        assert ask(entry, "status")
        return len(os.listdir(f"/proc/{entry.pid}/fd"))

    before = descriptors()
    for _ in range(8):
        with connect(entry, 60.0) as connection:
            assert connection is not None
            connection.send(b'{"ask": "wait"}')
    wait_until(lambda: descriptors() < before + 4, "they are closed")


def test_ctrl_c_after_the_report_changes_nothing(folder: Path) -> None:
    (folder / "bin").mkdir()
    (folder / "bin/git").write_text("#!/bin/sh\nexec sleep 60\n")  # it would say what the code is
    (folder / "bin/git").chmod(0o755)
    (folder / ".git").mkdir()
    (folder / "go").touch()
    env = {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    with started_dtrain("run", "--run-id", "over", "script.py", env=env) as run:
        wait_until(lambda: [entry.state for entry in entries()] == ["finished"], "its end is noted")
        assert manifest("over")["outcome"]["exit_code"] == 0
        run.send_signal(signal.SIGINT)
        assert run.wait() == 0
    assert [path.name for path in place().iterdir() if not path.name.startswith("run-")] == []


def test_two_runs_at_once_are_distinguished(folder: Path) -> None:
    start("exp-1")
    start("exp-2")
    assert [run["run_id"] for run in ps()] == ["exp-2", "exp-1"]
    assert "exp is ambiguous: exp-1, exp-2; write more of the id" in dtrain("stop", "exp").stderr
    dtrain("stop", "last")
    assert [run["run_id"] for run in ps()] == ["exp-1"]
    refused = run_dtrain("run", "--run-id", "exp-1", "script.py")
    assert refused.returncode == 2
    assert "run exp-1 is active and writes to runs/exp-1" in refused.stderr
    elsewhere = detached("--run-id", "exp-1", "--log-dir", "others", "script.py")
    assert elsewhere.returncode == 0, elsewhere
    unknown = dtrain("logs", "nothing")
    assert (unknown.returncode, unknown.stderr) == (1, "dtrain: there is no run nothing; see dtrain ps --all\n")
    (folder / "go").touch()


def test_logs_follow_to_the_end_and_choose_ranks(folder: Path) -> None:
    start("seen")
    with started_dtrain("logs", "seen", "-f", "--rank", "1") as logs:
        host = socket.gethostname()
        assert logs.stdout.readline() == f"[{host}:1] rank 1 up\n".encode()
        (folder / "go").touch()
        assert logs.stdout.read() == f"[{host}:1] rank 1 went\n".encode()
        assert logs.wait() == 0
    assert dtrain("logs", "seen", "--since", "1h").stdout.count("\n") == 4
    times = folder / "runs/seen/attempt_0/times.log"
    lines = [line.split() for line in times.read_text().splitlines()]
    shifted = [[str(int(second) - 7200 * (where[-1] == "0")), *where] for second, *where in lines]  # where they began
    times.write_text("".join(" ".join(line) + "\n" for line in shifted))
    noted_apart = len(lines) - 2  # those of which both lines are not of one second
    assert dtrain("logs", "seen", "--since", "1h").stdout.count("\n") == noted_apart
    with started_dtrain("logs", "seen") as logs:  # as `dtrain logs | head -1`
        logs.stdout.close()
        assert logs.wait() == 0


@pytest.mark.parametrize("way", ["detached", "foreground"])
def test_attach_and_leave_then_come_back_and_stop(folder: Path, way: str) -> None:
    words = ["--nproc-per-node", "2", "--run-id", "there", "script.py"]
    detach = ["--detach"] if way == "detached" else []
    with started_dtrain("run", *detach, *words, outlived=bool(detach)) as run:
        if way == "detached":
            assert run.wait() == 0
        wait_until(lambda: [each["state"] for each in ps()] == ["running"], "it runs")
        with dtrain_on_terminal("attach", cwd=folder) as terminal:
            terminal.read_until("continues without this terminal")
            terminal.type("\x03")
            terminal.read_until("stop the run, or leave it running? [stop/leave]")
            terminal.type("leave\n")
            assert terminal.wait() == 0
            assert "run there continues: dtrain attach there" in terminal.shown
        assert [each["state"] for each in ps()] == ["running"]
        with dtrain_on_terminal("attach", "there", cwd=folder) as terminal:
            terminal.read_until("continues without this terminal")
            terminal.type("\x03")
            terminal.read_until("[stop/leave]")
            terminal.type("s\n")
            assert terminal.wait() == 143
        assert ps() == []


def test_a_run_outlives_the_login_that_started_it(folder: Path) -> None:
    words = ["run", "--detach", "--nproc-per-node", "2", "--run-id", "stays", "script.py"]
    with dtrain_on_terminal(*words, cwd=folder, outlived=True) as terminal:
        terminal.read_until("stays\r\n")
        assert terminal.wait() == 0
        terminal.hang_up()
    (run,) = ps()
    assert run["state"] == "running"
    (folder / "go").touch()
    assert dtrain("wait", "stays").returncode == 0


# Answers what is asked of logind.
LOGINCTL = """#!/bin/sh
case "$*" in
    "show-user 1000 --property=Linger") echo "Linger=$LINGER" ;;
    "show-session --property=KillUserProcesses") echo "KillUserProcesses=$KILL" ;;
    *) exit 1 ;;
esac
"""
DESKTOP = "user@1000.service/app.slice/app-org.gnome.Terminal.slice/vte-spawn-8f1c.scope"


@pytest.mark.parametrize(
    ("group", "linger", "kill", "ends"),
    [
        (DESKTOP, "no", "no", True),
        (DESKTOP, "yes", "yes", False),
        ("user@1000.service/app.slice/run-r1a2b.scope", "no", "no", True),
        ("session-3.scope", "no", "no", False),
        ("session-3.scope", "no", "yes", True),
    ],
)
def test_who_leaves_a_run_is_told_if_a_logout_ends_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, group: str, linger: str, kill: str, ends: bool
) -> None:
    groups = f"0::/user.slice/user-1000.slice/{group}\n"
    (folder / "loginctl").write_text(LOGINCTL)
    (folder / "loginctl").chmod(0o755)
    for name, value in {"PATH": f"{folder}:{os.environ['PATH']}", "LINGER": linger, "KILL": kill}.items():
        monkeypatch.setenv(name, value)
    notice = " ".join(logout_notice(groups))
    assert ("loginctl enable-linger" in notice) == ends
    assert ("systemd-run" in notice) == (ends and "session" in group)
    monkeypatch.setenv("PATH", str(folder / "empty"))
    assert logout_notice(groups), "logind does not answer"
    assert logout_notice("0::/system.slice/ssh.service\n") == []


def test_ctrl_c_before_the_start_ends_a_detached_run(folder: Path) -> None:
    words = ["run", "--detach", "--hosts-script", "true", "--nnodes", "1:2", "--start-timeout-s", "90", "script.py"]
    with started_dtrain(*words) as run:
        wait_until(lambda: psutil.Process(run.pid).children(), "its controller is there")
        wait_until(lambda: signal.SIGTERM in _caught(run.pid), "it passes signals on")
        run.send_signal(signal.SIGINT)
        assert run.wait() == 130
    assert ps() == []


def _caught(pid: int) -> set[int]:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")]
    mask = int(line.split()[1], 16)
    return {signum for signum in range(1, 65) if mask >> (signum - 1) & 1}


def test_a_run_that_is_suspended_says_that_it_does_not_answer(folder: Path) -> None:
    start("held")
    (run,) = ps()
    os.kill(run["pid"], signal.SIGSTOP)
    try:
        (held,) = ps()
        assert held["state"] == "no answer"
        for command in ("stop", "stacks"):
            stopped = dtrain(command, "held")
            assert (stopped.returncode, "does not answer" in stopped.stderr) == (1, True), stopped
            assert stopped.wall_s < 30, "the limit of stacks is 70 s"
    finally:
        os.kill(run["pid"], signal.SIGCONT)
    assert dtrain("wait", "held").returncode == 143, "it stops once it is resumed"


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes somebody else")
def test_other_users_neither_see_nor_stop_a_run(folder: Path) -> None:
    start("mine")
    (path,) = (each for each in (folder / "state/dtrain").iterdir() if not each.name.startswith("run-"))
    assert (folder / "state/dtrain").stat().st_mode & 0o777 == 0o700
    assert ask_as_another_user(path, '{"ask": "stop"}').stdout == "b''\n"
    assert [each["state"] for each in ps()] == ["running"]
    (folder / "state/dtrain").chmod(0o777)
    result = run_dtrain("ps")
    assert (result.returncode, "is no folder of yours alone" in result.stderr) == (1, True), result
    (folder / "state/dtrain").chmod(0o700)


def test_a_home_that_cannot_be_written_harms_no_run(folder: Path) -> None:
    (folder / "go").touch()
    for state in ("script.py", "/proc"):  # a file, and a file system that takes none
        result = run_dtrain("run", "script.py", env={"XDG_STATE_HOME": str(Path(state).absolute())})
        assert result.returncode == 0, result
        assert "dtrain ps" not in result.stderr
    env = {"XDG_STATE_HOME": "/proc"}
    reported = run_dtrain("run", "--detach", "--run-id", "unseen", "script.py", env=env, outlived=True)
    assert (reported.returncode, reported.stdout) == (0, "unseen\n"), reported
    wait_until(lambda: manifest("unseen")["state"] == "finished", "it ends well")
    both = reported.stderr + (folder / "runs/unseen/console.log").read_text()
    assert both.count("dtrain ps does not show this run") == 1


def test_a_list_that_cannot_be_written_names_its_folder_and_what_to_do(folder: Path) -> None:
    (folder / "state").symlink_to("/sys")  # a file system that takes no folder of ours
    with pytest.raises(SocketError, match=r"^\S*/state/dtrain cannot be written: .*; set XDG_STATE_HOME to a folder"):
        registered("r", folder, "script.py", detached=True)


def test_an_end_that_cannot_be_recorded_is_said(folder: Path) -> None:
    with started_dtrain("run", "script.py") as process:
        wait_until(lambda: [each["state"] for each in ps()] == ["running"], "it is listed")
        (folder / "state/dtrain").rename(folder / "state/moved")
        (folder / "state/dtrain").write_text("")
        (folder / "go").touch()
        _, stderr = process.communicate(timeout=60)
    (folder / "state/dtrain").unlink()
    (folder / "state/moved").rename(folder / "state/dtrain")
    assert process.returncode == 0
    assert stderr.decode().count("as lost, since its end could not be recorded: ") == 1


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "?????"), ("utf-8:strict", "l\udcff/r")])
def test_runs_are_shown_in_any_encoding(folder: Path, encoding: str, shown: str) -> None:
    (folder / "go").touch()
    run_dtrain("run", "--run-id", "r", "--log-dir", os.fsdecode(b"l\xff"), "script.py")
    command = '"$0" -m launcher history && exec "$0" -m launcher report r'
    argv = ["sh", "-c", command, sys.executable]
    result = subprocess.run(argv, env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
    assert shown in os.fsdecode(result.stdout)


def test_an_id_that_cannot_be_shown_is_no_failure_of_the_run(folder: Path) -> None:
    (folder / "go").touch()
    command = 'exec "$0" -m launcher run --detach --run-id r script.py >/dev/full'
    result = run_program("sh", "-c", command, sys.executable, outlived=True)
    assert (result.returncode, "run r has started" in result.stderr) == (0, True), result
    assert "Traceback" not in result.stderr
    assert dtrain("wait", "r").returncode == 0


def git(*words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *words], check=True, stdout=subprocess.DEVNULL)


def test_rerun_says_where_uncommitted_changes_are_other_ones(folder: Path) -> None:
    (folder / "go").touch()
    (folder / ".gitignore").write_text("runs/\nstate/\ngo\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    script = folder / "script.py"
    script.write_text(script.read_text() + "# changed\n")
    assert run_dtrain("run", "--run-id", "base", "script.py", "0").returncode == 0
    same = run_dtrain("rerun", "base", "--run-id", "second")
    assert (same.returncode, "uncommitted" in same.stderr) == (0, False), same
    script.write_text(script.read_text() + "# again\n")
    assert "run base had uncommitted changes; compare them" in run_dtrain("rerun", "base", "--run-id", "third").stderr


def test_rerun_takes_folder_options_and_commit(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (folder / "go").touch()
    (folder / ".gitignore").write_text("runs/\nstate/\ngo\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    first = run_dtrain("run", "--run-id", "base", "script.py", "0", env={"DTRAIN_NPROC_PER_NODE": "2"})
    assert first.returncode == 0, first
    away = tmp_path_factory.mktemp("away")
    again = run_dtrain("rerun", "base", "--run-id", "second", cwd=away)
    assert again.returncode == 0, again
    command = manifest("second")["command"]
    assert command["folder"] == str(folder)
    assert command["words"] == ["--run-id", "base", "--run-id", "second", "--", "script.py", "0"]
    assert len(manifest("second")["attempts"][0]["workers"]) == 2
    assert run_dtrain("rerun", "second", "--run-id", "third").returncode == 0
    env = {"DTRAIN_NNODES": "1:2", "DTRAIN_EXPORT": "A=1 'B=x y'", "DTRAIN_HOSTS_SCRIPT": "echo localhost:1"}
    assert run_dtrain("run", "--run-id", "lists", "script.py", env=env).returncode == 0
    assert run_dtrain("rerun", "lists", "--run-id", "lists-again").returncode == 0
    (one, other) = (manifest(name)["options"] for name in ("lists", "lists-again"))
    assert [one[name] == other[name] for name in ("nnodes", "export", "hosts_script")] == [True] * 3
    secret = run_dtrain("run", "--run-id", "secret", "script.py", env={"DTRAIN_EXPORT": "A=1 MY_TOKEN='x y'"})
    assert secret.returncode == 0, secret
    assert "x y" not in (folder / "runs/secret/run.json").read_text()
    assert "set DTRAIN_EXPORT again" in run_dtrain("rerun", "secret").stderr
    git("commit", "-qm", "two", "--allow-empty")
    refused = run_dtrain("rerun", "base")
    assert refused.returncode == 2
    assert "or run it as it is: --any-commit" in refused.stderr
    assert run_dtrain("rerun", "--any-commit", "base", "--run-id", "fourth", cwd=away).returncode == 0
    past = json.loads(dtrain("history", "--json").stdout)
    assert [each["run_id"] for each in past] == [
        "fourth", "secret", "lists-again", "lists", "third", "second", "base",
    ]  # fmt: skip
    assert past[0]["commit"] != past[1]["commit"] == past[6]["commit"] == manifest("base")["git"]["commit"]
    assert "fourth" in dtrain("history").stdout


def test_leave_and_come_back_wherever_the_hosts_are(folder: Path, where: list[str]) -> None:
    result = run_dtrain(
        "run", "--detach", "--run-id", "away", "--workdir", str(folder), *where, "script.py", outlived=True
    )
    assert (result.returncode, result.stdout) == (0, "away\n"), result
    (run,) = ps()
    assert (run["state"], run["workers"]) == ("running", 2)
    wait_until(lambda: dtrain("logs", "away").stdout.count("up") == 2, "both are up")
    controller = psutil.Process(run["pid"])
    os.kill(controller.pid, signal.SIGKILL) if where[0] == "--hosts" else dtrain("stop", "away")
    wait_until(lambda: not controller.is_running(), "it has ended")
    (ended,) = ps("--all")
    assert ended["state"] == ("lost" if where[0] == "--hosts" else "stopped")


STEPS = """
import mmap, os, time, pathlib
with open(os.environ["DTRAIN_PROGRESS_FILE"], "r+b") as file:
    counts = mmap.mmap(file.fileno(), 16)
for step in range(1, 10_000):
    counts[:8] = step.to_bytes(8, "little")
    time.sleep(0.02)
    if pathlib.Path("go").exists():
        break
"""


def test_ps_shows_the_step_and_how_fast_it_grows(folder: Path) -> None:
    (folder / "script.py").write_text(STEPS)
    start("trains")
    wait_until(lambda: (ps()[0]["steps_per_s"] or 0) > 0, "two looks at the steps")
    (run,) = ps()
    assert run["step"] > 0
    assert run["steps_per_s"] <= 500, "50, and all that was under way where a look came late"
    row = dtrain("ps").stdout.splitlines()[2].split()
    assert row[:4] == ["trains", "running", "1", "2"]
    assert int(row[4]) >= run["step"]
    (folder / "go").touch()
    assert dtrain("wait", "trains").returncode == 0
