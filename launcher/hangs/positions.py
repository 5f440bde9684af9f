"""Positions of ranks, parsed from the evidence of their hosts: groups of ranks, and those that others wait for. Pure.

A stack is text printed by Python's faulthandler (3.10 to 3.14) or py-spy, or the kernel's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from launcher.frozen import dataclass
from launcher.protocol.reports import Evidence


@dataclass(frozen=True)
class RankPosition:
    """The position of one rank; all but `state` is empty if its stack could not be read."""

    where: str  # "/home/me/train.py:40 in step": the innermost frame of the user's own code, in the main thread
    call: str  # "torch.utils.cpp_extension.load": the library function called there, if it is not `inside`
    inside: str  # the innermost function of all, if it is another one
    state: str  # of the process, in words


@dataclass(frozen=True)
class Group:
    """Ranks at the same place. `note` has what is known if it is not a line of code."""

    ranks: tuple[int, ...]
    where: str
    call: str
    inside: str
    note: str


@dataclass(frozen=True)
class Frame:
    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def rank_position(evidence: Evidence) -> RankPosition:
    """Return the position of a rank."""
    frames = main_thread(evidence.stack)
    state = state_in_words(evidence)
    if not frames:
        return RankPosition("", "", "", state)
    frames = _without_bootstrap(frames)
    own = next((number for number, frame in enumerate(frames) if _is_own(frame)), 0)
    at, called, inside = frames[own], frames[:own], frames[0].function
    if called and called[0].file.startswith("<frozen importlib"):  # its functions mean nothing to users
        return RankPosition(str(at), _call(called) or "an import", "", state)
    return RankPosition(str(at), _call(called[1:]), inside if inside != at.function else "", state)


def one_place(evidence: Evidence) -> str:
    """Return the line where a rank is, or else its state."""
    position = rank_position(evidence)
    return position.where or position.state


def groups(evidence: Sequence[Evidence]) -> list[Group]:
    """Group the ranks by position, the largest group first."""
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for each in sorted(evidence, key=lambda each: each.rank):
        place = rank_position(each)
        # With a known line, the state adds little: a rank briefly in state D still answered.
        note = place.state if not place.where or each.state in ("T", "t") else ""
        found.setdefault((place.where, place.call, place.inside, note), []).append(each.rank)
    all_groups = [Group(tuple(ranks), *place) for place, ranks in found.items()]
    return sorted(all_groups, key=lambda group: (-len(group.ranks), group.ranks))


_COMMUNICATION = re.compile(
    "reduce|gather|scatter|broadcast|barrier|all_to_all|send|recv|wait|synchronize"
    "|init_process_group|new_group|destroy_process_group|rendezvous|_exchange"
    "|^meet$|^_?settle$"  # of ddp: meeting again, and waits for collectives on a device
)
_WAITING_PARTS = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",  # its forward broadcasts buffers, in C++
    "/torch/cuda/",
    "/torch/accelerator/",
    "/torch/xpu/",
)


def odd_ranks(evidence: Sequence[Evidence]) -> tuple[int, ...]:
    """Return the ranks outside any communication while most are in one: the likely cause of a hang.

    torch's DistributedDataParallel communicates inside backward, in C++: if most ranks are there, it counts as
    communication. If most meet again after a failure, a rank in a collective from before is outside.
    """
    # A stopped rank does not wait for others, wherever it is.
    stacks = {each.rank: [] if each.state in ("T", "t") else main_thread(each.stack) for each in evidence}
    for is_waiting in (_meets, _communicates, lambda frames: _communicates(frames) or _runs_backward(frames)):
        waiting = {rank for rank, frames in stacks.items() if is_waiting(frames)}
        if 2 * len(waiting) >= len(stacks):
            return tuple(sorted(stacks.keys() - waiting))
    return ()


def ranks_outside(evidence: Sequence[Evidence]) -> tuple[int, ...]:
    """Return the ranks that run code of their own outside any communication, or are stopped; not those that exit."""
    found = []
    for each in evidence:
        frames = main_thread(each.stack)
        if each.state in ("T", "t") or (
            any(map(_is_own, frames)) and not _communicates(frames) and not _runs_backward(frames)
        ):
            found.append(each.rank)
    return tuple(sorted(found))


def _meets(frames: Sequence[Frame]) -> bool:
    return any(frame.file == _MEETING and frame.function == "meet" for frame in frames)


def _communicates(frames: Sequence[Frame]) -> bool:
    return any(
        (
            (frame.file.startswith(_DDP) or any(part in frame.file for part in _WAITING_PARTS))
            and _COMMUNICATION.search(frame.function)
        )
        or (frame.file.startswith(_PARAMETER_SERVER) and frame.function == "receive")  # an idle server
        for frame in frames
    )


def _runs_backward(frames: Sequence[Frame]) -> bool:
    return any("/torch/autograd/" in frame.file and "backward" in frame.function for frame in frames)


_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device or a network disk; cannot be killed",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "I": "idle",
    "Z": "ended",
    "X": "ended",
}


def state_in_words(evidence: Evidence) -> str:
    meaning = _STATES.get(evidence.state, "unknown")
    waits = f", waits in {evidence.waits_in}" if evidence.waits_in else ""
    return f"state {evidence.state or '?'} ({meaning}){waits}"


_ROOT = Path(__file__).parents[2]
_DDP = f"{_ROOT}/ddp/"
_MEETING = f"{_DDP}generation/meeting.py"
_PARAMETER_SERVER = f"{_DDP}strategies/parameter_server/"
_BOOTSTRAP = f"{_ROOT}/launcher/agent/workers/"
_NOT_OWN = ("<", f"{_ROOT}/launcher/", _DDP)
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python\d[^/]*/")
_FOLDER = rf"(?:.*/(?:(?:site|dist)-packages|lib(?:64)?/python\d[^/]*)|{re.escape(str(_ROOT))})"  # of modules
_MODULE = re.compile(rf"{_FOLDER}/(.*?)(?:/__init__)?\.py")
_PASSES_ON = re.compile(r"_(?!_)|(?:wrapper|wrapped|inner|decorate_context)$")  # passes a call on
# `Current thread 0x... [name] (most recent call first):`, without a number if only one thread can be shown.
_FAULTHANDLER_THREAD = re.compile(r"(?:(?:Current t|T)hread 0x[0-9a-f]+.*|Stack) \(most recent call first\):")
_FAULTHANDLER_FRAME = re.compile(r'  File (?:"(.*)"|\?\?\?), line (\d+|\?\?\?) in (.*)')
_PY_SPY_THREAD = re.compile(r'Thread (?:\d+|0x[0-9A-Fa-f]+)(?:/\d+)? \([^)]*\)(?:: "(.*)")?')
_PY_SPY_FRAME = re.compile(r"    (.*) \((.*?)(?::(\d+))?\)")
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


def main_thread(stack: str) -> list[Frame]:
    """Return the frames of the main thread, the innermost first; none if the main thread is not known.

    faulthandler lists the newest thread first, so the main thread is last, unless there are over 100 and it ends with
    `...`. py-spy prints names.
    """
    threads: list[tuple[str, list[str]]] = []
    is_whole = True
    for line in stack.splitlines():
        if line.startswith("  "):  # a frame; only those of the main thread are parsed, below
            if threads:
                threads[-1][1].append(line)
        elif header := _PY_SPY_THREAD.fullmatch(line):
            threads.append((header[1] or "", []))
        elif _FAULTHANDLER_THREAD.fullmatch(line):
            threads.append(("", []))
        elif line == "...":
            is_whole = False
    lines = next((lines for name, lines in threads if name == "MainThread"), None)
    if lines is None:
        lines = threads[-1][1] if threads and is_whole and not any(name for name, _ in threads) else []
    return [frame for line in lines if (frame := _frame(line)) is not None]


def scripts_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames without those in which dtrain called the script."""
    kept = list(frames)
    while kept and (kept[-1].file.startswith((_BOOTSTRAP, "<")) or kept[-1].file == "???"):
        kept.pop()
    return kept or list(frames)


