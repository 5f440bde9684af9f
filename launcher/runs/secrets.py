"""What of a command must not be written down: values that are secret by their name or by their look."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

WITHHELD = "***"
_SECRETS = ("token", "secret", "password", "passwd", "passphrase", "pwd", "apikey", "accesskey", "privatekey",
            "secretkey", "accountkey", "credential", "credentials")  # fmt: skip  # at the end of a word
_KEYS = {"api", "access", "private", "secret", "account"}  # before `key`
_NO_SECRET = {"file", "path", "dir", "name", "id"}  # at the end: where it is, not what it is
_LOOKS = re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[A-Za-z0-9_-]{16,}")
_IN_ADDRESS = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+@")
_NUMBER = re.compile(r"[0-9]{1,6}|[0-9]*\.[0-9]+")  # of a token: which it is, or how many


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command with WITHHELD in the place of what is secret.

    >>> without_secrets(["train.py", "--api-key", "k1", "--token-file", "t", "--export=PGPASSWORD=p"])
    ['train.py', '--api-key', '***', '--token-file', 't', '--export=PGPASSWORD=***']
    """
    found, before = [], ""  # the option whose value comes next
    for word in words:
        if before and not word.startswith("--") and not _is_number_of(before, word):
            found.append(WITHHELD)
            before = ""
            continue
        before = word if word.startswith("-") and "=" not in word and _is_secret(word) else ""
        found.append(_IN_ADDRESS.sub(rf"\1:{WITHHELD}@", _LOOKS.sub(WITHHELD, _without_value(word))))
    return found


def _without_value(word: str) -> str:
    """Return a word without what comes after the first secret name in it: `--export=TOKEN=hush` has two names."""
    for equals in re.finditer("=", word):
        name, value = word[: equals.start()], word[equals.end() :]
        last = name.rpartition("=")[2]
        if value and _is_secret(last) and not _is_number_of(last, value):
            return f"{name}={WITHHELD}"
    return word


def _is_secret(name: str) -> bool:
    words = _words(name)
    if not words or words[-1] in _NO_SECRET:
        return False
    if any(word == "auth" or word.endswith(_SECRETS) for word in words):
        return True
    return any(one in _KEYS and other == "key" for one, other in itertools.pairwise(words))


def _is_number_of(name: str, value: str) -> bool:
    return _words(name)[-1] == "token" and _NUMBER.fullmatch(value) is not None


def _words(name: str) -> list[str]:
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word for word in re.split(r"[^a-z0-9]+", apart.lower()) if word]
