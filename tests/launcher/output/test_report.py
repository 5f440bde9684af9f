"""The last screen says what failed first and why, counts what followed, and ends with the next step."""

import dataclasses
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from testbed.outcomes import STOOD, evidence, failure, outcome
from testbed.processes import run_dtrain

from launcher.hosts.folding import StartError
from launcher.job.chaos import FaultCost
from launcher.job.ending import MissingRank, Outcome
from launcher.job.failures.failure import FailureKind, group_secondary_failures, plain_message
from launcher.output.report import SCREEN_LINES, report

FOLDER = Path("runs/r1")
RAISED = {"error_type": "ValueError", "message": "bad batch", "where": "/home/me/train.py:7 in load"}
EXITED = {
    "kind": FailureKind.EXITED, "status": 3, "error_type": "", "message": "", "where": "/home/me/train.py:7 in main",
}  # fmt: skip
KILLED = {"kind": FailureKind.KILLED, "status": -9}
LOST_HOST = {"kind": FailureKind.HOST_LOST, "rank": None}
LEFT = (("beta", ("pid 9 (python, state D)",)),)
NOT_STARTED = outcome(None, error=StartError({"beta": "there is no Python at /opt/py"}, total=2), hosts=0, attempts=0)
ROOM = outcome(None, preempted=True, exit_code=75)
CRASH = [
    "Fatal Python error: Segmentation fault",
    '  File "/home/me/train.py", line 3 in step',
    *(f'  File "/opt/x/launcher/agent/workers/{name}.py", line 9 in f' for name in ("bootstrap", "fork_server")),
    "Extension modules: numpy._core (total: 1)",
]


def shown(
    end: Outcome, *, stderr: list[str] | None = None, stdout: list[str] | None = None, folder: Path | None = FOLDER,
    evidence_file: Path | None = None, replays: bool = False,
) -> str:  # fmt: skip
    said = {2: stderr or [], 1: stdout or []}
    return report(end, folder=folder, tail=lambda _, at: said[at], evidence_file=evidence_file, replays=replays)


def lines(end: Outcome, **more: Any) -> list[str]:
    return [line.strip() for line in shown(end, **more).splitlines()]


def gloo(source: str, port: int) -> str:
    return f"[/pytorch/third_party/gloo/gloo/transport/tcp/{source}] Connection closed by peer [127.0.0.1]:{port}"


def exited(ranks: range) -> tuple[Any, ...]:
    return tuple(failure(kind=FailureKind.EXITED, status=code, rank=code, at=5.0 + code) for code in ranks)


def many(count: int) -> Outcome:
    return outcome(failure(rank=9), evidence=[evidence(rank, "forward", line=100 + rank) for rank in range(count)])


def same(count: int) -> Outcome:
    cause = failure(**RAISED)
    others = [dataclasses.replace(cause, rank=rank, pid=rank) for rank in range(2, 2 + count)]
    other = dataclasses.replace(cause, rank=9, pid=9, message="another")
    return outcome(cause, secondary_failures=(*others, other), world_size=4)


