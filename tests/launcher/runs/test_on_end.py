"""--on-end: the user's command when a run has ended, with how it ended in variables."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from testbed.processes import run_dtrain, started_dtrain, wait_until

from launcher.errors import LaunchError
from launcher.job.ending import Outcome
from launcher.runs.on_end import run_on_end

NAMES = ("DTRAIN_RUN", "DTRAIN_STATE", "DTRAIN_EXIT_CODE", "DTRAIN_CAUSE", "DTRAIN_FOLDER")
TELL = "; ".join(f'echo "${name}"' for name in NAMES)
COMMAND = f"({TELL}) > reported.new; mv reported.new reported"
WAITS = "import pathlib, time\nprint('up', flush=True)\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)\n"
OUTCOME = Outcome(
    run_id="r", exit_code=1, error=LaunchError("why", exit_code=1),
    signum=None, cause=None, secondary_failures=(), stopped=0, world_size=0, hosts=0, attempts=0,
    no_restart_reason="", evidence=(), swept=0, left=(), unchecked=(), duration_s=0.0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(own_runs: Path) -> Path:
    return own_runs


def reported() -> dict[str, str]:
    return dict(zip(NAMES, Path("reported").read_text().splitlines(), strict=True))


def test_it_runs_after_a_success_and_is_notified_of_it(folder: Path) -> None:
    (folder / "script.py").write_text("")
    command = f'{COMMAND}; echo $0 $# > words; test -z "$DTRAIN_ON_END$DTRAIN_TOKEN" || echo passed on >> words'
    env = {"DTRAIN_ON_END": command, "DTRAIN_TOKEN": "hush"}
    result = run_dtrain("run", "--run-id", "well", "script.py", env=env)
    assert result.returncode == 0, result
    assert reported() == {
        "DTRAIN_RUN": "well",
        "DTRAIN_STATE": "finished",
        "DTRAIN_EXIT_CODE": "0",
        "DTRAIN_CAUSE": "",
        "DTRAIN_FOLDER": str(folder / "runs/well"),
    }
    assert Path("words").read_text() == "/bin/sh 0\n", "the text is one argument, and nothing of ours is in it"


def test_after_a_failure_it_gets_the_cause_without_secrets(folder: Path) -> None:
    (folder / "script.py").write_text("raise ValueError('no $(touch injected) --api-key hush')\n")
    result = run_dtrain("run", "--on-end", f"{COMMAND}; echo out; echo err >&2; exit 3", "script.py")
    assert result.returncode == 1, "what becomes of the command changes nothing"
    found = reported()
    assert (found["DTRAIN_STATE"], found["DTRAIN_EXIT_CODE"]) == ("failed", "1")
    assert "raised ValueError" in found["DTRAIN_CAUSE"]
    assert found["DTRAIN_CAUSE"].endswith("no $(touch injected) --api-key ***")
    assert not Path("injected").exists()
    assert result.stdout.endswith("out\n")
    assert "err\ndtrain: --on-end: the command ended with exit code 3\n" in result.stderr


def test_it_runs_after_a_run_that_could_not_start(folder: Path) -> None:
    result = run_dtrain("run", "--on-end", COMMAND, "--no-python", "no-such-program")
    assert result.returncode == 1, result
    assert reported()["DTRAIN_STATE"] == "not started"
    assert "no-such-program" in reported()["DTRAIN_CAUSE"]


def test_it_runs_after_ctrl_c(folder: Path) -> None:
    (folder / "script.py").write_text(WAITS)
    with started_dtrain("run", "--on-end", COMMAND, "script.py") as run:
        assert run.stdout.readline().endswith(b"up\n")
        run.send_signal(signal.SIGINT)
        assert run.wait() == 130
    assert (reported()["DTRAIN_STATE"], reported()["DTRAIN_CAUSE"]) == ("stopped", "stopped by SIGINT")


def test_it_runs_after_a_detached_run_and_again_with_rerun(folder: Path) -> None:
    (folder / "script.py").write_text(WAITS)
    result = run_dtrain("run", "--detach", "--on-end", f"{COMMAND}; echo the end", "script.py", outlived=True)
    run_id = result.stdout.strip()
    assert result.returncode == 0, result
    assert not Path("reported").exists()
    Path("go").touch()
    wait_until(Path("reported").exists, "the command has run")
    assert reported()["DTRAIN_RUN"] == run_id
    log = Path("runs", run_id, "console.log")
    wait_until(lambda: log.read_text().endswith("the end\n"), "what it writes is in the log")
    wait_until(lambda: not Path(f"runs/.{run_id}.lock").exists(), "dtrain has ended")
    Path("reported").unlink()
    again = run_dtrain("rerun", run_id, outlived=True)
    assert again.returncode == 0, again
    wait_until(Path("reported").exists, "the command of the second run has run")
    assert reported()["DTRAIN_RUN"] != run_id
    options = json.loads(Path("runs", reported()["DTRAIN_RUN"], "run.json").read_text())["options"]
    assert options["on_end"]["value"] == f"{COMMAND}; echo the end"


def test_it_may_run_the_run_again_under_its_name(folder: Path) -> None:
    (folder / "script.py").write_text("print('ran')")
    command = "test -e again || { touch again; $PYTHON -m launcher rerun $DTRAIN_RUN; }"
    env = {"PYTHON": sys.executable}
    result = run_dtrain("run", "--run-id", "r", "--on-end", command, "script.py", env=env)
    assert result.returncode == 0, result
    assert result.stdout.count("ran\n") == 2, result.stderr
    assert "--on-end" not in result.stderr


def test_a_run_started_by_it_takes_no_command_from_the_file(folder: Path) -> None:
    (folder / "script.py").write_text("")
    inner = "$PYTHON -m launcher run -q script.py"
    (folder / "dtrain.toml").write_text(f"on_end = 'echo x >> count; test $(wc -l < count) -gt 2 || {inner}'\n")
    env = {"PYTHON": sys.executable}
    result = run_dtrain("run", "-q", "script.py", env=env)
    assert result.returncode == 0, result
    assert Path("count").read_text() == "x\n"


def test_ctrl_c_ends_the_command_and_leaves_the_exit_code(folder: Path) -> None:
    (folder / "script.py").write_text("raise SystemExit(7)")
    with started_dtrain("run", "--on-end", "echo $$ > pid.new; mv pid.new pid; sleep 300", "script.py") as run:
        wait_until(Path("pid").exists, "the command runs")
        run.send_signal(signal.SIGINT)
        assert run.wait() == 7
        assert b"the command was killed, since dtrain received SIGINT" in run.stderr.read()
    assert not os.path.exists(f"/proc/{Path('pid').read_text().strip()}")


def test_user_signals_end_neither_the_command_nor_dtrain(folder: Path) -> None:
    (folder / "script.py").write_text("")
    command = "echo $$ > pid.new; mv pid.new pid; until [ -e go ]; do sleep 0.02; done"
    with started_dtrain("run", "--on-end", command, "script.py") as run:
        wait_until(Path("pid").exists, "the command runs")
        run.send_signal(signal.SIGUSR1)
        run.send_signal(signal.SIGUSR2)
        Path("go").touch()
        assert run.wait() == 0, run.stderr.read()


def test_a_signal_while_the_command_starts_kills_it_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            signal.raise_signal(signal.SIGINT)  # before anyone can hold this process

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    said: list[str] = []
    run_on_end("echo $$ > pid.new; mv pid.new pid; exec sleep 300", OUTCOME, "not started", None, say=said.append)
    assert said == ["--on-end: the command was killed, since dtrain received SIGINT"]
    assert not Path("pid").exists() or not os.path.exists(f"/proc/{Path('pid').read_text().strip()}")


def test_what_does_not_end_is_killed_with_all_it_has_started(folder: Path) -> None:
    said: list[str] = []
    command = "sleep 300 & echo $! > child; wait"
    run_on_end(command, OUTCOME, "not started", None, say=said.append, limit_s=3.0)
    assert said[0].startswith("--on-end: the command did not end within 3 s and was killed")
    child = Path("child").read_text().strip()
    wait_until(lambda: not os.path.exists(f"/proc/{child}"), "what it has started is gone")
