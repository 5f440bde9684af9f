"""How long to wait before the next attempt to connect: busy servers (MaxStartups) and those just starting. Pure."""

from __future__ import annotations

import random
import re

REFUSED_S = (0.3, 0.5, 0.9, 1.3)  # pauses after refused connections: a restarting server, or a wrong port
_DROPPED_S = (0.2, 3.0)  # the first pause after a dropped connection, and the longest
_BUSY = re.compile(r"MaxStartups|Not allowed at this time|exchange_identification|closed by|reset by", re.IGNORECASE)
_FINAL = re.compile(r"denied|verification failed|not resolve", re.IGNORECASE)


def after_drop_s(words: str, tries: int) -> float | None:
    """Return the pause after a server dropped connection number `tries`, or after ssh ended with these words.

    None: another attempt would fail as well.
    """
    if words and (_FINAL.search(words) or not _BUSY.search(words)):
        return None
    first, longest = _DROPPED_S
    return min(longest, first * 2.0 ** min(tries, 10)) * random.uniform(0.5, 1.5)


def after_refusal_s(tries: int) -> float | None:
    """Return the pause after a server refused connection number `tries`; None: there is no server."""
    return None if tries >= len(REFUSED_S) else REFUSED_S[tries] * random.uniform(0.5, 1.5)
