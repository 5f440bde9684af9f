"""The run's folder: its manifest, what it never holds, and how many runs stay."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from testbed.job_drive import Drive
from testbed.processes import run_dtrain, run_program, started_dtrain, wait_until
from testbed.typed import output_of

from launcher.cli.runs.follow import _Shown
from launcher.errors import UsageError
from launcher.job.attempt import AttemptState
from launcher.output.logfiles import LogFiles
from launcher.runs.housekeeping import Limits, hold, parse_size, remove_oldest
from launcher.runs.log_reader import LogReader
from launcher.runs.overview import Overview
from launcher.runs.record import RunRecord
from launcher.runs.registry import Entry
from launcher.runs.secrets import without_secrets
from launcher.timeline.records import Timeline

WAITS = "import os, pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)\n"


def manifest(run_id: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("runs", run_id, "run.json").read_text())
    return content


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_manifest_says_how_a_run_started_and_ended(folder: Path) -> None:
    (folder / "script.py").write_text(WAITS + "raise SystemExit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n")
    (folder / "dtrain.toml").write_text("max-restarts = 1\n")
    words = ["--simulate", "--nnodes", "2", "--run-id", "r", "-x", "MY_TOKEN=hidden", "script.py", "--api-key", "hush"]
    with started_dtrain("run", *words, env={"DTRAIN_GRACE_S": "2"}) as run:
        wait_until(lambda: Path("runs/r/run.json").exists(), "it is written at the start")
        begun = manifest("r")
        assert (begun["outcome"], begun["ended"]) == (None, None)
        Path("go").touch()
        assert run.wait() == 0
    ended = manifest("r")
    assert ended["state"] == ended["outcome"]["ended"] == "finished"
    assert ended["began"] == begun["began"] < ended["ended"]
    assert ended["command"]["words"][-3:] == ["script.py", "--api-key", "***"]
    assert ended["command"]["script"] == 3
    options = ended["options"]
    assert options["nnodes"] == {"value": [2, 2], "from": "command line", "text": None}
    assert options["grace_s"] == {"value": 2.0, "from": "DTRAIN_GRACE_S", "text": "2"}
    assert options["max_restarts"] == {"value": 1, "from": str(folder / "dtrain.toml"), "text": None}
    assert options["export"]["value"] == ["MY_TOKEN=***"]
    assert ended["hosts"] == ["sim0", "sim1"]
    assert [attempt["number"] for attempt in ended["attempts"]] == [0, 1]
    assert "exited with code 1" in ended["attempts"][0]["cause"]
    assert ended["attempts"][1]["cause"] is None
    assert [worker[:3] for worker in ended["attempts"][1]["workers"]] == [[0, "sim0", 0], [1, "sim1", 0]]
    assert "torch" in ended["versions"]
    assert ended["git"] is None
    assert Path("runs/r/run.json").stat().st_mode & 0o077 == 0
    assert not any(word in Path("runs/r/run.json").read_text() for word in ("hidden", "hush"))


def test_the_manifest_keeps_what_is_not_committed(folder: Path) -> None:
    (folder / "script.py").write_text("print(1)\n")
    (folder / ".gitignore").write_text("runs/\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"]):
        subprocess.run(["git", *words], check=True)
    assert run_dtrain("run", "--run-id", "clean", "script.py").returncode == 0
    assert (manifest("clean")["git"]["clean"], manifest("clean")["git"]["diff_file"]) == (True, None)
    (folder / "script.py").write_text("print(2)\n")
    (folder / "new.py").touch()
    assert run_dtrain("run", "--run-id", "dirty", "script.py").returncode == 0
    git = manifest("dirty")["git"]
    assert (git["clean"], git["untracked"], len(git["commit"])) == (False, ["new.py"], 40)
    diff = folder / "runs/dirty" / git["diff_file"]
    assert "+print(2)" in diff.read_text()
    assert diff.stat().st_mode & 0o077 == 0
    (folder / "script.py").write_text("#" * (17 << 20))
    assert run_dtrain("run", "--run-id", "large", "script.py").returncode == 0
    git = manifest("large")["git"]
    assert (git["diff_file"], git["diff_too_large"], git["clean"]) == (None, True, False)


@pytest.mark.parametrize("fault", ["full", "unwritable"])
def test_a_manifest_that_cannot_be_written_is_said_once(folder: Path, fault: str) -> None:
    (folder / "script.py").write_text("print('ran')\n")
    log_dir = folder / "logs"
    if fault == "unwritable":
        log_dir.write_text("a file")
        where = str(log_dir)
    else:
        if os.getuid() != 0:
            pytest.skip("only root makes a disk")
        log_dir.mkdir()
        where = str(log_dir)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k,nr_inodes=2", "none", where]
    script = f'{" ".join(mount)} || exit 77; exec "$@"' if fault == "full" else 'exec "$@"'
    unshare = ["unshare", "--mount"] if fault == "full" else []
    command = [sys.executable, "-m", "launcher", "run", "--log-dir", where, "script.py"]
    result = run_program(*unshare, "sh", "-c", script, "sh", *command)
    if result.returncode in (1, 77) and fault == "full" and "ran" not in result.stdout:
        pytest.skip(f"no disk can be made here: {result.stderr}")
    assert result.returncode == 0, result
    assert "ran" in result.stdout
    assert result.stderr.count("cannot be written") == 1, result
    assert "the run continues without them" in result.stderr


def test_a_lock_keeps_a_second_run_of_one_name_out(folder: Path) -> None:
    with hold(folder, "r"):
        with pytest.raises(UsageError, match="run r is active"), hold(folder, "r"):
            pass
        with hold(folder, "r2"):
            pass
    assert list(folder.iterdir()) == []
    with hold(folder, "r"):
        pass


def test_a_second_node_0_of_one_run_is_refused(folder: Path) -> None:
    (folder / "script.py").write_text("")
    words = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--run-id", "r", "script.py"]
    with hold(folder / "runs", "r"):
        refused = run_dtrain("run", *words, env={"DTRAIN_TOKEN": "0" * 64})
    assert refused.returncode == 2
    assert "run r is active and writes to runs/r" in refused.stderr


def ended_run(folder: Path, name: str, age: int, size: int = 0) -> None:
    (folder / name).mkdir()
    (folder / name / "output").write_bytes(b"x" * size)
    content = {"dtrain": "0", "run_id": name, "attempts": [], "ended": 1.0, "controller": {"host": "elsewhere"}}
    (folder / name / "run.json").write_text(json.dumps(content))
    os.utime(folder / name / "run.json", (1e9 - age, 1e9 - age))


def test_the_oldest_runs_are_removed_and_none_that_lives(folder: Path) -> None:
    for name, age in (("old", 4), ("living", 3), ("newer", 2), ("newest", 1)):
        ended_run(folder, name, age, size=1 << 20)
    (folder / "own").mkdir()
    (folder / "data").mkdir()  # no run of dtrain
    (folder / "link").symlink_to("newer")
    ended_run(folder, "else", 9)
    (folder / "else/run.json").write_text('{"run_id": 7}')  # another program's
    ended_run(folder, ".half.removed", 9)  # of a run that was killed just then
    with hold(folder, "living"):
        assert remove_oldest(folder, Limits(3, None), own="own") == ["old", "newer"]
        assert remove_oldest(folder, Limits(None, "1.5M"), own="own") == ["newest"]
        assert remove_oldest(folder, Limits(1, "1K"), own="own") == []
    assert {path.name for path in folder.iterdir()} == {"own", "living", "data", "link", "else"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root has files of others")
def test_the_runs_of_other_users_stay(folder: Path) -> None:
    for name in ("theirs", "ours", ".theirs.removed"):
        ended_run(folder, name, 1)
        if "theirs" in name:
            os.chown(folder / name, 65534, 65534)
    assert remove_oldest(folder, Limits(1, None), own="own") == ["ours"]
    assert {path.name for path in folder.iterdir()} == {"theirs", ".theirs.removed"}


def test_a_run_of_another_host_stays_until_it_has_noted_its_end(folder: Path) -> None:
    for name, host in (("there", "elsewhere"), ("killed", os.uname().nodename)):
        ended_run(folder, name, 1)
        path = folder / name / "run.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "ended": None, "controller": {"host": host}}))
    assert remove_oldest(folder, Limits(1, None), own="own") == ["killed"]


def test_a_run_that_cannot_be_removed_keeps_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended_run(folder, "old", 1)

    def rmtree(_path: Path) -> None:
        raise PermissionError

    monkeypatch.setattr("shutil.rmtree", rmtree)
    assert remove_oldest(folder, Limits(1, None), own="own") == []
    assert [path.name for path in folder.iterdir()] == ["old"]


def test_without_locks_nothing_is_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended_run(folder, "old", 1)

    def flock(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", flock)
    assert remove_oldest(folder, Limits(1, None), own="own") == []
    with hold(folder, "r") as is_locked:
        assert not is_locked


def test_keep_runs_by_the_command(folder: Path) -> None:
    (folder / "script.py").write_text("")
    for name in "abc":
        assert run_dtrain("run", "--keep-runs", "2", "--run-id", name, "script.py").returncode == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["b", "c"]
    with pytest.raises(UsageError, match="--keep-runs"):
        output_of("run", "--keep-runs", "0", "script.py")
    with pytest.raises(UsageError, match="--log-max-size"):
        output_of("run", "--log-max-size", "much", "script.py")


@pytest.mark.parametrize(("text", "size"), [("500", 500), ("2K", 2048), ("1.5G", 3 << 29), ("1 GiB", 1 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--x") == size


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--lr", "0.1", "--max-tokens", "512"], ["--lr", "0.1", "--max-tokens", "512"]),
        (["--hf-token", "abc", "--x"], ["--hf-token", "***", "--x"]),
        (["--token-file", "t", "--token-id", "7"], ["--token-file", "t", "--token-id", "7"]),
        (["a.access_key=1x", "-xWANDB_API_KEY=k"], ["a.access_key=***", "-xWANDB_API_KEY=***"]),
        (["https://me:pw@host/x"], ["https://me:***@host/x"]),
        (["hf_abcdefghijklmnopqrstuvwx"], ["***"]),
        (["--password"], ["--password"]),
        (["--export=WANDB_API_KEY=k", "--env=A=1,TOKEN=t=u"], ["--export=WANDB_API_KEY=***", "--env=A=1,TOKEN=***"]),
        (["-x", "PGPASSWORD=p", "--wandbApiKey", "k"], ["-x", "PGPASSWORD=***", "--wandbApiKey", "***"]),
        (["--password", "123456", "--api-key=7"], ["--password", "***", "--api-key=***"]),
        (["--pad-token", "50256", "--token=1234567"], ["--pad-token", "50256", "--token=***"]),
        (["--tokenFile=t", "--tokenizer=gpt2", "--key=k"], ["--tokenFile=t", "--tokenizer=gpt2", "--key=k"]),
    ],
)
def test_secrets_are_not_kept(words: list[str], kept: list[str]) -> None:
    assert without_secrets(words) == kept


def test_a_full_disk_leaves_no_half_of_a_file_and_the_end_is_tried_again(folder: Path) -> None:
    complaints: list[str] = []
    logs = LogFiles(folder, complaints.append)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limit[1]))  # stands in for the disk
    try:
        logs.write_error(0, 0, "x" * 600)
        logs.write_report("y" * 600)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == []
    assert len(complaints) == 1
    logs.write_manifest({"state": "finished"})
    logs.write_report("y" * 600)
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["report.txt", "run.json"]
    assert (folder / "report.txt").read_text() == "y" * 600 + "\n"


def test_logs_are_read_in_the_order_of_their_seconds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    logs = LogFiles(folder, lambda text: pytest.fail(text))
    reader, late = LogReader(folder), LogReader(folder, since=1001.0)
    logs.begin_attempt(0)
    for rank in (0, 1):
        logs.add_worker(rank)
    logs.write(1, 1, b"a")
    logs.write(1, 1, b"b")
    now = 1001.5
    logs.write(0, 2, b"c")
    now = 1002.0
    logs.write(1, 1, b"d")
    assert [(p.rank, p.stream, p.data) for p in reader.read()] == [(1, 1, b"ab"), (0, 2, b"c"), (1, 1, b"d")]
    assert [(p.rank, p.data) for p in late.read()] == [(0, b"c"), (1, b"d")]
    logs.write(1, 1, b"e")
    logs.begin_attempt(1)
    logs.add_worker(0)
    logs.write(0, 1, b"f")
    logs.close()
    for each in (reader, late):
        assert [(p.attempt, p.rank, p.data) for p in each.read()] == [(0, 1, b"e"), (1, 0, b"f")]
        assert list(each.read()) == []


def test_output_is_named_by_the_host_to_which_its_rank_has_moved(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = LogFiles(folder, lambda text: pytest.fail(text))
    logs.begin_attempt(0)
    for rank in (0, 1):
        logs.add_worker(rank)
    entry = Entry("r", str(folder), "script.py", "here", "m", "b", 0, pid=1, start=2, socket="", began=0.0)

    def written(hosts: str, rank: int, data: bytes) -> str:
        workers = [[number, host, 0, []] for number, host in enumerate(hosts)]
        attempts = [{"number": 0, "workers": workers}]
        logs.write_manifest({"version": 1, "controller": {"pid": 1, "start": 2}, "attempts": attempts})
        logs.write(rank, 1, data)
        assert shown.more()
        return capfd.readouterr().out

    shown = _Shown(entry, LogReader(folder), lines="all")
    assert written("a", 0, b"one\n") == "[a:0] one\n"
    assert written("ab", 1, b"two\n") == "[b:1] two\n"
    assert written("cb", 0, b"three\n") == "[c:0] three\n"
    logs.close()


@pytest.mark.parametrize("steps", [0, 5])
def test_steps_of_all_hosts_are_added_up_once_a_second(
    steps: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[AttemptState] = []

    def asked_for(attempt: AttemptState) -> int:
        asked.append(attempt)
        return steps

    monkeypatch.setattr(AttemptState, "steps", property(asked_for))
    drive = Drive("a")
    drive.run()
    overview = Overview(Timeline(), lambda _: None)
    record = RunRecord(
        drive.job.spec, {}, folder=folder, limits=Limits(None, None), keep=lambda _: None, on_start=lambda: None,
        overview=overview,
    )  # fmt: skip
    monkeypatch.setattr("launcher.runs.record.SAMPLE_S", 3600.0)
    for _ in range(100):
        record.watch(drive.job)
    record.finish()
    assert asked == [drive.job.attempt]


def test_what_came_first_within_a_second_is_read_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar on stderr, then a line on stdout, and another rank before both."""
    monkeypatch.setattr("time.time", lambda: 1000.0)
    logs = LogFiles(folder, lambda text: pytest.fail(text))
    logs.begin_attempt(0)
    for rank in (0, 1):
        logs.add_worker(rank)
    for rank, stream, data in ((1, 1, b"loads\n"), (0, 2, b"100%\n"), (0, 1, b"saved\n")):
        logs.write(rank, stream, data)
    logs.close()
    assert [p.data for p in LogReader(folder).read()] == [b"loads\n", b"100%\n", b"saved\n"]
