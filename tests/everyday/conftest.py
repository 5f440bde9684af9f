"""Keeps out of the ordinary tests what needs .venv-full: collected only where this folder, or that file, is named."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
FULL = HERE / "test_libraries.py"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path != FULL:
        return None
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    return None if named & {HERE, FULL} else True
