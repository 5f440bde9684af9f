"""What is shown and said while files are sent."""

import pytest

from launcher.transport.sync_progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("launcher.transport.sync_progress.time.monotonic", lambda: now[0])
    return now


def test_one_line_is_for_all_hosts_and_the_job_learns_how_long_it_took(clock: list[float]) -> None:
    progress, shown, spent = Progress(), list[str](), list[float]()
    progress.tell(say=shown.append, show=shown.append, wait=spent.append)
    progress.starts("alpha", 40 << 20)
    progress.starts("beta", 60 << 20)
    clock[0] += 1.5
    progress.sent("alpha", 10 << 20)
    progress.sent("beta", 10 << 20)  # too soon to be shown
    clock[0] += 0.5
    progress.sent("beta", 10 << 20)
    progress.ends("alpha")
    clock[0] += 0.5
    progress.sent("beta", 10 << 20)
    assert shown == [
        "sending files to 2 hosts: 10 of 100 MB",
        "sending files to 2 hosts: 30 of 100 MB",
        "sending files to beta: 30 of 60 MB",
    ]
    assert spent == [1.5, 0.5, 0.5]


def test_notes_wait_until_they_can_be_said() -> None:
    progress, said = Progress(), list[str]()
    progress.notes(["first"])
    assert said == []
    progress.tell(say=said.append, show=said.append, wait=lambda _: None)
    progress.notes(["second"])
    assert said == ["first", "second"]
