"""Tells by its name whether a variable may hold a secret."""

from __future__ import annotations

import re

_SECRET = re.compile(
    r"(?:KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|DSN)S?(?:_|$)|(?:^|_)(?:AUTH|PAT)(?:_|$)"
    r"|^(?!(?:OLD)?PWD$)\w*PWD(?:_|$)",
    re.IGNORECASE,
)


def may_be_secret(name: str) -> bool:
    """Return whether a variable may hold a secret; runs/secrets.py checks options that users type."""
    return _SECRET.search(name) is not None
