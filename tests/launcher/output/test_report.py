"""The last screen says what failed first and why, counts what followed, and ends with the next step."""

import dataclasses
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from testbed.outcomes import STOOD, evidence, failure, outcome
from testbed.processes import run_dtrain

from launcher.hosts.folding import StartError
from launcher.job.chaos import FaultCost
from launcher.job.ending import MissingRank, Outcome
from launcher.job.failures.failure import FailureKind, group_secondary_failures, plain_message
from launcher.output.report import SCREEN_LINES, report

FOLDER = Path("runs/r1")


def lines(
    end: Outcome,
    *,
    stderr: list[str] | None = None,
    stdout: list[str] | None = None,
    folder: Path | None = FOLDER,
    evidence_file: Path | None = None,
) -> list[str]:
    said = {2: stderr or [], 1: stdout or []}
    text = report(end, folder=folder, tail=lambda _rank, stream: said[stream], evidence_file=evidence_file)
    return [line.strip() for line in text.splitlines()]


def gloo(source: str, port: int) -> str:
    return f"[/pytorch/third_party/gloo/gloo/transport/tcp/{source}] Connection closed by peer [127.0.0.1]:{port}"


# ---- the cause ----


@pytest.mark.parametrize(("variable", "is_coloured"), [("FORCE_COLOR", True), ("NO_COLOR", False)])
def test_the_first_line_of_a_failure_may_be_coloured(variable: str, is_coloured: bool, tmp_path: Path) -> None:
    result = run_dtrain("run", "--no-python", "false", cwd=tmp_path, env={variable: "1"})
    assert result.returncode == 1, result
    assert ("dtrain: \x1b[1;31m" in result.stderr) == is_coloured, result


def test_exception_names_rank_message_and_line() -> None:
    end = outcome(failure(error_type="ValueError", message="bad batch", where="/home/me/train.py:7 in load"))
    shown = lines(end, stderr=["Traceback", "ValueError: bad batch"])
    assert shown[:6] == [
        "rank 1 on sim1 (pid 812) raised an exception after 1.1 s",
        "ValueError: bad batch",
        "at /home/me/train.py:7 in load",
        "the last lines of its stderr:",
        "| Traceback",
        "| ValueError: bad batch",
    ]


def test_exception_below_the_users_line_names_both() -> None:
    cause = failure(where="/home/me/train.py:7 in step", inside="all_reduce")
    assert "at /home/me/train.py:7 in step, inside all_reduce" in lines(outcome(cause))
    own = failure(where="/home/me/train.py:7 in step", inside="step")
    assert "at /home/me/train.py:7 in step" in lines(outcome(own))


def test_an_exit_code_is_shown_with_the_line_that_gave_it() -> None:
    exited = failure(
        kind=FailureKind.EXITED, status=3, error_type="", message="", where="/home/me/train.py:7 in main", inside="main"
    )
    shown = lines(outcome(exited), stderr=["no data"])
    assert shown[:2] == [
        "rank 1 on sim1 (pid 812) exited with code 3 after 1.1 s",
        "it called sys.exit at /home/me/train.py:7 in main",
    ]
    parser = dataclasses.replace(exited, inside="error")
    assert "it called sys.exit at /home/me/train.py:7 in main, inside error" in lines(outcome(parser))


def test_a_package_that_one_host_lacks_can_be_sent_there() -> None:
    cause = failure(error_type="ModuleNotFoundError", message="No module named 'helper'")
    said = "if it is only missing on sim1: --sync env sends your packages, --sync code your own modules"
    assert said in lines(dataclasses.replace(outcome(cause), hosts=2))
    assert said not in lines(dataclasses.replace(outcome(cause), hosts=1))


@pytest.mark.parametrize(
    "message",
    [
        "Torch not compiled with CUDA enabled",
        "module 'torch._C' has no attribute '_cuda_setDevice'",
        "Distributed package doesn't have NCCL built in",
    ],
)
def test_a_torch_without_cuda_is_named(message: str) -> None:
    said = "the torch on sim1 is built without CUDA; dtrain check shows torch and GPUs of each host"
    assert said in lines(outcome(failure(message=message)))
    assert said not in lines(outcome(failure(message="CUDA out of memory")))


