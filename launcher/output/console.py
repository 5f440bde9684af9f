"""The terminal: workers' lines prefixed with `[host:rank]`, progress bars, the status line, dtrain's own messages.

Lines are written whole, bytes unchanged. A `\\r` redraws a line: on a terminal the newest such line stays at the
bottom; elsewhere only its last state is written, and an intermediate one from time to time. On a terminal, equal lines
of many ranks are shown once (merging.py). While a rank prompts the user, all other output waits. Only the output thread
uses it.
"""

from __future__ import annotations

import os
import re
import select
import time
from dataclasses import dataclass
from typing import Final

from launcher.output.json_lines import message, output_head, output_lines
from launcher.output.merging import LineMerger, label
from launcher.output.text import size

MAX_LINE_BYTES = 1 << 16  # a longer line is cut into several
TERMINAL_LINE_BYTES = 1 << 12  # a terminal shows only this much of a longer line
REDRAW_S = 0.1
REPEAT_S = 10.0  # interval at which an unfinished progress bar is written without a terminal
ATOMIC_BYTES: Final = select.PIPE_BUF  # a pipe that is ready accepts this much without blocking
PROMPT_BYTES = 1 << 20  # other output that waits for an answer; the rest is in the log files only
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_UP = re.compile(rb"\x1b\[[0-9]*[AF]")
_BELOW = re.compile(rb"\n+(\r[^\n]*?)(?:\x1b\[[0-9]*[AF])+")  # a bar below, with the cursor moves there and back
_OPEN = re.compile(rb"\n+(?:\r[^\n]*)?\Z|\x1b(?:\[[0-9;]*)?\Z")  # possibly the start of one, or part of an escape code
_ERASE = b"\r\x1b[K"
_ERASE_BELOW = b"\r\x1b[J"  # the line and everything below


@dataclass
class _Line:
    """The unfinished line of one worker's stream."""

    prefix: bytes
    stream: int
    text: bytes = b""
    shown: bytes = b""  # its state when it was last written as progress
    shown_at: float = 0.0
    redrawn: bool = False  # it contained a \r
    length: int = 0  # bytes since the last newline or \r, on a terminal
    nested: bool = False  # it contained cursor-up codes: bars below each other
    held: bytes = b""  # its end, possibly the start of a bar below


