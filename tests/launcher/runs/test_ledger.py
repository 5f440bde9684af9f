"""What workers write to DTRAIN_LEDGER_FILE is in the files of the run, whatever becomes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from testbed.processes import run_dtrain
from testbed.sshd import SshHosts

WRITES = """\
import json, os, signal, sys
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def write(*lines, end="\\n"):
    with open(os.environ["DTRAIN_LEDGER_FILE"], "w") as file:
        file.write("\\n".join(map(json.dumps, lines)) + end)
"""


def run(folder: Path, text: str, *options: str) -> Any:
    script = folder / "train.py"
    script.write_text(WRITES + text)
    return run_dtrain("run", "--run-id", "r", *options, script.name, cwd=folder)


def ledger(folder: Path, rank: int, attempt: int = 0) -> list[Any]:
    text = (folder / f"runs/r/attempt_{attempt}/{rank}/ledger.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("where", ["here", "ssh"])
def test_each_rank_has_a_file_of_what_it_wrote(tmp_path: Path, where: str, request: pytest.FixtureRequest) -> None:
    options = ["--nproc-per-node", "3"]
    if where == "ssh":
        hosts: SshHosts = request.getfixturevalue("ssh_hosts")
        options = ["--hosts", "node1,node2:2", "--ssh-config", str(hosts.ssh_config)]
    text = "for step in range(3 if rank < 2 else 0):\n    write({'step': step, 'rank': rank})\n"
    result = run(tmp_path, text, *options)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    for rank in (0, 1):
        assert ledger(tmp_path, rank) == [{"step": step, "rank": rank} for step in range(3)]
    folder = tmp_path / "runs/r/attempt_0"
    assert sorted(path.name for path in (folder / "2").iterdir()) == ["stderr.log", "stdout.log"], "it wrote nothing"
    assert not (folder / "times.log").exists()


def test_what_a_worker_wrote_before_it_was_killed_is_kept(tmp_path: Path) -> None:
    result = run(
        tmp_path, "write({'step': 0}, {'step': restart + 1})\nos.kill(os.getpid(), 9)\n", "--max-restarts", "1"
    )
    assert result.returncode == 128 + 9
    for attempt in (0, 1):
        assert ledger(tmp_path, 0, attempt) == [{"step": 0}, {"step": attempt + 1}]
    assert '{"step"' not in result.stdout + result.stderr, "a ledger is no output"


def test_more_than_a_pipe_holds_passes(tmp_path: Path) -> None:
    text = "write(*({'step': step, 'hashes': 'x' * 1000} for step in range(4000)))\nwrite({'step': 4000})\n"
    result = run(tmp_path, text, "--nproc-per-node", "2")
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert [line["step"] for line in ledger(tmp_path, rank)] == [*range(4001)]


def test_a_torn_line_does_not_run_into_the_successor_s(tmp_path: Path) -> None:
    text = """
import struct
with open(os.environ["DTRAIN_PROGRESS_FILE"], "r+b") as file:
    file.seek(16)
    file.write(struct.pack("<Q", 1))  # its failure is its own
if restart == 0 and rank == 0:
    write({"step": 0}, {"step": 1}, end="")
    os.kill(os.getpid(), signal.SIGKILL)
write({"step": 1})
"""
    result = run(tmp_path, text, "--nproc-per-node", "2", "--max-restarts", "1")
    assert result.returncode == 0, result.stderr
    assert ledger(tmp_path, 0) == [{"step": 0}, {"step": 1}, {"step": 1}]


def test_a_ledger_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    text = "if rank == 0:\n    os.mkdir('runs/r/attempt_0/0/ledger.jsonl')\n    write({'step': 0})\nprint('trained')\n"
    result = run(tmp_path, text)
    assert (result.returncode, result.stdout.count("trained")) == (0, 1), result.stderr
    assert result.stderr.count("cannot be written") == 1