def test_a_rank_that_asked_without_input_is_named() -> None:
    for changes, is_said in (
        ({"error_type": "BdbQuit", "message": ""}, True),
        ({"error_type": "EOFError", "message": "EOF when reading a line"}, True),
        ({"error_type": "EOFError", "message": "Ran out of input"}, False),
    ):
        end = outcome(failure(**changes))
        assert ("no one can answer rank 1: its standard input is empty" in lines(end)) == is_said
        assert not any("no one can answer" in line for line in lines(dataclasses.replace(end, stdin_rank=1)))


def test_what_to_do_about_too_little_memory_is_said() -> None:
    said = "to need less memory: fewer workers on each host (--nproc-per-node), or a smaller batch"
    killed = failure(kind=FailureKind.KILLED, status=-9, killer="probably the out-of-memory killer: ...")
    assert said in lines(outcome(killed))
    assert said not in lines(outcome(dataclasses.replace(killed, killer="")))


def test_a_crash_is_shown_without_frames_of_dtrain() -> None:
    own = '  File "/home/me/train.py", line 3 in step'
    ours = [f'  File "/opt/x/launcher/agent/workers/{name}.py", line 9 in f' for name in ("bootstrap", "fork_server")]
    words = ["Fatal Python error: Segmentation fault", own, *ours, "Extension modules: numpy._core (total: 1)"]
    shown = lines(outcome(failure(kind=FailureKind.KILLED, status=-11, message="")), stderr=words)
    assert [line for line in shown if line.startswith("| ")] == [f"| {words[0]}", f"| {own}"]


def test_long_messages_are_cut_and_counted() -> None:
    cause = failure(error_type="RuntimeError", message="\n".join(f"line {n}" for n in range(30)))
    shown = lines(outcome(cause))
    assert shown[1:6] == ["RuntimeError: line 0", "line 1", "line 2", "(26 more lines)", "line 29"]


def test_a_rank_that_finished_while_others_waited_is_named() -> None:
    cause = failure(message="Connection closed by peer [127.0.0.1]:47497", inside="barrier")
    said = "rank 2 had finished, with code 0: others may still have waited for it"
    assert said in lines(outcome(cause, finished_ranks=(2,)))
    assert not any("had finished" in line for line in lines(outcome(cause)))


def test_attempt_and_why_there_was_no_other() -> None:
    reason = "all 3 restarts (--max-restarts) were used"
    shown = lines(outcome(failure(attempt=3), attempts=4, stopped=3, no_restart_reason=reason))
    assert shown[0].startswith("attempt 3 of run r1: rank 1 on sim1 (pid 812) raised")
    assert {"3 workers stopped by dtrain", reason} <= {*shown}
    assert "attempt" not in lines(outcome(failure()))[0]


def test_what_a_worker_wrote_cannot_steer_the_terminal() -> None:
    text = report(
        outcome(
            failure(message="\x1b[2Jgone\x07", where="a\x1b]0;title.py:1"),
            secondary_failures=(failure(message="\x1b[31mred\x08", rank=0),),
            left=(("sim0", ("pid 5 (\x1b[2J, state D)",)),),
        ),
        folder=FOLDER,
        tail=lambda _rank, _stream: [],
    )
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "gone\\x07" in text
    assert "\x1b" not in lines(outcome(failure(kind=FailureKind.HOST_LOST, rank=None, message="\x1b[2Jit said so")))[0]


# ---- what followed ----


def test_victims_of_one_loss_are_one_line() -> None:
    alike = [
        failure(rank=n, at=2.0 + n / 10, inside="all_reduce", message=gloo("pair.cc:554", 41952 + n)) for n in range(6)
    ]
    shown = lines(
        outcome(failure(), secondary_failures=(*alike, failure(kind=FailureKind.KILLED, status=-6, rank=7, at=2.5)))
    )
    assert "6 others failed in all_reduce: connection closed by peer" in shown
    assert "1 other was killed by SIGABRT" in shown
    assert not any("41952" in line or "pair.cc" in line for line in shown)


def test_other_ways_to_fail_are_counted_only() -> None:
    others = tuple(failure(kind=FailureKind.EXITED, status=code, rank=code, at=5.0 + code) for code in range(1, 7))
    shown = lines(outcome(failure(), secondary_failures=others))
    assert [line for line in shown if "exited with code" in line] == [
        f"1 other exited with code {c}" for c in (1, 2, 3)
    ]
    assert "and 3 more in other ways" in shown