PEER = {"error_type": "RuntimeError", "message": "connection closed by peer", "inside": "all_reduce"}
RESTARTED: dict[str, Any] = {"attempts": 4, "stopped": 3, "no_restart_reason": "all 3 restarts were used"}
REPORTS: dict[str, tuple[Outcome, dict[str, Any]]] = {
    "exception": (outcome(failure(**RAISED)), {"stderr": ["Traceback", "ValueError: bad batch"]}),
    "exception below the user's line": (outcome(failure(**RAISED, inside="all_reduce")), {}),
    "exception in the user's function": (outcome(failure(**RAISED, inside="load")), {}),
    "sys.exit": (outcome(failure(**EXITED, inside="main")), {"stderr": ["no data"]}),
    "sys.exit inside a package": (outcome(failure(**EXITED, inside="error")), {}),
    "no memory": (outcome(failure(**KILLED, killer="probably the out-of-memory killer: ...")), {}),
    "killed": (outcome(failure(**KILLED)), {}),
    "crash": (outcome(failure(kind=FailureKind.KILLED, status=-11, message="")), {"stderr": CRASH}),
    "long message": (outcome(failure(message="\n".join(f"line {n}" for n in range(30)))), {}),
    "others may have waited": (outcome(failure(message=gloo("p", 7), inside="barrier"), finished_ranks=(2,)), {}),
    "no restart left": (outcome(failure(attempt=3), **RESTARTED), {}),
    "victims of one loss": (
        outcome(
            failure(),
            secondary_failures=(
                *(failure(rank=n, at=2, inside="all_reduce", message=gloo("pair.cc:554", 41952 + n)) for n in range(6)),
                failure(kind=FailureKind.KILLED, status=-6, rank=7, at=2.5),
            ),
        ),
        {},
    ),
    "ends in other ways": (outcome(failure(), secondary_failures=exited(range(1, 7))), {}),
    "one killed meanwhile": (
        outcome(failure(), secondary_failures=(failure(rank=2, **PEER), failure(rank=3, status=-9, **PEER))), {},
    ),
    "all raised the same": (same(3), {}),
    "some raised the same": (same(2), {}),
    "other lost hosts": (
        outcome(failure(), secondary_failures=tuple(failure(**LOST_HOST, host=name, message="gone") for name in "ab")),
        {},
    ),
    "stall": (
        outcome(failure(kind=FailureKind.STALLED, host="", rank=None, message="stalled"), evidence=STOOD, stopped=4),
        {"evidence_file": FOLDER / "attempt_0/evidence-1.txt", "stderr": ["words"]},
    ),
    "stall with a rank that fails when it is stopped": (
        outcome(
            failure(kind=FailureKind.STALLED, host="", rank=None, message="stalled"),
            evidence=STOOD, stopped=3, secondary_failures=(failure(rank=2, **PEER),),
        ),
        {},
    ),
    "a rank that did not come": (
        outcome(
            failure(rank=0, error_type="RuntimeError", message="Timed out waiting for recv", inside="all_reduce"),
            missing=[MissingRank(2, "sim2", "/home/me/train.py:7 in load", "all_reduce")],
        ),
        {},
    ),
    "where the others were": (outcome(failure(rank=2), evidence=STOOD), {}),
    "nine places": (many(9), {}),
    "six places": (many(6), {}),
    "left and swept": (outcome(failure(), left=LEFT, swept=2), {}),
    "unchecked host": (outcome(failure(), unchecked=(("beta", "was not reached within 3 s"),)), {}),
    "all hosts unchecked": (outcome(failure(), hosts=1, unchecked=(("beta", "gone"),)), {}),
    "stdout alone": (outcome(failure()), {"stdout": ["only here"]}),
    "stacks alone": (outcome(failure()), {"evidence_file": Path("runs/r1/attempt_0/evidence-1.txt")}),
    "no log files": (outcome(failure()), {"folder": None}),
    "lost host": (outcome(failure(**LOST_HOST, message="gone")), {}),
    "good end": (outcome(None, exit_code=0, duration_s=12.34, attempts=2), {}),
    "good end of one worker": (outcome(None, exit_code=0, duration_s=12.34, world_size=1, hosts=1), {}),
    "good end with something left": (outcome(None, exit_code=0, left=LEFT), {}),
    "signal": (outcome(None, exit_code=130, signum=signal.SIGINT, stopped=4, duration_s=3.21), {}),
    "room": (ROOM, {}),
    "room with killed workers": (
        dataclasses.replace(ROOM, cause=failure(kind=FailureKind.KILLED, status=-signal.SIGUSR1)), {},
    ),
    "not started": (NOT_STARTED, {}),
    "not started with something left": (dataclasses.replace(NOT_STARTED, left=LEFT), {}),
    "faults on purpose": (
        outcome(
            None,
            exit_code=0,
            faults=(
                FaultCost("kill", "rank 1 on sim0", 30.0, detection_s=0.051, recovery_s=0.44, steps_lost=0),
                FaultCost("stop", "rank 2 on sim1", 60.0, detection_s=1.9),
            ),
        ),
        {"folder": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPORTS)
def test_report(name: str, snapshot: SnapshotAssertion) -> None:
    end, more = REPORTS[name]
    assert shown(end, **more) == snapshot


@pytest.mark.parametrize(("variable", "is_coloured"), [("FORCE_COLOR", True), ("NO_COLOR", False)])
def test_the_first_line_of_a_failure_may_be_coloured(variable: str, is_coloured: bool, tmp_path: Path) -> None:
    result = run_dtrain("run", "--no-python", "false", cwd=tmp_path, env={variable: "1"})
    assert result.returncode == 1, result
    assert ("dtrain: \x1b[1;31m" in result.stderr) == is_coloured, result


def test_a_package_that_one_host_lacks_can_be_sent_there() -> None:
    cause = failure(error_type="ModuleNotFoundError", message="No module named 'helper'")
    said = "if it is only missing on sim1: --sync env sends your packages, --sync code your own modules"
    assert [said in lines(outcome(cause, hosts=hosts)) for hosts in (1, 2)] == [False, True]


@pytest.mark.parametrize(
    ("message", "is_named"),
    [
        ("Torch not compiled with CUDA enabled", True),
        ("module 'torch._C' has no attribute '_cuda_setDevice'", True),
        ("Distributed package doesn't have NCCL built in", True),
        ("CUDA out of memory", False),
    ],
)
def test_a_torch_without_cuda_is_named(message: str, is_named: bool) -> None:
    said = "the torch on sim1 is built without CUDA; dtrain check shows torch and GPUs of each host"
    assert (said in lines(outcome(failure(message=message)))) == is_named


@pytest.mark.parametrize(
    ("error_type", "message", "is_said"),
    [("BdbQuit", "", True), ("EOFError", "EOF when reading a line", True), ("EOFError", "Ran out of input", False)],
)
def test_a_rank_that_asked_without_input_is_named(error_type: str, message: str, is_said: bool) -> None:
    end = outcome(failure(error_type=error_type, message=message))
    assert ("no one can answer rank 1: its standard input is empty" in lines(end)) == is_said
    assert not any("no one can answer" in line for line in lines(dataclasses.replace(end, stdin_rank=1)))


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


def test_victims_are_distinguished_by_what_they_were_in() -> None:
    closed = gloo("pair.cc:554", 41952)
    others = [failure(rank=2, inside="barrier", message=closed), failure(rank=3, inside="all_reduce", message=closed)]
    assert [group.ranks for group in group_secondary_failures(others)] == [(2,), (3,)]
    nameless = failure(rank=4, error_type="DistBackendError", message=closed)
    assert group_secondary_failures([nameless])[0].how == "failed with DistBackendError: connection closed by peer"


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


def test_next_step_is_a_command_that_a_shell_understands() -> None:
    folder = Path("my runs/r1")
    shown = lines(outcome(failure(attempt=2), attempts=3), folder=folder, stderr=["x"], evidence_file=Path("e.txt"))
    assert shown[-2] == "stacks of all ranks: e.txt"
    assert shlex.split(shown[-1].removeprefix("see it: ")) == ["less", "my runs/r1/attempt_2/1/stderr.log"]
    silent = lines(outcome(failure()), stdout=["only here"])
    assert "the last lines of its stdout:" in silent
    assert silent[-1] == "see it: less runs/r1/attempt_0/1/stdout.log"


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
