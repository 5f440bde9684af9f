"""What of a command must not be written down: values that are secret by their name or by their look."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

__all__ = ["WITHHELD", "without_secrets"]

WITHHELD = "***"
_SECRET = {"token", "secret", "password", "passwd", "passphrase", "pwd", "apikey", "credential", "credentials", "auth"}
_KEYS = {"api", "access", "private", "secret", "account"}  # before `key`
_NO_SECRET = {"file", "path", "dir", "name", "id"}  # at the end: where it is, not what it is
_LOOKS = re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[A-Za-z0-9_-]{16,}")
_IN_ADDRESS = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+@")
_NUMBER = re.compile(r"[0-9.]{1,7}")


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command with WITHHELD in the place of what is secret.

    >>> without_secrets(["train.py", "--api-key", "k1", "--token-file", "t", "wandb.password=p"])
    ['train.py', '--api-key', '***', '--token-file', 't', 'wandb.password=***']
    """
    found, is_value = [], False
    for word in words:
        name, equals, value = word.partition("=")
        if is_value and not word.startswith("--") and not _NUMBER.fullmatch(word):
            found.append(WITHHELD)
            is_value = False
            continue
        is_value = False
        if equals and value and _is_secret(name) and not _NUMBER.fullmatch(value):
            found.append(f"{name}={WITHHELD}")
            continue
        is_value = not equals and word.startswith("-") and _is_secret(word)
        found.append(_IN_ADDRESS.sub(rf"\1:{WITHHELD}@", _LOOKS.sub(WITHHELD, word)))
    return found


def _is_secret(name: str) -> bool:
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    if not words or words[-1] in _NO_SECRET:
        return False
    pairs = itertools.pairwise(words)
    return not _SECRET.isdisjoint(words) or any(one in _KEYS and other == "key" for one, other in pairs)