class Console:
    """Writes to the descriptors `out` and `err`.

    With `impatient` set, it does not wait for a descriptor that is not ready, and no prompt holds other output back.

    `lines`: "merge" equal lines of many ranks, show "all", or None: merge on a terminal. `as_json`: write objects, see
    json_lines.py. `is_typed_at`: a rank reads the keyboard; an empty line above the status is kept for the input.
    """

    def __init__(
        self, *, out: int = 1, err: int = 2, colour: bool = True, lines: str | None = "all", as_json: bool = False,
        is_typed_at: bool = False,
    ) -> None:  # fmt: skip
        self._fds = {1: out, 2: err}
        self._json = as_json
        self._terminal = {stream: os.isatty(fd) and not as_json for stream, fd in self._fds.items()}
        self._coloured = {stream: colour and takes_colour(fd) and not as_json for stream, fd in self._fds.items()}
        self._choice = lines
        self._merges = self._find_merges()
        self._merger = LineMerger()
        self._asks: int | None = None  # the rank whose prompt waits for an answer
        self._prompt = (_Line(b"", 0), b"")  # its line, and the text at that time
        self._waiting: list[tuple[int, bytes]] = []  # output that waits for the answer, by stream
        self._waiting_bytes = self._unshown_bytes = 0
        self._lines: dict[tuple[int, int], _Line] = {}
        self._prefixes: dict[int, dict[int, bytes]] = {}  # by rank and stream, without colour
        self._status = ""  # what dtrain is doing
        self._gives_way = False  # the status yields to unfinished lines
        self._status_since: float | None = None  # when the status was set, if it is not shown yet
        self._bottom = b""  # the terminal's last line as it is now
        self._is_typed_at = is_typed_at
        self._is_below = False  # that line is below the cursor's
        self._drawn_at = 0.0
        self._changed: dict[tuple[int, int], _Line] = {}  # lines whose unfinished state is not shown yet
        self._closed: set[int] = set()
        self._dropped = False
        self.impatient = False

    def pause_s(self, now: float) -> float | None:
        """Return the seconds until `refresh` has something to do; None if there is nothing."""
        held = self._merger.next_due
        soon = REDRAW_S if self._changed or self._status_since is not None or self._is_hidden else None
        if held is None:
            return soon
        return max(0.0, held - now if soon is None else min(soon, held - now))

    def _find_merges(self) -> dict[int, bool]:
        if self._choice is None:
            return dict(self._terminal)
        return dict.fromkeys(self._fds, self._choice == "merge")

    def leave_terminal(self, fd: int) -> None:
        """Switch all output to `fd`, a file."""
        self._release()
        self._draw(b"")
        self._fds = {1: fd, 2: fd}
        self._terminal = self._coloured = dict.fromkeys(self._fds, False)
        self._merges = self._find_merges()
        self._closed.clear()
        for (rank, stream), line in self._lines.items():
            line.prefix = self._prefixes[rank][stream]

    def add_worker(self, rank: int, host: str, *, local_rank: int = 0, attempt: int = 0) -> None:
        """Start new lines for a rank; `finish` must have written its previous unfinished ones."""
        self._release(rank)
        self._put_held()
        prefix = f"[{host}:{rank}] ".encode()
        own = self._prefixes[rank] = {
            stream: output_head(host, rank, local_rank, stream, attempt) if self._json else prefix for stream in (1, 2)
        }
        for stream in (1, 2):
            colour = b"%d" % _COLOURS[rank % len(_COLOURS)]
            self._lines[rank, stream] = _Line(self._in_colour(stream, own[stream], colour), stream)
        self._merger.ranks = len(self._prefixes)

    def _in_colour(self, stream: int, prefix: bytes, colour: bytes) -> bytes:
        return b"\x1b[%bm%b\x1b[0m " % (colour, prefix[:-1]) if self._coloured[stream] else prefix

    def begin_attempt(self) -> None:
        """Finish all lines and forget the ranks."""
        self.finish()
        self._lines.clear()
        self._prefixes.clear()

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Add bytes of a worker; whole lines appear immediately."""
        self._release(rank)  # not a prompt yet: the agent reports it again after these bytes
        line = self._lines[rank, stream]
        text = line.text + line.held + (_shortened(line, data) if self._terminal[stream] else data)
        if line.nested or _UP.search(text):
            text = _flattened(line, text)
        whole, newline, rest = text.rpartition(b"\n")
        if newline:
            whole = whole.replace(b"\r\n", b"\n").removesuffix(b"\r")
            is_redrawn = b"\r" in whole
            if is_redrawn:
                whole = b"\n".join(_last_state(part) for part in whole.split(b"\n"))
            self._put_lines(rank, line, whole, is_bar=is_redrawn or line.redrawn)
            line.redrawn = False
        if b"\r" in rest:
            line.redrawn |= b"\r" in rest[:-1]  # else a line feed may follow
            rest = _last_state(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        while len(rest) > MAX_LINE_BYTES:
            self._put(stream, self._written(line.prefix, rest[:MAX_LINE_BYTES]))
            rest = rest[MAX_LINE_BYTES:]
        line.text = rest
        if rest:
            self._changed.setdefault((rank, stream), line)
        else:  # nothing is left to draw but a prefix
            self._changed.pop((rank, stream), None)

    def _put_lines(self, rank: int, line: _Line, lines: bytes, *, is_bar: bool) -> None:
        """Show whole lines of a rank; those of a progress bar are never merged."""
        now = time.monotonic()
        if self._merges[line.stream] and not is_bar and self._merger.takes(lines, now):
            self._merger.add(rank, line.stream, lines, now)
            self._put_held(now)
        else:
            self._put(line.stream, self._written(line.prefix, lines))

    def _written(self, prefix: bytes, lines: bytes) -> bytes:
        """Return lines as they are shown; the last one comes without a line feed."""
        if self._json:
            return output_lines(prefix, lines)
        return prefix + lines.replace(b"\n", b"\n" + prefix) + b"\n"

    def _put_held(self, now: float = float("inf")) -> None:
        """Show the held lines that are due; by default all."""
        last, together = 0, bytearray()  # lines of one stream are written together
        for held in self._merger.leave(now):
            if held.stream != last and together:
                self._put_now(last, bytes(together))
                together = bytearray()
            prefix = self._lines[held.ranks[0], held.stream].prefix
            if len(held.ranks) > 1:
                who = f"[{label(held.ranks, self._merger.ranks)}] ".encode()
                prefix = self._in_colour(held.stream, who, b"1")
            last = held.stream
            together += b"%b%b\n" % (prefix, held.text)
        if together:
            self._put_now(last, bytes(together))

    def end_line(self, rank: int) -> None:
        """Write a rank's unfinished lines as they are."""
        self._release(rank)
        for stream in (1, 2):
            self._end(self._lines[rank, stream])
            self._changed.pop((rank, stream), None)

    def say(self, text: str) -> None:
        lines = "".join(f"dtrain: {line}\n" for line in text.splitlines())
        self._put(2, message(text) if self._json else lines.encode("utf-8", "backslashreplace"))

    def ask(self, rank: int) -> None:
        """Leave the terminal to the unfinished line of a rank that prompts the user, until `answer`."""
        if self.impatient:  # a debugger handles Ctrl-C itself and asks again
            return
        line = next((line for key, line in reversed(self._changed.items()) if key[0] == rank and line.text), None)
        line = line or next((self._lines[rank, stream] for stream in (1, 2) if self._lines[rank, stream].text), None)
        if self._asks is not None or line is None or not self._terminal[2]:
            return
        self._put_held()
        self._draw(line.prefix + _last_state(line.text))
        self._changed.clear()
        self._asks, self._prompt = rank, (line, line.text)

    def answer(self, *, is_line: bool) -> None:
        """Resume after an answer, which the terminal echoed after the prompt, with its line feed if it `is_line`.

        Without a prompt, it was typed above the status.
        """
        if self._asks is None:
            if is_line and self._bottom:
                self._begin_line()
            return
        line, text = self._prompt
        line.text, line.length = line.text.removeprefix(text), 0
        self._asks, self._bottom = None, b""
        if not is_line:
            self._write(2, b"\n")
        self._put_waiting()

    def _begin_line(self) -> None:
        """Keep the typed line as it is: the cursor is in the next one."""
        was_below, self._bottom, self._is_below = self._is_below, b"", False
        if was_below:
            self._write(2, _ERASE_BELOW)
            self._draw_status()

    def withdraw(self, rank: int | None = None) -> None:
        """Resume without an answer: the rank, by default any, no longer waits for one."""
        self._release(rank)

    def _release(self, rank: int | None = None) -> None:
        """Resume all output if this rank prompts, by default if any does."""
        if self._asks is not None and rank in (None, self._asks):
            self._asks = None
            self._put_waiting()

    def _put_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        unshown, self._waiting_bytes, self._unshown_bytes = self._unshown_bytes, 0, 0
        for stream, data in waiting:
            self._put_now(stream, data)
        if unshown:
            self.say(f"{size(unshown)} of output that came during the prompt are not shown; the log files have all")
        if self._status:
            self._draw_status()

    def show_status(self, text: str, *, gives_way: bool = False) -> None:
        """Show what dtrain is doing, after a short delay; empty to remove it.

        A status that `gives_way` is hidden while a worker has an unfinished line, such as a progress bar or a prompt.
        """
        self._gives_way = gives_way
        before, self._status = self._status, text
        if gives_way and text and self._has_unfinished:
            self._status_since = None
        elif not text:
            self._status_since = None
            if before:
                self._draw(b"")
        elif not before:
            self._status_since = time.monotonic()
        elif self._status_since is None:
            self._draw_status()

    def refresh(self, now: float) -> None:
        """Show the status once it is due, and unfinished lines: progress bars, prompts."""
        if self._status_since is not None and now - self._status_since >= REDRAW_S:
            self._status_since = None
            self._draw_status()
        self._put_held(now)
        if now - self._drawn_at < REDRAW_S:
            return
        if self._is_hidden:
            self._drawn_at = now
            self._draw_status()
        if not self._changed:
            return
        self._drawn_at = now
        if self._terminal[2]:
            line = next(reversed(self._changed.values()))
            self._draw(line.prefix + _last_state(line.text))
            self._changed.clear()
            return
        for key, line in list(self._changed.items()):
            state = _last_state(line.text)
            if not line.redrawn:
                del self._changed[key]
            elif state != line.shown and now - line.shown_at >= REPEAT_S:
                if line.shown_at:
                    self._put(line.stream, self._written(line.prefix, state))
                    line.shown = state
                line.shown_at = now
                del self._changed[key]

    @property
    def _has_unfinished(self) -> bool:
        return any(line.text.strip() for line in self._lines.values())

    @property
    def _is_hidden(self) -> bool:
        """True if a worker's line replaced the status, which can now be shown again."""
        is_away = self._gives_way and self._status and self._status_since is None and not self._bottom
        return bool(is_away) and self._terminal[2] and not self._has_unfinished

    def finish(self) -> None:
        """Write unfinished lines as they are and clear the last line, at the end and between attempts."""
        self._release()
        self._put_held()
        for line in self._lines.values():
            self._end(line)
        self._changed.clear()
        self._draw(b"")

    def _end(self, line: _Line) -> None:
        for part in (line.text + line.held).split(b"\n"):
            state = _last_state(part)
            if state.strip() and state != line.shown:
                self._put(line.stream, self._written(line.prefix, state))
        line.text, line.held, line.redrawn, line.length = b"", b"", False, 0

    def _put(self, stream: int, data: bytes) -> None:
        """Show output that is not merged, after the held lines."""
        if self._merger.next_due is not None:
            self._put_held()
        self._put_now(stream, data)

    def _put_now(self, stream: int, data: bytes) -> None:
        if self._asks is not None:
            if self._waiting_bytes + len(data) > PROMPT_BYTES:
                self._unshown_bytes += len(data)
            else:
                self._waiting.append((stream, data))
                self._waiting_bytes += len(data)
            return
        if self._bottom:
            self._draw(b"")
        self._write(stream, data)

    def _draw_status(self) -> None:
        self._draw(f"dtrain: {self._status}".encode(), below=self._is_typed_at)

    def _draw(self, text: bytes, *, below: bool = False) -> None:
        """Replace the terminal's last line, unless a prompt is in it.

        With `below`, the cursor stays in the line above, so that typed text does not mix with it.
        """
        if not self._terminal[2] or (text, below) == (self._bottom, self._is_below) or self._asks is not None:
            return
        shown = self._cut(text)
        if below and self._is_below:
            self._write(2, b"\x1b7\x1b[B" + _ERASE + shown + b"\x1b8")  # keep the typed text and the cursor
        else:
            erase = _ERASE_BELOW if self._is_below else _ERASE if self._bottom else b""
            self._write(2, erase + (b"\n" + shown + b"\x1b[A\r" if below else shown))
        self._bottom, self._is_below = text, below

    def _cut(self, text: bytes) -> bytes:
        """Cut a line to the width of the terminal; a longer one could not be redrawn."""
        try:
            width = os.get_terminal_size(self._fds[2]).columns or 80
        except OSError:  # the terminal has gone
            width = 80
        shown, room = "", width - 1
        for part in re.split(r"(\x1b\[[0-9;]*m)", text.decode("utf-8", "replace")):
            if part.startswith("\x1b["):
                shown += part
            else:
                shown += part[:room]
                room -= len(part[:room])
        return shown.encode()

    def _write(self, stream: int, data: bytes) -> None:
        fd = self._fds[stream]
        if fd in self._closed:
            return
        view = memoryview(data)
        try:
            while view:
                if not self._ready(fd):
                    self._dropped = True
                    return
                view = view[os.write(fd, view[:ATOMIC_BYTES]) :]
        except BlockingIOError:  # another process made it non-blocking: wait as for a full pipe
            self._write(stream, bytes(view))
        except OSError as error:
            self._closed.add(fd)
            if stream == 1:
                self.say(f"stdout is closed ({error.strerror}); the run continues, its output is in the log files")

    def _ready(self, fd: int) -> bool:
        """Wait until `fd` is writable; when impatient, for at most half a second."""
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        waits = 0
        while not poll.poll(0 if self.impatient and self._dropped else 100):
            waits += 1
            if self.impatient and (self._dropped or waits >= 5):
                return False
        return True


