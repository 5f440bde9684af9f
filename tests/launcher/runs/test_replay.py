"""Steps of a run again, compared with its ledger: dtrain replay, dtrain diff, --replayable.

The script is a stand-in that writes a ledger as ddp does; tests/ddp has the same with ddp.
"""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from testbed.imports import ROOT
from testbed.processes import Result, run_dtrain, started_dtrain, wait_until
from testbed.sshd import SshHosts
from testbed.terminal import dtrain_on_terminal

STAND_IN = ROOT / "tests/programs/ledger_stand_in.py"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    shutil.copy(STAND_IN, "train.py")
    return tmp_path


def train(*words: str, options: tuple[str, ...] = (), name: str = "first") -> Result:
    result = run_dtrain("run", "--run-id", name, *options, "train.py", *words)
    assert result.returncode == (1 if words[1:] else 0), result
    return result


def replay(*words: str, **options: Any) -> Result:
    return run_dtrain("replay", *words, **options)


def last_line(result: Result) -> str:
    return result.stderr.splitlines()[-1]


def own_folder() -> Path:
    (found,) = Path("runs").glob("replay-*")
    return found


def test_the_failed_step_fails_again_from_the_checkpoint() -> None:
    failed = train("20", "11", options=("--nproc-per-node", "2", "--max-restarts", "1"))
    assert last_line(failed) == "dtrain:   replay it: dtrain replay first"
    assert "see it: less " in failed.stderr.splitlines()[-2]
    before = sorted(Path("checkpoints").iterdir())
    result = replay("first", cwd=Path("/"))
    assert result.returncode == 1, result
    assert f"dtrain: replay of run first to step 11, from step 9: {before[-1].absolute()}\n" in result.stderr
    line = 1 + Path("train.py").read_text().splitlines().index('        raise ValueError(f"step {step} fails")')
    place = f"ValueError at {Path('train.py').absolute()}:{line} in gradient_of"
    text = "steps 9 to 10 have the same bits (8 hashes)"
    assert last_line(result) == f"dtrain: replay: {text}; the recorded exception came again: {place}"
    assert sorted(Path("checkpoints").iterdir()) == before
    assert "replay it" not in result.stderr, "a replay is not replayed"
    record = json.loads((own_folder() / "run.json").read_text())
    assert record["attempts"][0]["world_size"] == 1
    assert (own_folder() / "report.txt").exists()
    assert not (own_folder() / "pinned").exists()


def test_a_step_has_the_same_bits_and_saves_go_elsewhere() -> None:
    train("20")
    shutil.rmtree("checkpoints")
    result = replay("--step", "6")
    assert (result.returncode, last_line(result)) == (
        0,
        "dtrain: replay: steps 1 to 6 have the same bits (24 hashes)",
    ), result
    assert "from step 1: its beginning" in result.stderr
    assert [path.name for path in (own_folder() / "checkpoints").iterdir()] == ["step-0000000004.pt"]
    again = replay()  # the last run, not its replay
    assert (again.returncode, last_line(again)) == (
        0,
        "dtrain: replay: steps 1 to 20 have the same bits (80 hashes)",
    ), again


def test_a_difference_is_said_with_step_and_parameter() -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    Path(".gitignore").write_text("runs/\nstate/\ncheckpoints/\n")
    subprocess.run(["git", "add", "."], check=True)
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"], check=True)
    train("20", "10")
    shutil.rmtree("checkpoints")
    script = Path("train.py")
    script.write_text(
        script.read_text().replace("    if step == fails_at:", "    data = '?' if step == 7 else data\n    if False:")
    )
    result = replay()
    assert result.returncode == 1, result
    first = result.stderr.index("dtrain: replay: not as in run first: step 7: the gradient of weight\n")
    assert f"dtrain: replay: {Path().absolute()} has changes that run first did not have: git diff\n" in result.stderr
    assert result.stderr.count("replay: not as in run first") == 1
    assert first < result.stderr.index("finished successfully"), "at once"
    assert last_line(result) == (
        "dtrain: replay: steps 1 to 6 have the same bits (24 hashes); "
        "not as in run first: step 7: the gradient of weight"
    )


def test_code_without_a_repository_is_not_said_to_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(Path().absolute().parent))
    train("6")
    shutil.rmtree("checkpoints")
    script = Path("train.py")
    script.write_text(script.read_text().replace("digest(state, step, data)", "digest(state, step, data, 1)"))
    result = replay()
    text = "versions and the number of samples are as they were; the code is in no git repository"
    assert f"not as in run first: step 1: the gradient of weight\ndtrain: replay: {text}\n" in result.stderr


