"""What the variables of an environment say: whether one may hold a secret, and whether this is a pod."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SECRET = re.compile(
    r"(?:KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|DSN)S?(?:_|$)|(?:^|_)(?:AUTH|PAT)(?:_|$)"
    r"|^(?!(?:OLD)?PWD$)\w*PWD(?:_|$)",
    re.IGNORECASE,
)


def may_be_secret(name: str) -> bool:
    """Return whether a variable may hold a secret; runs/secrets.py checks options that users type."""
    return _SECRET.search(name) is not None


def in_pod(env: Mapping[str, str]) -> bool:
    """Return whether this process runs in a pod of Kubernetes."""
    return "KUBERNETES_SERVICE_HOST" in env
