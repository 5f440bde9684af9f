"""The program that saves what a worker kept: nothing starts it, or ends it twice, once it is to be gone."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.agent.kept_copy import KeptCopy

WORKER = 4242  # its pid; no process


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KeptCopy]:
    """Return the memory of a worker that has left a note."""
    copy = KeptCopy()
    copy.open(str(tmp_path))
    (tmp_path / "copy.json").write_text(json.dumps({"pid": WORKER, "argv": ["/bin/sleep", "100"]}))
    yield copy
    copy.kill()
    if copy.pid is not None:
        assert os.waitstatus_to_exitcode(os.waitpid(copy.pid, 0)[1]) == -signal.SIGKILL


def test_the_program_is_started_for_the_worker_of_the_note(kept: KeptCopy) -> None:
    kept.worker_ended(WORKER + 1)
    before = kept.pid
    kept.worker_ended(WORKER)
    assert (before, kept.pid is None) == (None, False)
    assert not kept.finished(0.0)


def test_no_program_is_started_once_all_is_to_be_killed(kept: KeptCopy) -> None:
    kept.kill()
    kept.worker_ended(WORKER)
    assert kept.pid is None
    assert kept.finished(0.0)


def test_a_program_that_takes_too_long_is_killed_once(kept: KeptCopy, capsys: pytest.CaptureFixture[str]) -> None:
    kept.worker_ended(WORKER)
    assert [kept.finished(now) for now in (0.0, 9.0, 10.0, 11.0, 99.0)] == [False] * 5
    assert kept.pause_s(99.0) == float("inf"), "until it is reaped"
    assert capsys.readouterr().err.count("was not written within 10 s") == 1
