"""Runs a script of tests/everyday/scripts in one of four ways, and looks at the screen as its user does."""

import re
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from testbed import REPOSITORY
from testbed.processes import Result, run_dtrain
from testbed.require import require

SCRIPTS = REPOSITORY / "tests/everyday/scripts"
WAYS = ["normal", "kill", "exception", "hang"]
LIMIT_S = 240.0
# A hang is a silence ten times longer than any before: on a busy machine that may be a minute.
HANG = ["--hang", "5s"]

_LEFT = r"0 processes left on 1 host(?: \(\d+ process(?:es)? outlived the workers and (?:was|were) ended\))?"
_NOT_CALLED = r"rank 1 has not called \w+ \d+ .*; rank 0 has"
# What may follow on the line with the cause, as launcher/README.md shows it.
_DETAILS = re.compile(
    r" +(?:\w*Error: .*"
    r"|Original Traceback .*|  File .*|\(\d+ more lines\)"  # of a DataLoader's worker
    r"|at \S+:\d+ in \S+.*"
    r"|the last lines of its std(?:err|out):|\|.*"
    r"|where (?:the other ranks were|each rank is):|ranks? [\d,-]+ (?:is|are) at .*"
    r"|\d of 2 ranks waits? for others: look at rank 1 first"
    rf"|{_NOT_CALLED}"
    r"|1 other failed in .*|[12] workers? stopped by dtrain"
    rf"|{_LEFT}"
    r"|its whole output: runs/.*|the output of all workers: runs/.*|it wrote no output"
    r"|stacks of all ranks: runs/.*|see it: less runs/.*)"
)


@dataclass(frozen=True)
class Script:
    """A script. `restarts`: what starts again after a failure, if anything."""

    name: str
    needs: tuple[str, ...] = ()
    restarts: str = ""  # "worker" or "all"

    @property
    def path(self) -> Path:
        return SCRIPTS / f"{self.name}.py"

    def line_with(self, text: str) -> str:
        """Return where the one line with this text is, as `file:line`."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        (number,) = (number for number, line in enumerate(lines, 1) if text in line)
        return f"{self.path}:{number}"


_SLEEP = Script("trouble").line_with("time.sleep(")


def check(script: Script, way: str, folder: Path) -> None:
    """Run it on two ranks and assert what its user sees. Processes that are left are found by the test's fixture."""
    for package in ("tqdm", *script.needs):
        require(find_spec(package), package, "scripts/test --everyday")
    restarts = script.restarts if way != "normal" else ""
    options = ["--nproc-per-node", "2", *(["--max-restarts", "1"] if restarts else [])]
    if way == "hang":
        options += HANG
    environment = {
        "TROUBLE": "" if way == "normal" else way,
        "HF_HOME": str(folder / "hugging_face"),
        "MPLCONFIGDIR": str(folder / "matplotlib"),
    }
    # Of the workers' own: what multiprocessing and wandb have there stays when a signal ends them. Sockets, too, so
    # its path is short.
    with tempfile.TemporaryDirectory(dir="/tmp") as temp:
        options += ["-x", f"TMPDIR={temp}"]
        result = run_dtrain("run", *options, script.path, cwd=folder, env=environment, timeout=LIMIT_S)
    said = _said(result)
    if way == "hang" and re.fullmatch(_NOT_CALLED, said[0]):
        del said[0]
    if way == "hang" and re.fullmatch(rf"rank 1 on .* hangs: .* at {_SLEEP} in .*; treated as failed", said[0]):
        del said[0]
    assert (folder / "trouble_came").exists() is (way != "normal"), result
    has_trained = re.search(r"^\[\S+:0\].*\bfinished: \d+ ", result.stdout, re.MULTILINE) is not None
    happened = _happened(way)
    if way == "normal" or restarts:
        assert (result.returncode, has_trained) == (0, True), result
        count = ", 1 restart" if restarts else ""
        expected = {
            "": [],
            "worker": [rf"{happened}.*; only this worker restarts \(restart 1 of 1\)"],
            "all": [rf"attempt 0 failed: {happened}.*", "attempt 1 begins on 1 host"],
        }[restarts]
        expected += [rf"all 2 workers finished successfully after [\d.]+ s{count}; {_LEFT}; output in runs/\S+"]
        assert len(said) == len(expected), result
        assert all(map(re.fullmatch, expected, said)), result
        assert restarts or "Traceback" not in result.stdout + result.stderr, result
        return
    assert (result.returncode, has_trained) == (128 + 9 if way == "kill" else 1, False), result
    assert re.match(happened, said[0]), result
    wrong = [line for line in said[1:] if not _DETAILS.fullmatch(line)]
    assert not wrong, (wrong, result)
    report = "\n".join(said)
    assert re.search(rf"^  {_LEFT}$", report, re.MULTILINE), result
    if way == "exception":
        place = script.line_with("raise ValueError")
        assert f"\n  at {place} in " in report, result
    if way == "hang":
        assert f"{_SLEEP} in " in report, result
        assert "while 1 other rank waits for it" in said[0] or "look at rank 1 first" in report, result


def _happened(way: str) -> str:
    """Return a pattern of the words by which the cause begins."""
    what = {
        "kill": "was killed by SIGKILL",
        "exception": r"raised (?:an exception|\w+Error) after",
        "hang": "hung after",
    }
    return rf"rank 1 on \S+(?: \(pid \d+\))? {what.get(way, '')}"


def _said(result: Result) -> list[str]:
    """Return what dtrain itself has said. All other lines must be the workers'.

    On a busy machine a run takes more than a minute, and then there is a line on goodput; or its end takes more than a
    second, and then there is one on what is waited for.
    """
    assert not result.timed_out, result
    screen = result.stdout + result.stderr
    assert "leaked" not in screen, result
    assert f'File "{REPOSITORY}/launcher/' not in screen, result
    lines = [line for line in re.split(r"\r?\n", screen) if line]
    wrong = [line for line in lines if not re.match(r"dtrain: |\[\S+:[01]\]", line)]
    assert not wrong, (wrong, result)
    return [line.removeprefix("dtrain: ") for line in lines if re.match("dtrain: (?!goodput |waiting )", line)]
