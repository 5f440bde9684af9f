"""`--log-format json`: what the terminal would show, as one JSON object per line, always valid UTF-8. Pure.

Every object has `kind` and `time` (ISO 8601, UTC).

    kind "output"   a line of a worker: host, rank, local_rank, stream ("stdout", "stderr"), attempt, text
    kind "message"  of dtrain itself: level ("info", "error"), text
    kind "report"   the end of the run: level, text, and as `outcome` what --error-json writes

Each goes to stdout or stderr, as its text would. Bytes that are not UTF-8 are written as `\\xNN`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from launcher.output.logfiles import STREAM_NAMES

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def output_head(host: str, rank: int, local_rank: int, stream: int, attempt: int) -> bytes:
    """Return the fields that are the same in all objects of a worker's stream."""
    fields = {
        "host": host,
        "rank": rank,
        "local_rank": local_rank,
        "stream": STREAM_NAMES[stream],
        "attempt": attempt,
    }
    return _plain(_encode(fields)[1:-1]).encode()


def output_lines(head: bytes, lines: bytes) -> bytes:
    """Return an object for each line; the last line has no line feed. `head` comes from `output_head`."""
    before = b'{"kind":"output","time":"%b",%b,"text":' % (_now().encode(), head)
    texts = lines.decode("utf-8", "backslashreplace").split("\n")
    return b"".join(before + _encode(text).encode() + b"}\n" for text in texts)


def message(text: str, level: str = "info") -> bytes:
    return _line({"kind": "message", "time": _now(), "level": level, "text": _plain(text)})


def report_line(text: str, outcome: Mapping[str, Any], *, failed: bool) -> bytes:
    """Return the object of the end of a run; `outcome` comes from error_json.py."""
    level = "error" if failed else "info"
    return _line({"kind": "report", "time": _now(), "level": level, "text": _plain(text), "outcome": outcome})


def _line(fields: Mapping[str, Any]) -> bytes:
    return _encode(fields).encode("utf-8", "replace") + b"\n"  # a path may contain a lone surrogate


def _plain(text: str) -> str:
    """Escape what UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