def test_victims_are_distinguished_by_what_they_were_in() -> None:
    closed = gloo("pair.cc:554", 41952)
    others = [failure(rank=2, inside="barrier", message=closed), failure(rank=3, inside="all_reduce", message=closed)]
    assert [group.ranks for group in group_secondary_failures(others)] == [(2,), (3,)]
    nameless = failure(rank=4, error_type="DistBackendError", message=closed)
    assert group_secondary_failures([nameless])[0].how == "failed with DistBackendError: connection closed by peer"


def test_equal_ends_stand_once_though_one_was_killed_meanwhile() -> None:
    peer = {"error_type": "RuntimeError", "message": "connection closed by peer", "inside": "all_reduce"}
    others = (failure(rank=2, pid=3, **peer), failure(rank=3, pid=4, status=-9, **peer))
    shown = lines(outcome(failure(), secondary_failures=others))
    assert "2 others failed in all_reduce: connection closed by peer" in shown
    assert len([line for line in shown if "connection closed by peer" in line]) == 1


@pytest.mark.parametrize(
    ("others", "expected"),
    [(3, "all 4 workers raised the same ValueError"), (2, "2 others raised the same ValueError")],
)
def test_what_the_others_raised_too_is_said_in_these_words(others: int, expected: str) -> None:
    cause = failure(error_type="ValueError", message="a bad batch", where="/home/me/train.py:7 in load")
    same = tuple(dataclasses.replace(cause, rank=rank, pid=rank) for rank in range(2, 2 + others))
    other = dataclasses.replace(cause, rank=9, pid=9, message="another")
    shown = lines(outcome(cause, secondary_failures=(*same, other), world_size=4))
    assert expected in shown
    assert len([line for line in shown if "another" in line]) == 1


def test_lost_hosts_among_the_victims_are_called_hosts() -> None:
    lost = [failure(kind=FailureKind.HOST_LOST, host=name, rank=None, message="the connection closed") for name in "ab"]
    assert "2 other hosts were lost: the connection closed" in lines(outcome(failure(), secondary_failures=tuple(lost)))


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        (gloo("pair.cc:554", 41952), "connection closed by peer"),
        ("[enforce fail at /a/b/tcp.cc:12] . Read timeout [::1]:2", "read timeout"),
        (
            "The client socket has timed out after 60000ms while trying to connect to (127.0.0.1, 29500).",
            "the client socket has timed out after 60000ms while trying to connect",
        ),
        (
            "[/p/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:4711: Connection reset by peer. "
            "This is typically caused by a remote worker hanging or bugs in the application.",
            "read error: Connection reset by peer",
        ),
        ("[rank3]: Broken pipe", "broken pipe"),
        ("Rank 3 was lost, pid 812 on alpha", "rank ... was lost, pid ... on alpha"),
        ("CUDA out of memory. Tried to allocate 2 GiB", "CUDA out of memory. Tried to allocate 2 GiB"),
        ("ValueError: no", "ValueError: no"),
        ("", ""),
        ("\n\nsecond\nthird", "second"),
        ("x" * 500, "x" * 120 + "..."),
    ],
)
def test_plain_message_keeps_what_is_alike(message: str, plain: str) -> None:
    assert plain_message(message) == plain


# ---- where they stood ----


def test_stall_shows_where_every_group_stands_and_who_is_odd() -> None:
    stalled = failure(
        kind=FailureKind.STALLED, host="", rank=None, message="no rank has made progress for 300 s", where="", inside=""
    )
    shown = lines(
        outcome(stalled, evidence=STOOD, stopped=4), evidence_file=FOLDER / "attempt_0/evidence-1.txt", stderr=["words"]
    )
    assert shown[0] == "no rank has made progress for 300 s"
    at = shown.index("where each rank is:")
    assert any("all_reduce" in line for line in shown[at + 1 : at + 3])
    assert any("look at rank 2 first" in line for line in shown[at + 1 : at + 4])
    assert shown[-1] == "see it: less runs/r1/attempt_0/evidence-1.txt"


def test_a_rank_that_the_failed_ones_waited_for_is_named_first() -> None:
    late = failure(rank=0, error_type="RuntimeError", message="Timed out waiting 5000ms for recv", inside="all_reduce")
    shown = lines(outcome(late, missing=[MissingRank(2, "sim2", "/home/me/train.py:7 in load", "all_reduce")]))
    assert shown[:3] == [
        "rank 2 on sim2 did not come to all_reduce: it was at /home/me/train.py:7 in load",
        "rank 0 on sim1 (pid 812) raised an exception after 1.1 s",
        "RuntimeError: Timed out waiting 5000ms for recv",
    ]


