"""`dtrain plan`: who would run where, as a table and as JSON; nothing is started or connected to."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from testbed.processes import run_program
from testbed.typed import message_of, output_of

from launcher.errors import UsageError
from launcher.machine.processors import cores, cpu_limit, share


@pytest.fixture(autouse=True)
def _no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def _rows(*args: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(output_of("plan", "--json", *args))
    return rows


def _refusal(*args: str) -> str:
    with pytest.raises(UsageError) as refused:
        output_of("plan", *args)
    return message_of(refused.value)


def test_the_json_has_every_worker_with_its_share() -> None:
    rows = _rows("--simulate", "--nnodes", "2", "--nproc-per-node", "2", "train.py")
    assert [(row["rank"], row["host"], row["local_rank"]) for row in rows] == [
        (0, "sim0", 0), (1, "sim0", 1), (2, "sim1", 0), (3, "sim1", 1),
    ]  # fmt: skip
    for row in rows:
        part = share(cores(), row["rank"] // 2, 2) or cores()
        assert row["cores"] == list(share(part, row["local_rank"], 2) or part)
        assert row["threads"] == max(1, cpu_limit() // 2 // 2)
        assert row["assumed"] is False


def test_remote_hosts_are_marked_as_assumed_in_json() -> None:
    rows = _rows("--hosts", "localhost:1,far.example:2", "train.py")
    assert rows[1:] == [
        {
            "rank": 1 + local_rank,
            "role": "default",
            "host": "far.example",
            "local_rank": local_rank,
            "gpus": [str(local_rank)],
            "visible": "0,1",
            "gpu_variable": "CUDA_VISIBLE_DEVICES",
            "cores": [],
            "threads": None,
            "assumed": True,
        }
        for local_rank in range(2)
    ]
    assert (rows[0]["host"], rows[0]["assumed"], rows[0]["cores"]) == ("localhost", False, list(cores()))


def test_the_table_says_the_same_to_a_person() -> None:
    table = output_of("plan", "--hosts", "localhost:1,far.example:2", "--gpus-per-proc", "2", "--oversubscribe", "a.py")
    header, _, *rows, note = table.splitlines()
    assert header.split("  ")[0].strip() == "rank"
    cells = [row.split() for row in rows]
    assert [row[:3] for row in cells] == [["0", "localhost", "0"], ["1", "far.example", "0"], ["2", "far.example", "1"]]
    assert cells[2][3:] == ["2,3?", "2,3?", "?", "?"]
    assert cells[0][3:5] == ["-", "unchanged"]
    assert note == "? the host was not asked: its GPUs are assumed to be numbered from 0, its cores are unknown"


def test_a_table_of_known_hosts_assumes_nothing() -> None:
    assert "?" not in output_of("plan", "--nproc-per-node", "1", "train.py")


def test_the_table_is_no_wider_because_of_a_narrow_terminal() -> None:
    argv = ("plan", "--simulate", "--nnodes=2", "train.py")
    assert output_of(*argv, COLUMNS="20") == output_of(*argv)


@pytest.mark.parametrize("options", ["", "--nproc-per-node auto", "--nproc-per-node gpu", "--nproc-per-node cpu"])
def test_workers_that_only_a_run_could_count_are_a_usage_error(options: str) -> None:
    said = "the number of workers on far1, far2 is unknown until a run asks these hosts; write far1:SLOTS"
    assert said in _refusal("--hosts", "localhost,far1,far2", *options.split(), "train.py")


@pytest.mark.parametrize("nproc", ["cpu", "gpu"])
def test_slots_do_not_say_how_many_gpus_or_processors_a_host_has(nproc: str) -> None:
    assert "unknown until a run asks" in _refusal("--hosts", "far:4", "--nproc-per-node", nproc, "train.py")


def test_slots_limit_what_is_asked_for() -> None:
    said = _refusal("--hosts", "far1:2,far2:4,far3:1", "--nproc-per-node", "3", "train.py")
    assert "far1: 3 workers, but its entry in the host list has 2 slots" in said
    assert "far2" not in said
    assert "far3: 3 workers" in said


def test_it_starts_no_process_and_opens_no_connection(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    watch = """
import sys
BAD = ("socket.connect", "socket.bind", "socket.getaddrinfo", "subprocess.Popen", "os.fork", "os.exec")
sys.addaudithook(lambda event, _: event in BAD and sys.exit(f"it did {event}"))
sys.argv[:] = ["dtrain", "plan", "--hosts", "localhost:1,far.example:1", "train.py"]
from launcher.cli.main import main
main()
"""
    result = run_program(sys.executable, "-c", watch, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, ""), result
    assert os.listdir(tmp_path) == ["train.py"], "not even a log folder"
