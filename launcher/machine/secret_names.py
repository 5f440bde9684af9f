"""Which variables may hold a secret, by their names."""

from __future__ import annotations

import re

_SECRET = re.compile(
    r"(?:KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|DSN)S?(?:_|$)|(?:^|_)(?:AUTH|PAT)(?:_|$)"
    r"|^(?!(?:OLD)?PWD$)\w*PWD(?:_|$)",
    re.IGNORECASE,
)


def may_be_secret(name: str) -> bool:
    """Say whether a variable may hold a secret; what people type as an option is judged by runs/secrets.py."""
    return _SECRET.search(name) is not None
