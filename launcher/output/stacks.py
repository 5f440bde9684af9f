"""What is said of where the ranks are: in one line a group, and in full. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.hangs.positions import Group, groups, odd_ranks, state_in_words
from launcher.output.text import ranges
from launcher.protocol import Evidence

__all__ = ["odd_one_out", "one_line", "write_out"]


def one_line(group: Group) -> str:
    """Say where a group is: `ranks 0-2,5 are at train.py:40 in step, inside all_reduce`.

    With the call that leads there: `train.py:17 in <module>, in torch.utils.cpp_extension.load, inside wait`.
    """
    many = len(group.ranks) != 1
    who = f"{'ranks' if many else 'rank'} {ranges(group.ranks)}"
    if not group.where:
        return f"{who}: {group.note}"
    call = f", in {group.call}" if group.call else ""
    inside = f", inside {group.inside}" if group.inside else ""
    note = f" ({group.note})" if group.note else ""
    return f"{who} {'are' if many else 'is'} at {group.where}{call}{inside}{note}"


def write_out(evidence: Sequence[Evidence]) -> str:
    """Return everything that is known of all ranks, as it is kept in the run's folder."""
    summary = [one_line(group) for group in groups(evidence)]
    if odd := odd_one_out(evidence):
        summary.append(odd)
    parts = ["\n".join(summary) or "no rank could be asked"]
    for each in sorted(evidence, key=lambda each: each.rank):
        used = f"{_size(each.rss_bytes)} resident, {each.cpu_s:.1f} s of CPU"
        header = f"rank {each.rank} (pid {each.pid}): {state_in_words(each)}, {used}"
        stack = each.stack.rstrip() or "its stack could not be read: it is not a Python program, or it did not answer"
        parts.append(f"{header}\n{stack}")
    return "\n\n".join(parts) + "\n"


def odd_one_out(evidence: Sequence[Evidence]) -> str:
    """Say which ranks to look at first, where most wait for others and a few do something else; else nothing."""
    odd = odd_ranks(evidence)
    if not odd:
        return ""
    who = f"{'rank' if len(odd) == 1 else 'ranks'} {ranges(odd)}"
    return f"{len(evidence) - len(odd)} of {len(evidence)} ranks wait for others: look at {who} first"


def _size(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.0f} MiB"
