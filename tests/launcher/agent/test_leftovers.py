"""What an agent leaves for the next one: whatever it is made to say, nothing of others' is touched."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.processes import run_program, started, wait_until

from launcher.agent.cleanup import run_tag
from launcher.agent.cleanup.leftovers import AgentIdentity, LeftoverSweep, find_killed_runs
from launcher.agent.cleanup.run_tag import IDENTITY, RunTag
from launcher.errors import ProtocolError
from launcher.machine import processes
from launcher.machine.cgroup import Cgroup

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def _clean(*identities: str) -> LeftoverSweep:
    leftovers = LeftoverSweep(identities)
    wait_until(leftovers.step, "it is done")
    return leftovers


def test_an_identity_is_read_as_it_was_written() -> None:
    identity = AgentIdentity.ours(RunTag("0" * 32, Cgroup("/sys/fs/cgroup/a\u00e4 \udcff")))
    assert AgentIdentity.read(str(identity)) == identity
    assert identity.agent[0] == os.getpid()
    assert identity.guard[0] == os.getppid()


@pytest.mark.parametrize("field", ["boot", "run_tag", "agent", "guard", "cgroup"])
@given(value=JSON)
def test_whatever_an_identity_says_is_one_or_an_error(field: str, value: object) -> None:
    import json

    text = str(AgentIdentity.ours(RunTag("0" * 32, None)))
    changed = json.dumps({**json.loads(text), field: value})
    try:
        identity = AgentIdentity.read(changed)
    except ProtocolError:
        return
    assert all(isinstance(number, int) for number in identity.agent + identity.guard)


@pytest.mark.parametrize("text", ["", "{", "null", "7", "[]", "{}", "[" * 100_000, "\udcff"])
def test_junk_is_ignored(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert _clean(text).left == []
    assert "not the identity of an agent" in capfd.readouterr().err


def test_only_the_very_process_that_an_identity_names_is_ended() -> None:
    with started("/bin/sleep", "60") as other, started("/bin/sleep", "60") as lost:
        ours = AgentIdentity.ours(RunTag("0" * 32, None))
        found = [processes.find(process.pid) for process in (other, lost)]
        assert found[0] is not None
        assert found[1] is not None
        reused = (other.pid, found[0].start - 1)
        _clean(str(AgentIdentity(ours.boot, ours.run_tag, reused, reused, "")))
        _clean(str(AgentIdentity("another boot", ours.run_tag, (lost.pid, found[1].start), reused, "")))
        _clean(str(AgentIdentity(ours.boot, "../" + "0" * 29, (lost.pid, found[1].start), reused, "")))
        assert lost.poll() is None
        _clean(str(AgentIdentity(ours.boot, ours.run_tag, (lost.pid, found[1].start), reused, "")))
        assert lost.wait(60) == -signal.SIGKILL
        assert other.poll() is None


def test_where_a_full_disk_has_room_for_a_folder_only_the_next_one_is_taken(tmp_path: Path) -> None:
    made = "from launcher.agent.cleanup.run_tag import make_folder as m; print(m('4' * 32, 'x'))"
    full = 'mount -t tmpfs -o size=4k tmpfs "$TMPDIR" && echo > "$TMPDIR/all" && exec "$@"'
    container = ["unshare", "--map-root-user", "--mount", "sh", "-c", full, "sh"]
    if run_program(*container, "true", env={"TMPDIR": str(tmp_path)}).returncode not in (0, 127):
        pytest.skip("an ordinary user may not make namespaces everywhere")
    result = run_program(*container, sys.executable, "-c", made, env={"TMPDIR": str(tmp_path)})
    folder = Path("/tmp/dtrain-4444444444444444")
    assert result.stdout == f"{folder}\n", result
    assert (folder / IDENTITY).read_text() == "x"
    run_tag.remove_folder("4" * 32)
    assert not folder.exists()


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentIdentity:
    """Return the identity of an agent that was killed with its guard, whose folder is in `tmp_path`."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ours = AgentIdentity.ours(RunTag("3" * 32, None))
    identity = replace(ours, agent=(os.getpid(), 1), guard=(os.getppid(), 1))
    run_tag.make_folder(identity.run_tag, str(identity))
    assert str(identity) in find_killed_runs()
    return identity


