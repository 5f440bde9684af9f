"""Gives what a host says of sent files (`--sync`) the paths of this machine: those below the host's trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.frozen import replace
from launcher.protocol.message import Message
from launcher.protocol.reports import Output

_FRAME = b'File "'  # before a path in Python's tracebacks and stacks; other output is the script's own


def with_paths_here(message: Message, trees: Sequence[str]) -> Message:
    """Return a message of a host with the paths of this machine; `trees` are the folders there that mirror them."""
    if isinstance(message, Output):
        data = message.data
        for tree in trees:
            data = data.replace(_FRAME + tree.encode(), _FRAME)
        return message if data is message.data else replace(message, data=data)
    changes = {name: here for name, value in vars(message).items() if (here := _here(value, trees)) is not value}
    return type(message)(**{**vars(message), **changes}) if changes else message


def _here(value: Any, trees: Sequence[str]) -> Any:
    """Return a value of a message with the paths of this machine; the same object if it has none."""
    if isinstance(value, str):
        for tree in trees:
            value = value.replace(tree + "/", "/") if tree in value else value
        return value
    if isinstance(value, list):
        found = [_here(item, trees) for item in value]
        return found if any(new is not old for new, old in zip(found, value, strict=True)) else value
    if isinstance(value, dict):
        items = {key: _here(item, trees) for key, item in value.items()}
        return items if any(items[key] is not value[key] for key in items) else value
    return value