def test_on_another_processor_losses_are_compared() -> None:
    train("6")
    shutil.rmtree("checkpoints")
    Path("data").write_text("other bits")
    result = replay("--step", "3", env={"PROCESSOR": "b"})
    assert result.returncode == 0, result
    assert last_line(result) == (
        "dtrain: replay: steps 1 to 3 have the same losses within 0.001; bits are not compared: processor a and b"
    )


def test_pdb_opens_before_the_step(folder: Path) -> None:
    train("20")
    with dtrain_on_terminal("replay", "--step", "18", "--micro-batch", "3", "--pdb", cwd=folder) as terminal:
        terminal.read_until("replay: before micro-batch 3 of step 18; step 17 has the same bits (4 hashes)\r\n")
        terminal.read_until("(Pdb) ")
        terminal.type("p 'at', step\n")
        terminal.read_until("('at', 18)")
        terminal.type("q\n")
        assert terminal.wait() == 0, terminal.shown
    assert "BdbQuit" not in terminal.shown


def test_without_a_step_pdb_opens_at_the_exception(folder: Path) -> None:
    train("20", "14", options=("--grace-s", "0.3"))
    with dtrain_on_terminal("replay", "first", "--pdb", cwd=folder) as terminal:
        terminal.read_until("(Pdb) ")
        time.sleep(1.5)  # a worker that has failed would be killed
        terminal.type("p 'at', fails_at\n")
        terminal.read_until("('at', 14)")
        terminal.type("q\n")
        assert terminal.wait() == 1
    assert "step 13 has the same bits (4 hashes); the recorded exception came again" in terminal.shown


def test_an_active_run_is_replayed_though_checkpoints_go(folder: Path) -> None:
    script = Path("train.py")
    wait = "    if step == 10 and not PLAN:\n        while not Path('go').exists(): pass\n    data ="
    script.write_text(script.read_text().replace("    data =", wait))
    with started_dtrain("run", "--run-id", "first", "train.py", "20") as run:
        ledger = Path("runs/first/attempt_0/0/ledger.jsonl")
        wait_until(lambda: ledger.exists() and '{"step": 9,' in ledger.read_text(), "it waits at step 10")
        with dtrain_on_terminal("replay", "--step", "9", "--pdb", cwd=folder) as terminal:
            terminal.read_until("(Pdb) ")
            assert f"loaded {own_folder().absolute()}/pinned/step-0000000008.pt" in terminal.shown
            assert os.stat("checkpoints/step-0000000008.pt").st_nlink == 2
            terminal.type("c\n")
            assert terminal.wait() == 0, terminal.shown
        Path("go").touch()
        assert run.wait() == 0
    assert os.stat("checkpoints/step-0000000016.pt").st_nlink == 1


def test_options_about_where_and_how_often_it_ran_are_left_out() -> None:
    Path("dtrain.toml").write_text("max-restarts = 3\nnnodes = '2'\nsimulate = true\n")
    train("8", "5", options=("--on-end", "touch ended", "--chaos", "kill worker every 10m", "-x", "A=1"))
    Path("ended").unlink()
    result = replay()
    assert result.returncode == 1, result
    record = json.loads((own_folder() / "run.json").read_text())
    assert [len(record["attempts"]), record["hosts"]] == [1, [os.uname().nodename]]
    assert sorted(record["options"]) == ["export"]
    assert not Path("ended").exists()


def test_on_another_host_and_with_more_workers(ssh_hosts: SshHosts) -> None:
    train("20", options=("--ssh-config", str(ssh_hosts.ssh_config), "--sync", "code"))
    Path(".env").write_text("secret")
    not_sent = "not sent, for they look like secrets: .env"
    assert not_sent not in replay("--step", "18").stderr, "nothing is sent to this machine"
    shutil.rmtree(own_folder())
    result = replay("--step", "18", "--on", "node2", "--nproc-per-node", "2")
    assert (result.returncode, last_line(result)) == (
        0,
        "dtrain: replay: steps 17 to 18 have the same bits (8 hashes)",
    ), result
    assert not_sent in result.stderr
    record = json.loads((own_folder() / "run.json").read_text())
    assert (record["hosts"], record["attempts"][0]["world_size"]) == (["node2"], 2)


