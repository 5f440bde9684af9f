"""The positions that ranks exchange, and the report made from them: pure, without a store.

Data from other ranks is checked and made printable; a report says in at most one screen which ranks are missing and
where every rank is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

AT_FILES = "at the files of a checkpoint"  # the others wait for it as long as the group's timeout allows
MOST_POSITIONS = 32  # of models, in one answer
_TEXT_LENGTH = 400
_MOST_FINDINGS = 16  # of other ranks in a report, which should fit one screen
_SECONDARY = 5  # sorts after every other place


def printable(text: str, most: int = _TEXT_LENGTH) -> str:
    """Return `text` on one line, without control characters, cut after `most` characters."""
    line = "".join(char if char.isprintable() else " " for char in text)
    return line if len(line) <= most else line[: most - 3] + "..."


@dataclass(frozen=True)
class Position:
    """Position of a rank in the training of one model: `step` reductions are finished, `phase` has lasted `for_s`.

    `has_failed`: the phase was a collective that failed, and the model has done nothing since.
    """

    step: int
    phase: str
    is_waiting: bool
    for_s: float
    detail: str = ""
    has_failed: bool = False


@dataclass(frozen=True)
class Answer:
    """One process's answer; `question` is the newest that it answers.

    `line` is the user's code that its thread runs. `positions` are those of its living models, and `finished` has the
    steps of deleted ones. `ended` says how it left, and is empty while it trains. `is_secondary`: it left because
    another rank did.
    """

    question: int
    line: str = ""
    positions: Mapping[str, Position] = field(default_factory=dict)
    finished: Mapping[str, int] = field(default_factory=dict)
    ended: str = ""
    is_secondary: bool = False
    has_group: bool = True

    def to_json(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes) -> Answer | None:
        """Parse another rank's answer; None if it is not one."""
        try:
            read = json.loads(text)
            positions = {
                str(key): Position(
                    step=int(position["step"]),
                    phase=printable(str(position["phase"])),
                    is_waiting=bool(position["is_waiting"]),
                    for_s=float(position["for_s"]),
                    detail=printable(str(position["detail"])),
                    has_failed=bool(position["has_failed"]),
                )
                for key, position in list(read["positions"].items())[:MOST_POSITIONS]
            }
            return Answer(
                question=int(read["question"]),
                line=printable(str(read["line"])),
                positions=positions,
                finished={str(key): int(step) for key, step in read["finished"].items()},
                ended=printable(str(read["ended"])),
                is_secondary=bool(read["is_secondary"]),
                has_group=bool(read["has_group"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):  # JSONDecodeError is a ValueError
            return None

    def settles(self, question: int) -> bool:
        """Return whether no better answer will come; a process that has closed its group may still write last words."""
        return bool(self.ended) or (self.question >= question and self.has_group)


@dataclass(frozen=True)
class Heard:
    """Answers by global rank. `trouble` says why there are none, if the store itself is at fault."""

    answers: Mapping[int, Answer]
    trouble: str = ""


@dataclass(frozen=True)
class Scene:
    """Knowledge of the asking rank itself; `torchs_text` is empty after a stall."""

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
    """Common description of ranks in the same place; the likeliest cause sorts first. Order 0 is the expected place."""

    order: int
    text: str
    tail: str = ""


def describe_stall(scene: Scene, heard: Heard) -> str:
    """Describe which ranks are missing, then where every rank is: at most one screen."""
    positions = _positions(scene, heard)
    elsewhere = sorted((finding for finding in positions if finding.order), key=lambda it: (it.order, positions[it]))
    gone = find_missing(scene, heard)
    lines = [_headline(scene, gone, heard.trouble)]
    for finding in elsewhere[:_MOST_FINDINGS]:
        there = positions[finding]
        lines += [f"  {ranks_text(rank for rank, _ in there)}: {finding.text}{_durations(there)}{finding.tail}"]
    if len(elsewhere) > _MOST_FINDINGS:
        rest = [rank for finding in elsewhere[_MOST_FINDINGS:] for rank, _ in positions[finding]]
        lines.append(f"  {ranks_text(rest)}: elsewhere")
    if not heard.trouble:
        here = positions[_Finding(0, "")]
        lines.append(f"  {ranks_text(rank for rank, _ in here)}: in the {scene.what}{_durations(here)}")
    if scene.global_ranks != tuple(range(len(scene.global_ranks))):
        lines.append(f"  (ranks of a group; in the world they are {', '.join(map(str, scene.global_ranks[:64]))})")
    lines.append(_advice(scene, gone, heard.trouble))
    return "\n".join(lines)


def ranks_at_files(scene: Scene, heard: Heard) -> dict[int, Answer]:
    """Return the answers of living ranks of the group that read or write files."""
    answers = {rank: heard.answers.get(number) for rank, number in enumerate(scene.global_ranks)}
    return {
        rank: answer
        for rank, answer in answers.items()
        if answer and not answer.ended and scene.key in answer.positions
        if answer.positions[scene.key].phase == AT_FILES
    }


def describe_files(scene: Scene, heard: Heard, left_s: float) -> str:
    """Describe the ranks at files, for which others wait `left_s` more; empty if a lower rank reports it."""
    waiting = [rank for finding, there in _positions(scene, heard).items() if not finding.order for rank, _ in there]
    if scene.rank != min(waiting):
        return ""
    lines = []
    for rank, answer in ranks_at_files(scene, heard).items():
        position = answer.positions[scene.key]
        where = f"{position.detail}, at {answer.line}"
        waits = f"Rank {scene.rank} waits for it in the {scene.what} of step {scene.step + 1}"
        lines.append(
            f"ddp: rank {rank} has been {AT_FILES} for {position.for_s:.1f} s, in {where}: its file system may not "
            f"answer. {waits}, at most {left_s:.1f} s more"
        )
    return "\n".join(lines)


def find_missing(scene: Scene, heard: Heard) -> list[int]:
    """Return the ranks that are not where the asking one waits, without those that left because of another."""
    positions = _positions(scene, heard)
    elsewhere = [finding for finding in positions if finding.order]
    causes = [finding for finding in elsewhere if finding.order != _SECONDARY] or elsewhere
    return sorted(rank for finding in causes for rank, _ in positions[finding])


def _positions(scene: Scene, heard: Heard) -> dict[_Finding, list[tuple[int, float]]]:
    """Group the ranks by their finding, each with the time that it has lasted."""
    positions: dict[_Finding, list[tuple[int, float]]] = {_Finding(0, ""): [(scene.rank, scene.waited_s)]}
    if not heard.trouble:
        for rank, number in enumerate(scene.global_ranks):
            if rank != scene.rank:
                finding, for_s = _finding_of(scene, heard.answers.get(number))
                positions.setdefault(finding, []).append((rank, for_s))
    return positions


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
        return f"{ranks_text(gone)} {'is' if len(gone) == 1 else 'are'} missing: {seen}"
    return f"{seen}, and no rank is missing: all {size} are there"


def _finding_of(scene: Scene, answer: Answer | None) -> tuple[_Finding, float]:
    """Describe one other rank, and since how many seconds that has been so."""
    if answer is None:
        reason = "its process is gone, stopped or cut off, made no model yet, or native code in it holds Python's lock"
        return _Finding(1, f"does not answer: {reason}"), 0.0
    position = answer.positions.get(scene.key)
    if answer.ended or scene.key in answer.finished:
        ended = answer.ended or f"has deleted this model, and is at {answer.line}"
        after = f" (after step {answer.finished[scene.key]})" if scene.key in answer.finished else ""
        return _Finding(_SECONDARY if answer.is_secondary else 2, ended + after), 0.0
    closed = "" if answer.has_group else "; it has closed its process group"
    if position is None:
        what = "has not come here yet" if "/calls/" in scene.key else "has not made this model (yet)"
        return _Finding(3, f"{what}, and is at {answer.line}{closed}"), 0.0
    if position.is_waiting and (position.phase, position.step) == (scene.what, scene.step):
        return _Finding(0, ""), position.for_s
    text = f"step {position.step + 1}, {position.phase}"
    if position.has_failed:
        return _Finding(_SECONDARY, f"{text}, which failed there too", f", and is at {answer.line}{closed}"), 0.0
    detail = f"; {position.detail}" if position.detail else ""
    if position.is_waiting:
        return _Finding(4, f"waits in step {position.step + 1}, {position.phase}", detail + closed), position.for_s
    others = [other for key, other in answer.positions.items() if key != scene.key and other.is_waiting]
    busy = f"; it waits for another model in step {others[0].step + 1}, {others[0].phase}" if others else ""
    return _Finding(3, text, f", at {answer.line}{detail}{busy}{closed}"), position.for_s


def _advice(scene: Scene, gone: Sequence[int], trouble: str) -> str:
    if scene.torchs_text:
        return f"  the backend says: {scene.torchs_text}"
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


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `rank 3` or `ranks 0-2, 5`."""
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
