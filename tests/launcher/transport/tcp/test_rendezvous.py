"""The shared token is found, and believed only where no one else can read it; nodes find node 0 through a file."""

import json
import os
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.transport.tcp import rendezvous
from launcher.transport.tcp.rendezvous import (
    Endpoint,
    find_token,
    local_folder,
    new_token,
    publish,
    read_endpoint,
)

pytestmark = pytest.mark.ordinary_user

SECRET = "canary-0123456789-canary"
ENDPOINT = Endpoint("127.0.0.1", 4711, SECRET)


def _token_file(path: Path, text: str = SECRET + "\n", mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture(autouse=True)
def no_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A default file of the test's own, which is not there at first."""
    default = tmp_path / "default"
    monkeypatch.setattr(rendezvous, "DEFAULT_FILE", default)
    return default


def test_the_token_is_taken_from_the_nearest_place(tmp_path: Path, no_default: Path) -> None:
    assert find_token({}) is None
    _token_file(no_default, "d" * 16)
    one, two = _token_file(tmp_path / "one", "1" * 16), _token_file(tmp_path / "two", "2" * 16)
    everything = {"DTRAIN_TOKEN": SECRET, "DTRAIN_TOKEN_FILE": str(one)}
    assert find_token(everything, two) == SECRET.encode()
    del everything["DTRAIN_TOKEN"]
    assert find_token(everything, two) == b"2" * 16
    assert find_token(everything) == b"1" * 16
    assert find_token({"DTRAIN_TOKEN": "", "DTRAIN_TOKEN_FILE": ""}) == b"d" * 16


def test_a_token_that_others_may_know_is_an_error_with_a_fix(tmp_path: Path) -> None:
    for mode in (0o640, 0o604, 0o620):
        path = _token_file(tmp_path / "my token", mode=mode)
        with pytest.raises(UsageError, match=r"others can read it \(mode 06\d\d\); type: chmod 600 '.*my token'"):
            find_token({}, path)
    path.chmod(0o600)
    assert find_token({}, path) == SECRET.encode()
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        with pytest.raises(UsageError, match="belongs to another user"):
            find_token({}, path)


def test_in_a_pod_the_group_may_read_what_root_owns(tmp_path: Path) -> None:
    """A Secret's file belongs to root, and to the group of fsGroup where the pod has a user of its own."""
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    path = _token_file(tmp_path / "token", mode=0o440)
    if os.geteuid() == 0:
        assert find_token(pod, path) == SECRET.encode()
    else:
        with pytest.raises(UsageError, match="mode 0440"):
            find_token(pod, path)
    path.chmod(0o444)
    with pytest.raises(UsageError, match=r"mode 0444.*defaultMode: 0440"):
        find_token(pod, path)


def test_a_weak_token_is_an_error_with_a_command_for_a_good_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"at least 16 characters, this one has 6; make one with: .*openssl rand"):
        find_token({"DTRAIN_TOKEN": "canary"})
    with pytest.raises(UsageError, match=r"cannot read the token: No such file.*make one with"):
        find_token({"DTRAIN_TOKEN_FILE": str(tmp_path / "nowhere")})
    with pytest.raises(UsageError, match="Is a directory"):
        find_token({}, _folder(tmp_path / "folder"))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="this is not a file"):
        find_token({}, tmp_path / "pipe")
    with pytest.raises(UsageError, match="right file"):
        find_token({}, _token_file(tmp_path / "long", "x" * 100_000))


def test_no_error_shows_the_token(tmp_path: Path) -> None:
    short = SECRET[:15]
    for env, path in (
        ({"DTRAIN_TOKEN": short}, None),
        ({}, _token_file(tmp_path / "short", short)),
        ({}, _token_file(tmp_path / "open", mode=0o644)),
        ({}, _token_file(tmp_path / "long", SECRET * 1000)),
    ):
        with pytest.raises(UsageError) as refused:
            find_token(env, path)
        assert "canary" not in str(refused.value)
    assert "canary" not in repr(ENDPOINT)


def test_a_new_token_is_one_that_would_be_taken() -> None:
    assert new_token() != new_token()
    assert find_token({"DTRAIN_TOKEN": new_token().decode()})


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


# ---- rendezvous file -----------------------------------------------------------------------------------------


def test_a_rendezvous_file_is_found_by_this_user_only(tmp_path: Path) -> None:
    assert read_endpoint(tmp_path, "job/7 step.0") is None
    with publish(tmp_path, "job/7 step.0", ENDPOINT) as path:
        assert read_endpoint(tmp_path, "job/7 step.0") == ENDPOINT
        assert path.parent == tmp_path
        assert path.stat().st_mode & 0o777 == 0o600
        assert read_endpoint(tmp_path, "another") is None
        assert list(tmp_path.iterdir()) == [path]
    assert list(tmp_path.iterdir()) == []


def test_a_stale_file_is_replaced(tmp_path: Path) -> None:
    with publish(tmp_path, "run", Endpoint("127.0.0.1", 1, "of a killed run")):
        with publish(tmp_path, "run", ENDPOINT):
            assert read_endpoint(tmp_path, "run") == ENDPOINT
        assert read_endpoint(tmp_path, "run") is None
    with publish(tmp_path, "run", ENDPOINT):
        other = publish(tmp_path, "run", Endpoint("::1", 2, "the next run"))
        other.__enter__()
    assert read_endpoint(tmp_path, "run") == Endpoint("::1", 2, "the next run")  # the first one left it alone
    other.__exit__(None, None, None)


def test_a_file_that_others_could_have_written_is_not_believed(tmp_path: Path) -> None:
    with publish(tmp_path, "run", ENDPOINT) as path:
        for mode in (0o644, 0o660):
            path.chmod(mode)
            with pytest.raises(UsageError, match="not a file of this user alone"):
                read_endpoint(tmp_path, "run")
        path.chmod(0o600)
        link = tmp_path / "link.rendezvous"
        link.symlink_to(path)
        with pytest.raises(UsageError, match="cannot be read"):
            read_endpoint(tmp_path, "link")
        if os.geteuid() == 0:
            os.chown(path, 12345, 12345)
            with pytest.raises(UsageError, match="not a file of this user alone"):
                read_endpoint(tmp_path, "run")
    for text in ("", "[]", "{}", json.dumps({"address": "a", "port": "x", "token": ""})):
        _token_file(tmp_path / "bad.rendezvous", text)
        with pytest.raises(UsageError, match="remove it") as refused:
            read_endpoint(tmp_path, "bad")
        assert str(tmp_path) in str(refused.value)


def test_the_folder_on_this_machine_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = local_folder()
    assert local_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o750)
    with pytest.raises(UsageError, match="remove it"):
        local_folder()
    folder.rmdir()
    folder.symlink_to(_folder(tmp_path / "trap"))
    with pytest.raises(UsageError, match="remove it"):
        local_folder()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="TMPDIR"):
        local_folder()


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"), publish(tmp_path / "nowhere", "run", ENDPOINT):
        raise AssertionError("it was published")
