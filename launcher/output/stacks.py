"""Text on where the ranks are: one line per group, and in full. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.hangs.collectives import compare, last_calls
from launcher.hangs.positions import Group, groups, main_thread, odd_ranks, scripts_frames, state_in_words
from launcher.machine.oom import memory_size
from launcher.output.text import rank_names
from launcher.protocol.reports import Evidence

CALLS = 8  # of collectives, shown of each rank


def one_line(group: Group) -> str:
    """Format where a group is: `ranks 0-2,5 are at train.py:40 in step, inside all_reduce`.

    With the call that led there: `train.py:17 in <module>, in torch.utils.cpp_extension.load, inside wait`.
    """
    many = len(group.ranks) != 1
    who = rank_names(group.ranks)
    if not group.where:
        return f"{who}: {group.note}"
    call = f", in {group.call}" if group.call else ""
    inside = f", inside {group.inside}" if group.inside else ""
    note = f" ({group.note})" if group.note else ""
    return f"{who} {'are' if many else 'is'} at {group.where}{call}{inside}{note}"


def one_line_of(evidence: Evidence) -> str:
    """Format where one rank is."""
    (group,) = groups([evidence])
    return one_line(group)


def write_out(evidence: Sequence[Evidence]) -> str:
    """Return everything known about all ranks, as written to the run's folder."""
    summary = [one_line(group) for group in groups(evidence)]
    if odd := odd_one_out(evidence):
        summary.append(odd)
    summary += _disagreements(evidence)
    parts = ["\n".join(summary) or "no rank could be asked"]
    parts += [_whole(each) for each in sorted(evidence, key=lambda each: each.rank)]
    return "\n\n".join(parts) + "\n"


def write_groups(evidence: Sequence[Evidence], *, whole: bool) -> str:
    """Return where the ranks are, by group, with the main thread of each first rank; `whole`: as `write_out`."""
    if whole or not evidence:
        return write_out(evidence)
    by_rank = {each.rank: each for each in evidence}
    parts = []
    for group in groups(evidence):
        first = by_rank[group.ranks[0]]
        frames = [f"  {frame}" for frame in scripts_frames(main_thread(first.stack))] or [
            "  its stack could not be read"
        ]
        lines = _native(first).splitlines() or frames
        of = [f"  of rank {first.rank}, {state_in_words(first)}:"] if len(group.ranks) > 1 else []
        parts.append("\n".join([one_line(group), *of, *lines]))
    if last := [*filter(None, [odd_one_out(evidence)]), *_disagreements(evidence)]:
        parts.append("\n".join(last))
    return "\n\n".join(parts) + "\n"


def _whole(each: Evidence) -> str:
    used = f"{memory_size(each.rss_bytes)} resident, {each.cpu_s:.1f} s of CPU"
    header = f"rank {each.rank} (pid {each.pid}): {state_in_words(each)}, {used}"
    stack = each.stack.rstrip() or "its stack could not be read: it is not a Python program, or it did not answer"
    missing = [f"no native frames: {each.no_native}"] if each.no_native else []
    calls = last_calls(each.collectives, CALLS) if each.collectives else []
    collectives = ["its last collectives:", *(f"  {call}" for call in calls)] if calls else []
    return "\n".join([header, _native(each) or stack, *missing, *collectives])


def _native(each: Evidence) -> str:
    return each.native.rstrip()


def _disagreements(evidence: Sequence[Evidence]) -> list[str]:
    return [*compare({each.rank: each.collectives for each in evidence if each.collectives})]


def odd_one_out(evidence: Sequence[Evidence]) -> str:
    """Name the ranks to look at first if most wait for others and a few do not; otherwise empty."""
    odd = odd_ranks(evidence)
    if not odd:
        return ""
    waiting = len(evidence) - len(odd)
    wait = "waits" if waiting == 1 else "wait"
    return f"{waiting} of {len(evidence)} ranks {wait} for others: look at {rank_names(odd)} first"
