"""Where a thread is, in the user's terms: the line of the user's own code that it runs, and what runs inside that."""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import torch

from ddp.monitoring.stall_channel import printable

__all__ = ["line_of_frame", "line_of_traceback"]

_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_Spot = tuple[str, int, str]  # file, line, function


def line_of_frame(frame: FrameType | None) -> str:
    """The user's line that leads to `frame`, a running one."""
    return _line_among(list(_spots(frame)))


def line_of_traceback(trace: TracebackType | None) -> str:
    """The user's line that an exception came from."""
    return _line_among(_spots_of(trace))


def _spots(frame: FrameType | None) -> Iterable[_Spot]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _spots_of(trace: TracebackType | None) -> list[_Spot]:
    spots = []
    while trace is not None:
        code = trace.tb_frame.f_code
        spots.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return spots[::-1]


def _line_among(spots: Sequence[_Spot]) -> str:
    """The innermost of the user's own lines, and what runs inside it; `spots` come innermost first."""
    if not spots:
        return "an unknown line"
    own = min(spots, key=lambda spot: _foreignness(spot[0]))  # the first of the least foreign
    inner = spots[0]
    inside = "" if inner is own or inner[0].startswith(_OURS) else f", inside {_spot_text(inner)}"
    return printable(_spot_text(own) + inside)


def _foreignness(file: str) -> int:
    if file.startswith((_TORCH, _OURS, "<frozen ")):
        return 2
    if _PACKAGES.match(file):
        return 1
    return 2 if file.startswith(_STDLIB) else 0


def _spot_text(spot: _Spot) -> str:
    file, line, function = spot
    short = _PACKAGES.sub("", file)
    if short == file and file.startswith(_STDLIB):
        short = file[len(_STDLIB) :]
    with contextlib.suppress(ValueError, OSError):  # not below the working directory, or that is gone
        short = str(Path(short).relative_to(Path.cwd()))
    return f"{short}:{line} in {function}"
