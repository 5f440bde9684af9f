"""Says what becomes of a test whose machine lacks a part: skipped on a developer's machine, failed in CI."""

import os

import pytest


def require(found: object, missing: str, fix: str) -> None:
    """Skip the calling test unless `found` is truthy; with CI=true fail it, for no one reads a skip there.

    `missing` names the part and `fix` what to type to get it.
    """
    if found:
        return
    reason = f"{missing} is missing; {fix}"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (CI=true: a missing part is a failure)", pytrace=False)
    pytest.skip(reason)
