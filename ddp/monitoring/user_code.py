"""The position of a thread for messages: the line of the user's code that it runs, and what it calls from there."""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

import torch

from ddp.monitoring.stall_text import printable

_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_Spot = tuple[FrameType, int]  # and the number of its line


def line_of_frame(frame: FrameType | None) -> str:
    """Return the user's line that leads to a running `frame`."""
    return _line_among([] if frame is None else [*traceback.walk_stack(frame)])


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's own code that leads to a running `frame`."""
    spots = [] if frame is None else [*traceback.walk_stack(frame)]
    return _own_among(spots)[0] if spots else None


def line_of_traceback(trace: TracebackType | None) -> str:
    """Return the user's line that an exception came from."""
    return _line_among([*traceback.walk_tb(trace)][::-1])


def _line_among(spots: Sequence[_Spot]) -> str:
    """Return the innermost of the user's own lines, and what runs inside it; `spots` are innermost first."""
    if not spots:
        return "an unknown line"
    own = _own_among(spots)
    inner = spots[0]
    is_shown = inner is own or inner[0].f_code.co_filename.startswith(_OURS)
    inside = "" if is_shown else f", inside {_spot_text(inner)}"
    return printable(_spot_text(own) + inside)


def _own_among(spots: Sequence[_Spot]) -> _Spot:
    return min(spots, key=lambda spot: _foreignness(spot[0].f_code.co_filename))  # the first of the least foreign


def _foreignness(file: str) -> int:
    if file.startswith((_TORCH, _OURS, "<frozen ")):
        return 2
    if _PACKAGES.match(file):
        return 1
    return 2 if file.startswith(_STDLIB) else 0


def _spot_text(spot: _Spot) -> str:
    frame, line = spot
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    short = _PACKAGES.sub("", file)
    if short == file and file.startswith(_STDLIB):
        short = file[len(_STDLIB) :]
    with contextlib.suppress(ValueError, OSError):  # not in the working directory, or that is gone
        short = str(Path(short).relative_to(Path.cwd()))
    return f"{short}:{line} in {function}"