def test_the_cause_does_not_stand_among_the_others() -> None:
    shown = lines(outcome(failure(rank=2), evidence=STOOD))
    at = shown.index("where the other ranks were:")
    assert shown[at + 1].startswith("ranks 0-1,3 are at /home/me/train.py")
    assert not any("rank 2 is" in line or "look at rank" in line for line in shown)


def test_at_most_five_places_are_shown() -> None:
    many = [evidence(rank, "forward", line=100 + rank) for rank in range(9)]
    shown = lines(outcome(failure(rank=9), evidence=many))
    at = shown.index("where the other ranks were:")
    assert shown[at + 6] == "and 4 ranks in 4 other places"
    shown = lines(outcome(failure(rank=9), evidence=many[:6]))
    assert "and 1 rank in 1 other place" in shown


# ---- what is left ----


def test_scan_names_what_could_not_be_killed() -> None:
    end = outcome(failure(), left=(("beta", ("pid 9 (python, state D)",)),), swept=2)
    shown = lines(end)
    assert "1 process left on 2 hosts (2 processes outlived the workers and were ended)" in shown
    assert "still there on beta: pid 9 (python, state D)" in shown


def test_hosts_that_were_not_looked_at_are_not_counted_as_clean() -> None:
    shown = lines(outcome(failure(), unchecked=(("beta", "was not reached within 3 s"),)))
    assert "0 processes left on 1 host; 1 host could not be checked" in shown
    assert "host beta could not be checked: was not reached within 3 s" in shown
    blind = lines(outcome(failure(), hosts=1, unchecked=(("beta", "gone"),)))
    assert "1 host could not be checked" in blind
    assert not any("0 processes" in line for line in blind)


# ---- the next step ----


def test_next_step_is_a_command_that_a_shell_understands() -> None:
    folder = Path("my runs/r1")
    shown = lines(outcome(failure(attempt=2), attempts=3), folder=folder, stderr=["x"], evidence_file=Path("e.txt"))
    assert shown[-2] == "stacks of all ranks: e.txt"
    assert shlex.split(shown[-1].removeprefix("see it: ")) == ["less", "my runs/r1/attempt_2/1/stderr.log"]
    silent = lines(outcome(failure()), stdout=["only here"])
    assert "the last lines of its stdout:" in silent
    assert silent[-1] == "see it: less runs/r1/attempt_0/1/stdout.log"


def test_an_empty_file_is_not_offered() -> None:
    stacks = Path("runs/r1/attempt_0/evidence-1.txt")
    assert lines(outcome(failure()), evidence_file=stacks)[-3:] == [
        "it wrote no output", f"stacks of all ranks: {stacks}", f"see it: less {stacks}"
    ]  # fmt: skip
    assert lines(outcome(failure()))[-1] == "it wrote no output"


@pytest.mark.parametrize(
    ("changes", "is_shown"),
    [
        ({"kind": FailureKind.RAISED, "message": "bad batch"}, True),
        ({"kind": FailureKind.RAISED, "message": "bad batch", "failed_ranks": (1,)}, False),
        ({"kind": FailureKind.RAISED, "message": "Connection closed by peer"}, False),
        ({"kind": FailureKind.EXITED, "status": 3}, False),
        ({"kind": FailureKind.HOST_LOST, "rank": None}, False),
    ],
)
def test_the_last_line_replays_what_the_script_raised(changes: dict[str, Any], is_shown: bool) -> None:
    end = outcome(failure(**changes))
    shown = report(end, folder=FOLDER, tail=lambda *_: ["text"], replays=True).splitlines()
    assert (shown[-1] == f"  replay it: dtrain replay {end.run_id}") == is_shown
    assert shown[-1 - is_shown].startswith("  see it: ")
    assert "replay it" not in report(end, folder=FOLDER, tail=lambda *_: ["text"])


def test_without_log_files_no_command_is_offered() -> None:
    shown = lines(outcome(failure()), folder=None)
    assert shown[-1] == "not all output was kept: the log files could not be written"


def test_lost_host_points_to_the_output_of_all() -> None:
    end = outcome(failure(kind=FailureKind.HOST_LOST, rank=None, message="gone"))
    assert lines(end)[-2:] == [
        "the output of all workers: runs/r1/attempt_0",
        "see it: tail runs/r1/attempt_0/*/stderr.log",
    ]