def _frame(line: str) -> Frame | None:
    if found := _FAULTHANDLER_FRAME.fullmatch(line):
        return Frame(_unescaped(found[1] or "???"), found[2], _unescaped(found[3]))
    if found := _PY_SPY_FRAME.fullmatch(line):
        return Frame(found[2], found[3] or "???", found[1])
    return None


def _unescaped(text: str) -> str:
    """Undo faulthandler's ASCII escapes in a name; a lone surrogate stays escaped."""

    def character(match: re.Match[str]) -> str:
        number = int(match[1] or match[2] or match[3], 16)
        return match[0] if 0xD800 <= number < 0xE000 or number > 0x10FFFF else chr(number)

    return _ESCAPED.sub(character, text)


def _without_bootstrap(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames without the bootstrap's, in imports of the script and in the call of the script."""
    kept = scripts_frames(frames)
    last = max((number for number, frame in enumerate(kept) if frame.file.startswith(_BOOTSTRAP)), default=-1)
    return kept[last + 1 :] or kept


def _call(frames: Sequence[Frame]) -> str:
    """Return the outermost library frame that shows what was called, as `module.function`."""
    for frame in reversed(frames):
        module = _MODULE.fullmatch(frame.file)
        if module is not None and not _PASSES_ON.match(frame.function):
            name = module[1].replace("/", ".")
            return f"the import of {name}" if frame.function == "<module>" else f"{name}.{frame.function}"
    return ""


def _is_own(frame: Frame) -> bool:
    return not frame.file.startswith(_NOT_OWN) and not _LIBRARY.search(frame.file) and frame.file != "???"
