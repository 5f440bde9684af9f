"""How this dtrain is installed elsewhere: from where it was installed here, never from a name that others may have."""

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import __version__
from launcher.machine import packages
from launcher.machine.packages import install_command

GIT = {"vcs": "git", "commit_id": "4f99"}
WHEEL = "https://example.org/dtrain-1-py3-none-any.whl"


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    packages._source.cache_clear()
    yield
    packages._source.cache_clear()


@pytest.mark.parametrize(
    ("direct_url", "source"),
    [
        ({"url": "file://FOLDER/my%20clones", "dir_info": {}}, "'FOLDER/my clones'"),
        ({"url": "file://FOLDER/my%20clones", "vcs_info": GIT}, "git+file://FOLDER/my%20clones@4f99"),
        ({"url": "file:///gone/dtrain-1-py3-none-any.whl", "archive_info": {}}, None),
        ({"url": "file:///gone", "vcs_info": GIT}, None),
        ({"url": "https://example.org/dtrain", "vcs_info": GIT}, "git+https://example.org/dtrain@4f99"),
        ({"url": "ssh://git@example.org:22/d", "vcs_info": GIT}, "git+ssh://git@example.org:22/d@4f99"),
        ({"url": "https://git:secret@example.org/d", "vcs_info": GIT}, "git+https://example.org/d@4f99"),
        (
            {"url": "ssh://git:secret@example.org/d", "vcs_info": GIT, "subdirectory": "a/b"},
            "'git+ssh://git@example.org/d@4f99#subdirectory=a/b'",
        ),
        ({"url": WHEEL}, WHEEL),
        ({"url": f"{WHEEL.replace('://', '://me:secret@')}?token=secret#sha256=0"}, WHEEL),
        ({"url": "https://example.org/d.zip", "subdirectory": "a"}, "'https://example.org/d.zip#subdirectory=a'"),
        ({"url": "https://[bad"}, None),
        ({"url": 3}, None),
        ({"url": "https://example.org/dtrain", "vcs_info": {}}, "https://example.org/dtrain"),
        ({"url": "https://example.org/dtrain", "vcs_info": {"vcs": "git"}}, None),
        ({}, None),
        ([], None),
        (None, None),
    ],
)  # fmt: skip
def test_it_is_installed_from_where_it_came(
    direct_url: object, source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(tmp_path, json.dumps(direct_url).replace("FOLDER", str(tmp_path)), monkeypatch)
    (tmp_path / "my clones").mkdir()
    if source is None:
        assert install_command("/opt/python") == ""
        return
    source = source.replace("FOLDER", str(tmp_path))
    assert install_command("/opt/python") == f"/opt/python -m pip install {source}"
    assert install_command("/opt/python", "--no-deps") == f"/opt/python -m pip install --no-deps {source}"


@pytest.mark.parametrize("text", [None, "", "{", "\x00"])
def test_from_an_index_or_a_broken_note_nothing_is_known(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(tmp_path, text, monkeypatch)
    assert install_command("/opt/python") == ""


def _installed(folder: Path, direct_url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "METADATA").write_text(f"Name: dtrain\nVersion: {__version__}\n")
    if direct_url is not None:
        (folder / "direct_url.json").write_text(direct_url)
    here = importlib.metadata.PathDistribution(folder)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: here if name == "dtrain" else None)