def test_everything_at_once_is_one_screen() -> None:
    others = tuple(failure(kind=FailureKind.EXITED, status=code, rank=code) for code in range(1, 30))
    end = outcome(
        failure(message="\n".join("abcdefghij"), where="t.py:1 in f", attempt=3),
        secondary_failures=others,
        evidence=[evidence(rank, "forward", line=rank) for rank in range(30)],
        stopped=5,
        attempts=4,
        no_restart_reason="all 3 restarts (--max-restarts) were used",
        left=(("a", tuple(f"pid {n}" for n in range(20))), ("b", ("pid 1",))),
        unchecked=tuple((f"host{n}", "gone") for n in range(30)),
        hosts=40,
    )
    shown = lines(end, stderr=[f"line {n}" for n in range(50)], evidence_file=Path("e.txt"))
    assert len(shown) <= SCREEN_LINES + 6
    assert "and 15 more processes" in shown
    assert "and 26 more hosts" in shown
    tail = [line for line in shown if line.startswith("| ")]
    assert tail[-1] == "| line 49"
    few = lines(outcome(failure()), stderr=[f"line {n}" for n in range(50)])
    assert len([line for line in few if line.startswith("| ")]) == 12


# ---- runs without a failure ----


def test_good_end_is_one_line() -> None:
    end = outcome(None, exit_code=0, duration_s=12.34, attempts=2)
    assert lines(end) == [
        "all 4 workers finished successfully after 12.3 s, 1 restart; 0 processes left on 2 hosts; output in runs/r1"
    ]
    alone = dataclasses.replace(end, world_size=1, hosts=1, attempts=1)
    assert lines(alone) == [
        "the worker finished successfully after 12.3 s; 0 processes left on 1 host; output in runs/r1"
    ]


def test_good_end_still_names_what_is_left() -> None:
    end = outcome(None, exit_code=0, left=(("beta", ("pid 9 (python, state D)",)),))
    assert lines(end)[1:] == ["still there on beta: pid 9 (python, state D)"]


def test_stop_by_a_signal() -> None:
    end = outcome(None, exit_code=130, signum=signal.SIGINT, stopped=4, duration_s=3.21)
    assert lines(end) == [
        "stopped by SIGINT after 3.2 s; 4 workers stopped; output in runs/r1",
        "0 processes left on 2 hosts",
    ]


def test_a_run_that_makes_room_says_what_the_signal_did() -> None:
    end = outcome(None, preempted=True, exit_code=75)
    first = "ended after 1.5 s to make room (USR1, --requeue); exit code 75; output in runs/r1"
    assert lines(end) == [first, "0 processes left on 2 hosts"]
    killed = dataclasses.replace(end, cause=failure(kind=FailureKind.KILLED, status=-signal.SIGUSR1))
    assert lines(killed) == [
        first,
        "USR1 killed its workers, which do not handle it: only what they saved before remains",
        "see ddp.Checkpoint.due, or end with code 75 once it is saved",
        "0 processes left on 2 hosts",
    ]


def test_run_that_never_started_says_why_and_counts_no_hosts() -> None:
    error = StartError({"beta": "there is no Python at /opt/py"}, total=2)
    end = outcome(None, error=error, hosts=0, attempts=0)
    assert lines(end) == [
        "1 of 2 hosts cannot start; no worker was started.",
        "beta: there is no Python at /opt/py",
    ]
    found = dataclasses.replace(end, left=(("beta", ("pid 9 (python, state D)",)),))
    assert lines(found)[2:] == ["1 process left on 1 host", "still there on beta: pid 9 (python, state D)"]


def test_each_fault_on_purpose_has_a_line_with_its_cost() -> None:
    faults = (
        FaultCost("kill", "rank 1 on sim0", 30.0, detection_s=0.051, recovery_s=0.44, steps_lost=0),
        FaultCost("stop", "rank 2 on sim1", 60.0, detection_s=1.9),
    )
    shown = lines(outcome(None, exit_code=0, faults=faults), folder=None)
    assert shown[1] == "--chaos made 2 faults:"
    assert [line.split("  ")[0] for line in shown[-2:]] == ["kill rank 1 on sim0", "stop rank 2 on sim1"]
    assert shown[-2].split()[5:] == ["30.00", "s", "0.05", "s", "0.44", "s", "0"]
    assert shown[-1].split()[5:] == ["60.00", "s", "1.90", "s", "-", "-"]
    assert (
        lines(outcome(None, exit_code=0, faults=25 * faults[:1]))[-1]
        == "and 5 more faults; --error-json has all of them"
    )
