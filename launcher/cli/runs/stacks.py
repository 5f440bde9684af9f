"""`dtrain stacks`: where the ranks of a run are."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from launcher.cli.runs.steer import end_of, how_it_ended
from launcher.decode import decode_value
from launcher.errors import RunError
from launcher.hangs.collectives import last_calls
from launcher.hangs.positions import rank_position
from launcher.output.stacks import CALLS, write_groups
from launcher.output.text import rank_names
from launcher.protocol.reports import Evidence
from launcher.runs.control import ask
from launcher.runs.registry import Entry, choose, entries

LIMIT_S = 70.0  # for an answer: two rounds with native frames, one for another command, and a margin


@dataclasses.dataclass(frozen=True)
class Found:
    """The answer. `missing` are the ranks that did not answer within `limit_s`, by host."""

    attempt: int
    evidence: tuple[Evidence, ...]
    hosts: Mapping[str, str]
    missing: Mapping[str, Sequence[int]]
    limit_s: float


def show_stacks(word: str, ranks: Collection[int], *, native: bool, as_json: bool, say: Callable[[str], None]) -> int:
    """Print the stacks of all ranks by group, or those of `ranks` in full; return 1 if a rank did not answer."""
    entry = choose(word, entries())
    found = ask_stacks(entry, ranks, native=native)
    if as_json:
        print(json.dumps(_as_json(entry, found), indent=2))
    else:
        sys.stdout.write(write_groups(found.evidence, whole=bool(ranks)))
    for host, missing in found.missing.items():
        say(f"{rank_names(missing)} on {host} did not answer within {found.limit_s:g} s")
    return 1 if found.missing else 0


def ask_stacks(entry: Entry, ranks: Collection[int] = (), *, native: bool = False) -> Found:
    """Ask where the ranks of a run are, or only `ranks`. Blocks for a few seconds. Raises RunError."""
    answer = ask(entry, "stacks", wait_s=LIMIT_S, ranks=sorted({*ranks}), native=native)
    if answer is None:
        raise RunError(how_it_ended(end_of(entry)))
    evidence = tuple(decode_value(Evidence, each) for each in answer["evidence"])
    return Found(answer["attempt"], evidence, answer["hosts"], answer["missing"], answer["limit_s"])


def _as_json(entry: Entry, found: Found) -> Mapping[str, Any]:
    ranks = []
    for each in found.evidence:
        position = rank_position(each)
        ranks.append(
            {
                "rank": each.rank,
                "host": found.hosts.get(str(each.rank)),
                "pid": each.pid,
                "where": position.where or None,
                "call": position.call or None,
                "inside": position.inside or None,
                "state": each.state,
                "waits_in": each.waits_in or None,
                "rss_bytes": each.rss_bytes,
                "cpu_s": each.cpu_s,
                "steps": each.steps,
                "silent_s": round(each.silent_s, 3),
                "stack": each.stack,
                "native": each.native or None,
                "no_native": each.no_native or None,
                "collectives": None if each.collectives is None else last_calls(each.collectives, CALLS),
            }
        )
    return {"run_id": entry.run_id, "attempt": found.attempt, "ranks": ranks, "missing": found.missing}