def test_what_cannot_be_replayed_is_an_error(snapshot: SnapshotAssertion) -> None:
    train("8")
    results = [
        replay(*argv.split())
        for argv in ("--step 9", "--step 0", "--micro-batch 1 --step 2", "--micro-batch 4 --step 2 --pdb", "none")
    ]
    assert [result.returncode for result in results] == [2, 2, 2, 2, 1]
    assert "".join(result.stderr for result in results) == snapshot
    assert not [*Path("runs").glob("replay-*")]


def test_steps_before_the_run_are_those_of_another_one() -> None:
    """A run that was resumed begins with a checkpoint, which may be gone."""
    train("8", name="before")
    script = Path("train.py")
    script.write_text(
        script.read_text()
        .replace("if PLAN and (path := PLAN", "if path := PLAN and (PLAN")
        .replace('PLAN["checkpoint"])', 'PLAN["checkpoint"]) or not PLAN and "checkpoints/step-0000000008.pt"')
    )
    train("12")
    early = replay("--step", "8")
    text = "dtrain: --step is 8; run first had the steps 9 to 12\n"
    assert (early.returncode, early.stderr) == (2, text)
    shutil.rmtree("checkpoints")
    result = replay("first", "--step", "10")
    gone = "the state with which the run began, at step 9, is gone"
    assert f"dtrain: replay of run first to step 10, from step 1: {gone}\n" in result.stderr
    assert last_line(result) == "dtrain: replay: steps 9 to 10 have the same bits (8 hashes)", result


def test_the_last_step_of_an_epoch_has_fewer_micro_batches() -> None:
    script = Path("train.py")
    script.write_text(script.read_text().replace("shares=[4]", "shares=[4 if step % 5 else 1, 1]"))
    train("8")
    result = replay("--step", "5", "--micro-batch", "2", "--pdb")
    text = "dtrain: --micro-batch is 2; this step of run first had 0 to 1\n"
    assert (result.returncode, result.stderr) == (2, text)


def test_a_run_without_a_ledger_says_what_makes_one() -> None:
    Path("train.py").write_text("raise ValueError\n")
    assert "replay it" not in train("", "").stderr
    result = replay()
    text = f"{Path('runs/first').absolute()} has no ledger: a script whose steps come from ddp.StepLoader writes one"
    assert (result.returncode, result.stderr) == (2, f"dtrain: {text}\n")


@pytest.mark.parametrize("ends", ["import sys; sys.exit(3)", "os.kill(os.getpid(), 9)"])
def test_only_a_run_that_raised_is_to_be_replayed(ends: str) -> None:
    script = Path("train.py")
    script.write_text(script.read_text().replace("raise ValueError", f"{ends}  #"))
    result = run_dtrain("run", "train.py", "9", "4")
    assert result.returncode in (3, 137)
    assert "replay it" not in result.stderr


def test_snapshots_of_a_failed_run_are_kept_and_replayed_from() -> None:
    failed = train("20", "14", options=("--replayable", "3"))
    assert "dtrain: replayable from step 4\n" in failed.stderr
    shutil.rmtree("checkpoints")
    result = replay("first")
    assert f"from step 13: {Path('runs/first/replayable').absolute()}/step-0000000012.pt" in result.stderr
    assert "step 13 has the same bits" in last_line(result)
    assert not (own_folder() / "replayable").exists()
    kept = train("5", options=("--replayable", "3"), name="second")
    assert "replayable" not in kept.stderr
    assert not Path("runs/second/replayable").exists()
    never = run_dtrain(
        "run", "--run-id", "third", "--replayable", "3", "--launch-prefix", "no-such-program", "train.py"
    )
    assert never.returncode != 0
    assert not Path("runs/third/replayable").exists()


def test_two_runs_are_compared_by_their_ledgers() -> None:
    train("9", name="first")
    train("9", "5", name="second")
    same = run_dtrain("diff", "first", "second")
    assert (same.returncode, same.stdout) == (0, "steps 1 to 4 have the same bits (16 hashes)\n"), same
    Path("data").write_text("other")
    train("7", name="third")
    other = run_dtrain("diff", "first", "runs/third/attempt_0/0/ledger.jsonl")
    text = "steps: 9 and 7\nno step is equal\nthey differ at step 1: the gradient of weight\n"
    assert (other.returncode, other.stdout) == (1, text), other
    found = json.loads(run_dtrain("diff", "--json", "first", "last").stdout)
    assert found["first"] == {"step": 1, "what": "gradient", "names": ["weight"]}
    assert (found["loader"], found["by_bits"]) == ({"steps": [9, 7]}, True)
    for words in (("first", "none"), ("first", "train.py")):
        assert run_dtrain("diff", *words).returncode == 2
