"""Keeps the tests here out of the ordinary ones: collected only where this folder, or a file in it, is named."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return None if any(_is_here(argument) for argument in config.args) else True


def _is_here(argument: str) -> bool:
    path = Path(argument.partition("::")[0]).resolve()
    return path == HERE or HERE in path.parents