def takes_colour(fd: int) -> bool:
    """Return whether to colour a descriptor's output: a capable terminal's, unless NO_COLOR or FORCE_COLOR is set.

    See https://no-color.org and https://force-color.org; the first wins.
    """
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (os.isatty(fd) and os.environ.get("TERM") != "dumb")


def _shortened(line: _Line, data: bytes) -> bytes:
    """Cut lines to TERMINAL_LINE_BYTES and append their full length to those that were longer."""
    shown = bytearray()
    for match in re.finditer(rb"([^\r\n]*)([\r\n]?)", data):
        text, end = match.groups()
        shown += text[: max(0, TERMINAL_LINE_BYTES - line.length)]
        line.length += len(text)
        if end:
            if line.length > TERMINAL_LINE_BYTES:
                if b"\x1b" in line.text or b"\x1b" in shown:  # it may be cut inside a colour
                    shown += b"\x1b[0m"
                shown += f"... ({size(line.length)})".encode()
            shown += end
            line.length = 0
    return bytes(shown)


def _flattened(line: _Line, text: bytes) -> bytes:
    """Turn bars below each other, drawn by moving the cursor down and up, into states of one line.

    The cursor would leave the line and draw over other workers' lines.
    """
    line.nested = True
    text = _UP.sub(b"", _BELOW.sub(rb"\1", text))
    open_at = found.start() if (found := _OPEN.search(text)) else len(text)
    line.held = text[open_at:]
    return text[:open_at]


def _last_state(text: bytes) -> bytes:
    """Return what a terminal shows of a line with carriage returns, if the last redraw is at least as long."""
    if b"\r" not in text:
        return text
    parts = text.split(b"\r")
    return next((part for part in reversed(parts) if part), b"")
