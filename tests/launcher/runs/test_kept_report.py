"""The report of a run outlives its terminal: report.txt, run.json, `dtrain report`, wait, attach; lists have causes."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from testbed.processes import Result, run_dtrain, started_dtrain, wait_until
from testbed.terminal import dtrain_on_terminal
from testbed.typed import dtrain

from launcher.runs.registry import entries, place

# Waits for a file, then fails on rank 1.
SCRIPT = """
import os, pathlib, sys, time
print("rank", os.environ["RANK"], "up", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
if os.environ["RANK"] == "1":
    raise ValueError("bad batch")
time.sleep(100)
"""
CAUSE = "rank 1: ValueError: bad batch"
HEADLINE = re.compile(r"rank 1 on \S+ \(pid \d+\) raised an exception after .* s")


@pytest.fixture(autouse=True)
def folder(own_runs: Path) -> Path:
    (own_runs / "script.py").write_text(SCRIPT)
    return own_runs


def failed(run_id: str, *words: str) -> Result:
    """Run the script, which fails at once."""
    Path("go").touch()
    return run_dtrain("run", "--nproc-per-node", "2", "--run-id", run_id, *words, "script.py")


def history(*command: str) -> list[dict[str, Any]]:
    result = dtrain(*(command or ("history",)), "--json")
    assert result.returncode == 0, result
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def unprefixed(said: str) -> list[str]:
    """Return what dtrain says, but for the line about what it waits for on a busy machine."""
    return [line.removeprefix("dtrain: ") for line in said.splitlines() if re.match("dtrain: (?!waiting )", line)]


def test_the_report_of_a_run_is_kept_and_printed_in_any_folder(folder: Path) -> None:
    result = failed("r")
    assert result.returncode == 1
    shown = unprefixed(result.stderr)
    kept = (folder / "runs/r/report.txt").read_text()
    lines = kept.splitlines()
    assert HEADLINE.fullmatch(lines[0])
    assert len(lines) == len(shown)
    assert lines[0] == shown[0]
    assert f"  see it: less {folder}/runs/r/attempt_0/1/stderr.log" in lines, "it is read in any folder"
    assert json.loads((folder / "runs/r/run.json").read_text())["report"] == kept.rstrip("\n")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for words in (["report"], ["report", "last"], ["report", "r"]):
        printed = run_dtrain(*words, cwd=elsewhere)
        assert (printed.returncode, printed.stdout, printed.stderr) == (0, kept, ""), words


@pytest.mark.parametrize("way", ["detached", "foreground"])
def test_wait_and_attach_end_with_report_and_exit_code(folder: Path, way: str) -> None:
    detach = ["--detach"] if way == "detached" else []
    words = ["run", "--nproc-per-node", "2", "--run-id", "r", *detach, "script.py"]
    with started_dtrain(*words, outlived=bool(detach)) as run, contextlib.ExitStack() as looking:
        wait_until(lambda: is_running("r"), "it runs")
        waits = looking.enter_context(dtrain_on_terminal("wait", "r", cwd=folder))
        attached = looking.enter_context(dtrain_on_terminal("attach", "r", cwd=folder))
        attached.read_until("continues without this terminal")
        refused = dtrain("report", "r")
        assert (refused.returncode, refused.stdout) == (1, ""), refused
        assert "run r is active; it has a report once it has ended: dtrain wait r" in refused.stderr
        (folder / "go").touch()
        for terminal in (waits, attached):
            assert terminal.wait() == 1, terminal.shown
            lines = unprefixed(terminal.shown.replace("\r", ""))
            assert len([line for line in lines if HEADLINE.fullmatch(line)]) == 1, terminal.shown
            assert "see it: less" in lines[-1]
        run.wait()
    for command in ("wait", "attach"):
        after = dtrain(command, "r")
        assert (after.returncode, after.stdout) == (1, ""), after
        assert unprefixed(after.stderr) == (folder / "runs/r/report.txt").read_text().splitlines()


def is_running(run_id: str) -> bool:
    return [each["state"] for each in history("ps") if each["run_id"] == run_id] == ["running"]


def test_history_and_ps_have_the_cause_in_a_few_words(folder: Path) -> None:
    failed("raised")
    (folder / "script.py").write_text("import sys\nsys.exit(7)")
    failed("exited")
    (folder / "script.py").write_text("import os\nos.kill(os.getpid(), 11)")
    failed("killed")
    (folder / "script.py").write_text("pass")
    failed("fine")
    run_dtrain("run", "--run-id", "none", "--no-python", "no-such-program")
    causes = {each["run_id"]: each["cause"] for each in history()}
    assert causes["raised"] == CAUSE
    assert re.fullmatch("rank [01]: exit code 7", causes["exited"])
    assert re.fullmatch("rank [01]: SIGSEGV", causes["killed"])
    assert causes["fine"] == ""
    assert re.fullmatch(r"\S+: the program no-such-program is.*", causes["none"])
    assert {each["run_id"]: each["cause"] for each in history("ps", "--all")} == causes
    for words in (["history"], ["ps", "--all"]):
        table = dtrain(*words).stdout
        assert re.search(rf"^ raised .* {CAUSE} +script.py$", table, re.MULTILINE), table
    assert "no-such-program is" in dtrain("report", "none").stdout, "no worker has started, so it has no folder"


def test_a_run_that_is_lost_has_a_cause_and_an_end_too(folder: Path) -> None:
    failed("r")
    (entry,) = entries()
    change(entry.name, state="", cause="", report="")
    (run,) = history()
    assert (run["state"], run["cause"]) == ("lost", "its controller is gone")
    for command, code in (("report", 0), ("wait", 1), ("attach", 1)):
        result = dtrain(command, "r")
        assert (result.returncode, "run r is lost" in result.stdout + result.stderr) == (code, True), result


def test_a_run_of_an_older_version_breaks_no_command(folder: Path) -> None:
    failed("r")
    (entry,) = entries()
    change(entry.name, without=("cause", "report"))
    manifest = folder / "runs/r/run.json"
    content = json.loads(manifest.read_text())
    del content["report"], content["outcome"]["preempted"]
    manifest.write_text(json.dumps(content))
    (folder / "runs/r/report.txt").unlink()
    assert [each["cause"] for each in history()] == [CAUSE], "its run.json has it"
    for command, code in (("report", 0), ("wait", 1), ("attach", 1)):
        result = dtrain(command, "r")
        assert (result.returncode, "run r has ended: failed" in result.stdout + result.stderr) == (code, True), result
    content["outcome"] = {"cause": "another form"}
    manifest.write_text(json.dumps(content))
    assert [each["cause"] for each in history()] == [""]


def test_the_list_skips_what_a_later_version_adds(folder: Path) -> None:
    failed("r")
    (entry,) = entries()
    change(entry.name, colour="red")
    assert [each["run_id"] for each in history()] == ["r"]


@pytest.mark.parametrize(("columns", "room"), [(120, 36), (160, 52)])
def test_the_command_has_the_room_that_the_terminal_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch, columns: int, room: int
) -> None:
    command = "script.py --epochs 30 --lr 0.001 --data /data/digits"
    (folder / "script.py").write_text("pass")
    run_dtrain("run", "--run-id", "20261123-194459-2864", *command.split())
    monkeypatch.setenv("COLUMNS", str(columns))
    with dtrain_on_terminal("history", cwd=folder) as terminal:
        assert terminal.wait() == 0
    head, _, *rows = [line for line in terminal.shown.splitlines() if line.strip()]
    shown = [line[head.index("command") :].strip() for line in rows]
    assert " ".join(shown) == command
    assert max(map(len, shown)) >= room, terminal.shown
    assert max(map(len, terminal.shown.splitlines())) <= columns


def change(name: str, *, without: tuple[str, ...] = (), **values: str) -> None:
    """Change what the list has of a run."""
    file = place() / name
    content = {key: value for key, value in json.loads(file.read_text()).items() if key not in without}
    file.write_text(json.dumps({**content, **values}))
