"""The file for programs: always whole, the same keys for every end of a run."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from testbed.outcomes import STOOD, failure, outcome
from testbed.processes import wait_until

from launcher.errors import UsageError
from launcher.hosts.folding import StartError
from launcher.job.ending import MissingRank, Outcome
from launcher.job.failures.failure import FailureKind
from launcher.output.error_json import as_json, brief_cause, write_error_json, write_usage_error_json
from launcher.timeline.goodput import Parts
from launcher.timeline.stragglers import Straggler


def written(
    folder: Path, end: Outcome, *, logs: Path | None = Path("runs/r1"), evidence_file: Path | None = None
) -> dict[str, Any]:
    path = folder / "end.json"
    write_error_json(path, end, folder=logs, evidence_file=evidence_file)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_failure_with_everything(tmp_path: Path) -> None:
    cause = failure(status=-11, kind=FailureKind.KILLED, attempt=2, error_type="", message="", at=3.0)
    closed = "[/a/pair.cc:5] Connection closed by peer [::1]:"
    secondary_failures = tuple(failure(rank=n, inside="all_reduce", message=f"{closed}{n}", at=4.0) for n in (3, 0))
    end = outcome(
        cause, secondary_failures=secondary_failures, evidence=STOOD, exit_code=139, attempts=3,
        no_restart_reason="all were used", stopped=1, swept=2, finished_ranks=(2,),
        left=(("sim1", ("pid 9 (python, state D)",)),), unchecked=(("sim0", "gone"),),
    )  # fmt: skip
    content = written(tmp_path, end, evidence_file=Path("runs/r1/attempt_2/evidence-1.txt"))
    positions = content.pop("standing")
    assert content == {
        "version": 2,
        "run_id": "r1",
        "exit_code": 139,
        "collectives": [],
        "devices": [],
        "ended": "failed",
        "signal": None,
        "error": None,
        "cause": {
            "kind": "killed", "host": "sim1", "rank": 1, "pid": 812, "exit_status": None, "signal": "SIGSEGV",
            "killer": "", "error_type": "", "message": "", "where": "", "inside": "", "attempt": 2, "after_s": 1.1,
            "step": None,
            "log_folder": "runs/r1/attempt_2/1",
        },
        "secondary_failures": {
            "count": 2,
            "groups": [
                {
                    "count": 2, "kind": "raised", "how": "failed in all_reduce: connection closed by peer",
                    "ranks": [0, 3],
                }
            ],
        },
        "preempted": False,
        "finished_ranks": [2],
        "left_out": [],
        "worker_restarts": 0,
        "faults": [],
        "stopped": 1,
        "attempts": 3,
        "no_restart_reason": "all were used",
        "world_size": 4,
        "hosts": 2,
        "duration_s": 1.5,
        "missing": [],
        "processes": {"left": {"sim1": ["pid 9 (python, state D)"]}, "swept": 2, "unchecked": {"sim0": "gone"}},
        "goodput": None,
        "stragglers": [],
        "log_folder": "runs/r1",
        "evidence_file": "runs/r1/attempt_2/evidence-1.txt",
    }  # fmt: skip
    assert sorted(group["ranks"] for group in positions) == [[0, 1, 3], [2]]
    assert all(set(group) == {"ranks", "where", "call", "inside", "note"} for group in positions)


@pytest.mark.parametrize(
    ("end", "ended"),
    [
        (outcome(None, exit_code=0), "finished"),
        (outcome(failure(kind=FailureKind.EXITED, status=7), exit_code=7), "failed"),
        (outcome(None, exit_code=130, signum=signal.SIGINT), "stopped"),
        (outcome(None, error=StartError({"beta": "no Python"}, total=2), hosts=0), "not started"),
    ],
)
def test_every_end_has_the_same_keys(tmp_path: Path, end: Outcome, ended: str) -> None:
    content = written(tmp_path, end)
    assert content["ended"] == ended
    assert set(content) == set(written(tmp_path, outcome(None)))
    assert content["exit_code"] == end.exit_code


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (outcome(None), ""),
        (outcome(failure(error_type="ValueError", message="bad batch\nof 3")), "rank 1: ValueError: bad batch"),
        (outcome(failure(message="x" * 99)), f"rank 1: ValueError: {'x' * 21}..."),
        (outcome(failure(kind=FailureKind.EXITED, status=7)), "rank 1: exit code 7"),
        (outcome(failure(kind=FailureKind.KILLED, status=-11)), "rank 1: SIGSEGV"),
        (
            outcome(failure(kind=FailureKind.KILLED, status=-9, killer="by the out-of-memory killer: 61 GB")),
            "rank 1: out of memory, SIGKILL",
        ),
        (outcome(failure(kind=FailureKind.NEVER_STARTED)), "rank 1 never started"),
        (outcome(failure(kind=FailureKind.HUNG)), "rank 1 hung"),
        (outcome(failure(kind=FailureKind.HOST_LOST, rank=None)), "host sim1 lost"),
        (outcome(failure(kind=FailureKind.STORE_LOST, rank=None)), "rendezvous store lost"),
        (outcome(failure(kind=FailureKind.STALLED, rank=None, message="no output for 60 s")), "no output for 60 s"),
        (
            outcome(failure(), missing=[MissingRank(2, "sim2", "train.py:7 in load", "all_reduce")]),
            "rank 2 on sim2 did not come to all_reduce...",
        ),
        (outcome(None, signum=signal.SIGTERM), "stopped by SIGTERM"),
        (outcome(None, preempted=True), "made room (--requeue)"),
        (outcome(None, error=UsageError("no such\nfile")), "no such"),
        (outcome(None, error=StartError({"beta": "no Python", "gamma": "unreachable"}, total=3)), "beta: no Python"),
    ],
)
def test_the_cause_in_a_few_words(end: Outcome, words: str) -> None:
    assert brief_cause(as_json(end, None, None)) == words


def test_exit_status_only_of_a_worker_that_exited(tmp_path: Path) -> None:
    exited = written(tmp_path, outcome(failure(kind=FailureKind.EXITED, status=7)))["cause"]
    assert (exited["exit_status"], exited["signal"]) == (7, None)
    lost = written(tmp_path, outcome(failure(kind=FailureKind.HOST_LOST, rank=None, pid=0)))["cause"]
    assert (lost["exit_status"], lost["signal"], lost["rank"], lost["pid"]) == (None, None, None, None)
    assert lost["log_folder"] == "runs/r1/attempt_0"
    unwritten = written(tmp_path, outcome(failure()), logs=None, evidence_file=Path("e.txt"))
    assert unwritten["cause"]["log_folder"] is None
    assert unwritten["evidence_file"] is None


def test_hosts_that_could_not_start_are_named_one_by_one(tmp_path: Path) -> None:
    error = StartError({"beta": "no Python", "gamma": "unreachable"}, total=3)
    content = written(tmp_path, outcome(None, error=error, hosts=0))
    assert content["error"]["type"] == "StartError"
    assert content["error"]["hosts"] == {"beta": "no Python", "gamma": "unreachable"}


def test_usage_error_before_any_run(tmp_path: Path) -> None:
    path = tmp_path / "end.json"
    write_usage_error_json(path, UsageError("--nnodes is 'x'"))
    content = json.loads(path.read_text())
    assert (content["ended"], content["exit_code"], content["run_id"]) == ("not started", 2, None)
    assert content["error"] == {"type": "UsageError", "message": "--nnodes is 'x'", "hosts": {}}
    assert set(content) == set(written(tmp_path, outcome(None)))


def test_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "end.json"
    big = outcome(failure(message="x" * 500_000))
    write_error_json(path, big, folder=None)
    done = threading.Event()
    seen: list[object] = []

    def read() -> None:
        while not done.is_set():
            try:
                json.loads(path.read_text())
            except (OSError, ValueError) as error:
                seen.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(60):
        write_error_json(path, big, folder=None)
    done.set()
    reader.join()
    assert seen == []
    assert os.listdir(tmp_path) == ["end.json"]


def test_folders_are_made_and_links_stay(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "end.json"
    write_error_json(path, outcome(None), folder=None)
    (tmp_path / "link").symlink_to(path)
    write_error_json(tmp_path / "link", outcome(failure()), folder=None)
    assert (tmp_path / "link").is_symlink()
    assert json.loads(path.read_text())["ended"] == "failed"


def test_link_at_the_temporary_file_s_place_is_not_followed(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "shared"
    precious.write_text("mine")
    folder.mkdir()
    link = folder / f".end.json.{os.getpid()}.tmp"  # where others could know that we would write
    link.symlink_to(precious)
    write_error_json(folder / "end.json", outcome(None), folder=None)
    assert precious.read_text() == "mine"
    assert sorted(folder.iterdir()) == [link, folder / "end.json"]
    assert not (folder / "end.json").is_symlink()


def test_failure_to_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        write_error_json(tmp_path / "file" / "end.json", outcome(None), folder=None)
    with pytest.raises(OSError, match="Is a directory"):
        write_error_json(tmp_path, outcome(None), folder=None)
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_pipe_is_written_and_not_replaced_and_never_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="No such device"):  # no one reads it
        write_error_json(path, outcome(None), folder=None)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(path.read_text()))
    reader.start()

    def wrote() -> bool:
        try:
            write_error_json(path, outcome(None), folder=None)
        except OSError:
            return False
        return True

    wait_until(wrote, "the reader has opened the pipe")
    reader.join(timeout=60)
    assert json.loads(received[0])["ended"] == "finished"
    assert path.is_fifo()


def test_any_text_can_be_written(tmp_path: Path) -> None:
    content = written(tmp_path, outcome(failure(message="caf\xe9 \udcff \x00 \u2028")), logs=Path("runs/\udcff"))
    assert content["cause"]["message"] == "caf\xe9 \udcff \x00 \u2028"


def test_goodput_and_stragglers_are_there_where_they_are_known(tmp_path: Path) -> None:
    slow = Straggler(
        host="sim1",
        ranks=(2, 3),
        what="data",
        times=1.234,
        attempt=0,
        from_step=7,
        after_s=1.23456,
        to_step=9,
        for_s=2.0,
    )
    parts = Parts(
        start=1.0, training=2.0, waiting=0.5, checkpoints=0.25, failures=0.25, rest=0.0, repeated=0.1, is_measured=True
    )
    path = tmp_path / "end.json"
    write_error_json(path, outcome(failure()), folder=None, parts=parts, stragglers=[slow])
    content = json.loads(path.read_text())
    assert content["goodput"] == {
        "goodput": 0.5, "start_s": 1.0, "training_s": 2.0, "waiting_s": 0.5, "checkpoints_s": 0.25, "failures_s": 0.25,
        "rest_s": 0.0, "repeated_s": 0.1,
    }  # fmt: skip
    assert content["stragglers"] == [
        {
            "host": "sim1", "ranks": [2, 3], "what": "data", "times": 1.23, "attempt": 0, "from_step": 7,
            "after_s": 1.235, "to_step": 9, "for_s": 2.0,
        }
    ]  # fmt: skip
