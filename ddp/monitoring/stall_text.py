"""Says in at most one screen who is missing and where every rank is: pure functions of what the ranks told.

Called by `stall_report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddp.monitoring.stall_channel import Answer, Heard

__all__ = ["Scene", "describe_stall"]

_MOST_FINDINGS = 16  # of other ranks in a report, which should fit one screen
_VICTIM = 5  # sorts after every other place


@dataclass(frozen=True)
class Scene:
    """What the rank that asks knows by itself; no `torchs_text` after a stall."""

    rank: int
    global_ranks: tuple[int, ...]
    key: str
    step: int
    what: str
    waited_s: float
    limit_s: float
    torchs_text: str


@dataclass(frozen=True)
class _Finding:
    """What ranks in the same place have in common; the likeliest cause sorts first. Order 0 is where they should be."""

    order: int
    text: str
    tail: str = ""


def describe_stall(scene: Scene, heard: Heard) -> str:
    """Say who is missing, then where every rank is: at most one screen."""
    positions: dict[_Finding, list[tuple[int, float]]] = {_Finding(0, ""): [(scene.rank, scene.waited_s)]}
    if not heard.trouble:
        for rank, number in enumerate(scene.global_ranks):
            if rank != scene.rank:
                finding, for_s = _finding_of(scene, heard.answers.get(number))
                positions.setdefault(finding, []).append((rank, for_s))
    elsewhere = sorted((finding for finding in positions if finding.order), key=lambda it: (it.order, positions[it]))
    causes = [finding for finding in elsewhere if finding.order != _VICTIM] or elsewhere
    gone = sorted(rank for finding in causes for rank, _ in positions[finding])
    lines = [_headline(scene, gone, heard.trouble)]
    for finding in elsewhere[:_MOST_FINDINGS]:
        there = positions[finding]
        lines += [f"  {_names(rank for rank, _ in there)}: {finding.text}{_durations(there)}{finding.tail}"]
    if len(elsewhere) > _MOST_FINDINGS:
        rest = [rank for finding in elsewhere[_MOST_FINDINGS:] for rank, _ in positions[finding]]
        lines.append(f"  {_names(rest)}: elsewhere")
    if not heard.trouble:
        here = positions[_Finding(0, "")]
        lines.append(f"  {_names(rank for rank, _ in here)}: in the {scene.what}{_durations(here)}")
    if scene.global_ranks != tuple(range(len(scene.global_ranks))):
        lines.append(f"  (ranks of a group; in the world they are {', '.join(map(str, scene.global_ranks[:64]))})")
    lines.append(_advice(scene, gone, heard.trouble))
    return "\n".join(lines)


def _headline(scene: Scene, gone: Sequence[int], trouble: str) -> str:
    size = len(scene.global_ranks)
    where = f"the {scene.what} of step {scene.step + 1}"
    if scene.torchs_text:
        seen = f"{where} failed on rank {scene.rank} of {size} after {scene.waited_s:.1f} s"
    else:
        seen = f"rank {scene.rank} of {size} has waited {scene.waited_s:.1f} s in {where}"
    if trouble:
        return f"{seen}, and it is not known where the others are: {trouble}"
    if gone:
        return f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} missing: {seen}"
    return f"{seen}, and no rank is missing: all {size} are there"


def _finding_of(scene: Scene, answer: Answer | None) -> tuple[_Finding, float]:
    """Describe one other rank, and for how long that has been so."""
    if answer is None:
        reason = "its process is gone, stopped or cut off, or native code in it holds Python's lock"
        return _Finding(1, f"does not answer: {reason}"), 0.0
    position = answer.positions.get(scene.key)
    if answer.ended or scene.key in answer.finished:
        ended = answer.ended or f"has deleted this model, and is at {answer.line}"
        after = f" (after step {answer.finished[scene.key]})" if scene.key in answer.finished else ""
        return _Finding(_VICTIM if answer.is_victim else 2, ended + after), 0.0
    closed = "" if answer.has_group else "; it has closed its process group"
    if position is None:
        return _Finding(3, f"has not made this model (yet), and is at {answer.line}{closed}"), 0.0
    if position.is_waiting and (position.phase, position.step) == (scene.what, scene.step):
        return _Finding(0, ""), position.for_s
    text = f"step {position.step + 1}, {position.phase}"
    detail = f"; {position.detail}" if position.detail else ""
    if position.is_waiting:
        return _Finding(4, f"waits in step {position.step + 1}, {position.phase}", detail + closed), position.for_s
    others = [other for key, other in answer.positions.items() if key != scene.key and other.is_waiting]
    busy = f"; it waits for another model in step {others[0].step + 1}, {others[0].phase}" if others else ""
    return _Finding(3, text, f", at {answer.line}{detail}{busy}{closed}"), position.for_s


def _advice(scene: Scene, gone: Sequence[int], trouble: str) -> str:
    if scene.torchs_text:
        return f"  torch says: {scene.torchs_text}"
    if gone or trouble:
        return f"  If a rank is only slow, allow more than stall_timeout_s = {scene.limit_s:g} s."
    return (
        "  The network between the ranks may be blocked, or they sent different amounts; "
        f"if it is only slow, allow more than stall_timeout_s = {scene.limit_s:g} s."
    )


def _durations(ranks: Sequence[tuple[int, float]]) -> str:
    times = [for_s for _, for_s in ranks]
    if not max(times):
        return ""
    first, last = f"{min(times):.1f}", f"{max(times):.1f}"
    return f" for {last} s" if first == last else f" for {first} to {last} s"


def _names(ranks: Any) -> str:
    """`rank 3` or `ranks 0-2, 5`."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:12]]
    more = f" and {len(runs) - 12} more" if len(runs) > 12 else ""
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(shown)}{more}"