@pytest.mark.parametrize("living", ["agent", "guard"])
def test_a_run_lives_as_long_as_its_agent_or_guard(tmp_path: Path, killed: AgentIdentity, living: str) -> None:
    here = AgentIdentity.ours(RunTag(killed.run_tag, None)).agent
    text = str(replace(killed, agent=here) if living == "agent" else replace(killed, guard=here))
    (tmp_path / f"dtrain-{'3' * 16}" / IDENTITY).write_text(text)
    assert text not in find_killed_runs()


@pytest.mark.parametrize(
    "change", ["another machine's", "of others", "another name", "link", "junk", "no identity", "a folder", "wrong tag"]
)
def test_a_folder_that_is_not_one_of_ours_is_no_killed_run(tmp_path: Path, killed: AgentIdentity, change: str) -> None:
    folder = tmp_path / f"dtrain-{'3' * 16}"
    identity = folder / IDENTITY
    match change:
        case "another machine's":
            identity.write_text(str(replace(killed, boot="another")))
        case "of others":
            folder.chmod(0o770)
        case "another name":
            folder.rename(tmp_path / ("dtrain-" + "0" * 16))
        case "link":
            identity.rename(tmp_path / "elsewhere")
            identity.symlink_to(tmp_path / "elsewhere")
        case "junk":
            identity.write_bytes(b"\xff{" + b"[" * 100_000)
        case "no identity":
            identity.unlink()
        case "a folder":
            identity.unlink()
            identity.mkdir()
        case "wrong tag":
            identity.write_text(str(replace(killed, run_tag="3" * 16 + "?" * 16)))
    assert not [text for text in find_killed_runs() if AgentIdentity.read(text).agent == killed.agent]


def test_a_nested_run_never_ends_itself_or_the_outer_run() -> None:
    ours = AgentIdentity.ours(RunTag("0" * 32, None))  # this process, and its parent
    assert _clean(str(ours)).left == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/sys/fs/cgroup", "dtrain-" + "0" * 16),
        ("/sys/fs/cgroup/other", "other"),
        ("{folder}/dtrain-" + "0" * 16, "dtrain-" + "0" * 16),  # no control group
        ("/sys/fs/cgroup/../../../{folder}/dtrain-" + "0" * 16, "dtrain-" + "0" * 16),
        ("{folder}/link/dtrain-" + "0" * 16, "dtrain-" + "0" * 16),
    ],
)
def test_only_a_control_group_of_ours_is_taken_for_one(tmp_path: Path, path: str, name: str) -> None:
    (tmp_path / ("dtrain-" + "0" * 16)).mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    assert Cgroup.named(path.format(folder=tmp_path), name) is None


def test_a_group_that_cannot_be_had_does_nothing(tmp_path: Path) -> None:
    group = Cgroup(str(tmp_path / "nowhere" / "dtrain-0"))
    group.make()
    group.add()
    group.kill()
    group.remove()
    assert group.pids() == set()
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_a_link_or_another_s_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    link = tmp_path / ("dtrain-" + "1" * 16)
    link.symlink_to(kept)
    run_tag.remove_folder("1" * 32)
    assert (kept / "file").exists()
    assert link.is_symlink()
    folder = Path(run_tag.make_folder("2" * 32, ""))
    (folder / "1-0.json").touch()
    (folder / "link").symlink_to(kept)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    run_tag.remove_folder("2" * 32)
    assert folder.is_dir()
    monkeypatch.undo()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run_tag.remove_folder("2" * 32)
    assert not folder.exists()
    assert (kept / "file").exists()


def test_only_the_files_of_one_attempt_are_cleared(tmp_path: Path) -> None:
    for name in ("1-0.json", "1-12.json.facts", "11-0.json", "12-1.json.stack"):
        (tmp_path / name).touch()
    run_tag.clear_folder(str(tmp_path), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["11-0.json", "12-1.json.stack"]
