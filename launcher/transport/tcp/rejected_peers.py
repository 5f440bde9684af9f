"""What node 0's terminal shows of those that connect to the control port and do not get in: each kind, then a count.

Pure. Anybody on the network can connect as often as they like, so nothing here grows with that.
"""

from __future__ import annotations

from collections import Counter

from launcher.transport.tcp.greeting import printable

__all__ = ["RejectedPeers"]

SAY_AT_MOST = 8  # different things of one kind


class RejectedPeers:
    """Counts those that were rejected; `reject` says what is to be shown at once, if anything is."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._said: dict[str, set[str]] = {}

    def reject(self, kind: str, text: str) -> str | None:
        """Note one of a `kind`, e.g. an error's class name; return `text` if it is to be shown, None if it was."""
        self._counts[kind] += 1
        said = self._said.setdefault(kind, set())
        if text in said or len(said) >= SAY_AT_MOST:
            return None
        said.add(text)
        return text

    def count(self, kind: str) -> None:
        """Note one of which there is nothing to show."""
        self._counts[kind] += 1

    def summary(self) -> str | None:
        """Return one line about those that were not shown one by one, None if there were none."""
        unshown = {kind: count - len(self._said.get(kind, ())) for kind, count in self._counts.items()}
        parts = [f"{count} {printable(kind)}" for kind, count in unshown.items() if count > 0]
        if not parts:
            return None
        return f"other connections to the control port were turned away: {', '.join(parts)}"
