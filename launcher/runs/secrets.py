"""Withholds the secrets in a command: values that are secret by their name or by their form."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

WITHHELD = "***"
_SECRETS = ("token", "secret", "password", "passwd", "passphrase", "pwd", "apikey", "accesskey", "privatekey",
            "secretkey", "accountkey", "credential", "credentials")  # fmt: skip  # at the end of a part of a name
_KEYS = {"api", "access", "private", "secret", "account"}  # before `key`
_NO_SECRET = {"file", "path", "dir", "name", "id"}  # at the end of a name: the place of a secret, not the secret
_LOOKS = re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[A-Za-z0-9_-]{16,}")
_IN_ADDRESS = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+@")
_NUMBER = re.compile(r"[0-9]{1,6}|[0-9]*\.[0-9]+")  # of a token: an index or a number of tokens


def without_secrets(argv: Sequence[str]) -> list[str]:
    """Return the arguments of a command with secrets replaced by WITHHELD.

    >>> without_secrets(["train.py", "--api-key", "k1", "--token-file", "t", "--export=PGPASSWORD=p"])
    ['train.py', '--api-key', '***', '--token-file', 't', '--export=PGPASSWORD=***']
    """
    found, before = [], ""  # the option whose value comes next
    for arg in argv:
        if before and not arg.startswith("--") and not _is_number_of(before, arg):
            found.append(WITHHELD)
            before = ""
            continue
        before = arg if arg.startswith("-") and "=" not in arg and _is_secret(arg) else ""
        found.append(_IN_ADDRESS.sub(rf"\1:{WITHHELD}@", _LOOKS.sub(WITHHELD, _without_value(arg))))
    return found


def _without_value(arg: str) -> str:
    """Withhold the value after the first secret name in an argument: `--export=TOKEN=hush` has two names."""
    for equals in re.finditer("=", arg):
        name, value = arg[: equals.start()], arg[equals.end() :]
        last = name.rpartition("=")[2]
        if value and _is_secret(last) and not _is_number_of(last, value):
            return f"{name}={WITHHELD}"
    return arg


def _is_secret(name: str) -> bool:
    parts = _parts_of(name)
    if not parts or parts[-1] in _NO_SECRET:
        return False
    if any(part == "auth" or part.endswith(_SECRETS) for part in parts):
        return True
    return any(one in _KEYS and other == "key" for one, other in itertools.pairwise(parts))


def _is_number_of(name: str, value: str) -> bool:
    return _parts_of(name)[-1] == "token" and _NUMBER.fullmatch(value) is not None


def _parts_of(name: str) -> list[str]:
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [part for part in re.split(r"[^a-z0-9]+", apart.lower()) if part]
