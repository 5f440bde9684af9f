"""How this dtrain is installed elsewhere: from where it was installed here, never from a name that others may have."""

import importlib.metadata
from pathlib import Path

import pytest

from launcher import __version__
from launcher.machine.packages import install_command


@pytest.mark.parametrize(
    ("direct_url", "source"),
    [
        ('{"url": "file:///home/me/my%20clones/dtrain", "dir_info": {}}', "'/home/me/my clones/dtrain'"),
        (
            '{"url": "https://example.org/dtrain", "vcs_info": {"vcs": "git", "commit_id": "4f99"}}',
            "git+https://example.org/dtrain@4f99",
        ),
        ('{"url": "https://example.org/dtrain-1-py3-none-any.whl"}', "https://example.org/dtrain-1-py3-none-any.whl"),
        (None, f"dtrain=={__version__}"),
    ],
)
def test_it_is_installed_from_where_it_came(
    direct_url: str | None, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "METADATA").write_text(f"Name: dtrain\nVersion: {__version__}\n")
    if direct_url is not None:
        (tmp_path / "direct_url.json").write_text(direct_url)
    here = importlib.metadata.PathDistribution(tmp_path)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: here if name == "dtrain" else None)
    assert install_command("/opt/python") == f"/opt/python -m pip install {source}"
    assert install_command("/opt/python", "--no-deps") == f"/opt/python -m pip install --no-deps {source}"
