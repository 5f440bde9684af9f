"""Compare what ranks recorded of their collectives: which rank has not come to one, or came with another call. Pure.

The calls of a process group have numbers that count up in each of its ranks alike, so that the same number is the same
call. The records are those of torch's flight recorder: see agent/flight_recorder.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from launcher.frozen import dataclass
from launcher.protocol.reports import Collective, Collectives

SHOWN = 3  # disagreements
_NAMED = 8  # ranks
# These have tensors of the same number of elements in all ranks. NCCL's all_gather and reduce_scatter need not.
_ALIKE = ("all_reduce", "allreduce_coalesced", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base")

_Calls = Mapping[int, Mapping[int, Collective]]  # of a group, by rank and number


@dataclass(frozen=True)
class _Disagreement:
    ranks: frozenset[int]  # that are to blame for it
    group: str
    text: str


def compare(records: Mapping[int, Collectives], ended: Collection[int] = ()) -> tuple[str, ...]:
    """Return a line for each disagreement between these ranks, without those that only follow from another.

    `ended` are ranks whose processes have ended: their last call may have failed, which counts as done.
    """
    groups = _by_group(records)
    found = [one for name, calls in groups.items() if (one := _disagreement(name, calls, ended)) is not None]
    # A rank that waits in another group is late because of that one; if all are, they wait in a circle.
    waits = {rank: {call.group for call in record.calls if not call.done} for rank, record in records.items()}
    first = [one for one in found if not any(waits[rank] - {one.group} for rank in one.ranks)]
    return tuple(one.text for one in (first or found)[:SHOWN])


def last_calls(record: Collectives, count: int) -> list[str]:
    """Return a line for each of the last calls of a rank."""
    return [
        f"{_named(call)} of group {call.group}{'' if call.done else ', not done'}" for call in record.calls[-count:]
    ]


def _by_group(records: Mapping[int, Collectives]) -> dict[str, _Calls]:
    """Return the calls of each group by rank; a rank of the group that has made none has an empty entry."""
    found: dict[str, dict[int, dict[int, Collective]]] = {}
    for rank, record in sorted(records.items()):
        for name in record.groups:
            found.setdefault(name, {})[rank] = {}
        for call in record.calls:  # of coalesced ones, which have the same number, the first
            found.setdefault(call.group, {}).setdefault(rank, {}).setdefault(call.number, call)
    return {name: calls for name, calls in found.items() if any(calls.values())}


def _disagreement(name: str, calls: _Calls, ended: Collection[int]) -> _Disagreement | None:
    for number in sorted({number for own in calls.values() for number in own}):
        ways: dict[tuple[object, ...], list[int]] = {}
        for rank, own in calls.items():
            if number in own:
                ways.setdefault(_way(own[number]), []).append(rank)
        if len(ways) > 1:
            # The largest group of ranks first; the others may be to blame.
            alike = sorted(ways.values(), key=lambda ranks: (-len(ranks), ranks))
            said = ", ".join(f"{_ranks(ranks)} called {_call(calls[ranks[0]][number])}" for ranks in alike)
            blamed = frozenset(rank for ranks in alike[1:] for rank in ranks)
            return _Disagreement(blamed, name, f"collective {number} of group {name} is not the same: {said}")
    return _late(name, calls, ended)


def _late(name: str, calls: _Calls, ended: Collection[int]) -> _Disagreement | None:
    """Find the ranks that have made the fewest calls, while others wait in the next one."""
    last = {rank: max(own, default=0) for rank, own in calls.items()}
    least = min(last.values())
    ahead = {rank: [call for call in own.values() if call.number > least] for rank, own in calls.items()}
    ahead = {rank: own for rank, own in ahead.items() if own}
    if not any(rank in ended or any(not call.done for call in own) for rank, own in ahead.items()):
        return None
    call = min((call for own in ahead.values() for call in own), key=lambda call: call.number)
    late = [rank for rank, number in last.items() if number == least]
    has, have = ("has" if len(ranks) == 1 else "have" for ranks in (late, ahead))
    text = f"{_ranks(late)} {has} not called {_named(call)} of group {name}; {_ranks([*ahead])} {have}"
    return _Disagreement(frozenset(late), name, text)


def _way(call: Collective) -> tuple[object, ...]:
    """Return what must be the same in all ranks."""
    if call.operation not in _ALIKE:
        return (call.operation,)
    return call.operation, frozenset(part.partition("[")[0] for part in call.tensors.split("], ")), call.elements


def _named(call: Collective) -> str:
    return f"{call.operation} {call.number}" + (f" ({call.tensors})" if call.tensors else "")


def _call(call: Collective) -> str:
    return call.operation + (f" of {call.tensors}" if call.tensors else "")


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:_NAMED]))
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{', ...' if len(ranks) > _NAMED else ''}"
