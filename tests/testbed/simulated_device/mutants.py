"""Takes out what ddp does for the order of a device's work, one place at a time, while ranks train on it.

`scripts/mutate --device` runs it. A place is replaced in the functions of a rank that runs, so that no world has to
import torch again.
"""

from __future__ import annotations

import ast
import builtins
import gc
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from testbed.nursery import ROOT, Nursery, WorldFailed
from testbed.simulated_device.training import WAYS, equals_the_cpu

_CALLS = {"wait", "synchronize", "record", "_record", "_started"}  # as statements
_HOST_ONLY = (
    "callbacks", "comm/shm", "comm/small_sum.py", "comm/allreduce_speed.py", "comm/call_check.py", "data/",
    "horovod/optimizer.py", "monitoring/t", "resilience/join_point.py", "training/trainer.py",
    "strategies/parameter_server/",  # a worker's copies are by PinnedBuffer and chunk_gradient.py
)  # fmt: skip
_VALUES = {  # expressions, and what is left of them
    "self.wait()": "self._memory",
    "buffer.wait()": "buffer._memory",
    "event.query()": "True",
    "all((work.wait(*timeout) for work in self._works))": "True",
    "[recorded_event(device) for device in {device for device, *_ in copied}]": "[]",
}
_NOT_NEEDED = {  # by a device, and why
    "package.wait(wait)": "only gloo's failures are raised there, and NCCL's works keep what they send",
    "all(work.wait(*timeout) for work in self._works)": "only gloo sends in pieces, in host memory",
}


@dataclass(frozen=True)
class Place:
    """`before`, from byte `begin` to `end` of a file, becomes `after`."""

    path: str
    line: int
    begin: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after or 'nothing'}"

    def source(self, after: str) -> str:
        text = (ROOT / self.path).read_bytes()
        return (text[: self.begin] + after.encode() + text[self.end :]).decode()


def places() -> list[Place]:
    """Return every wait, event record, synchronize and non-blocking copy of ddp that a device may need."""
    found = []
    for path in sorted((ROOT / "ddp").rglob("*.py")):
        name = str(path.relative_to(ROOT / "ddp"))
        if not name.startswith(_HOST_ONLY):
            found += list(_of(f"ddp/{name}", path.read_bytes()))
    return found


def _of(path: str, text: bytes) -> Iterator[Place]:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: Any, after: str) -> Place:
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        return Place(path, node.lineno, begin, end, text[begin:end].decode(), after)

    tree = ast.parse(text)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Call(ast.Attribute(attr=name) | ast.Name(id=name))) if name in _CALLS:
                yield place(node, "pass")
            case ast.Expr() if ast.unparse(node) == "self._wait(device)":
                yield place(node, "pass")
            case ast.keyword("non_blocking", value):
                yield place(value, "False")
            case ast.expr() if id(node) not in statements and (after := _VALUES.get(ast.unparse(node))) is not None:
                yield place(node, after)


def put(place: Place, after: str) -> None:
    """Have the functions of this process that hold a place run with `after` there."""
    filename = str(ROOT / place.path)
    new: dict[tuple[str, int], types.CodeType] = {}
    waiting = [compile(place.source(after), filename, "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        new[code.co_name, code.co_firstlineno] = code
        waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    for function in [each for each in gc.get_objects() if type(each) is types.FunctionType]:
        code = function.__code__
        key = (code.co_name, code.co_firstlineno)
        if code.co_filename == filename and key in new and code.co_freevars == new[key].co_freevars:
            function.__code__ = new[key]


def hits(every: Sequence[Place], names: Sequence[str], seed: int) -> dict[str, list[int]]:
    """Return the numbers of the places that each way comes to, on this rank."""
    found: set[int] = set()
    vars(builtins)["_hit"] = found.add
    gc.unfreeze()
    by_path: dict[str, list[tuple[int, Place]]] = {}
    for number, each in enumerate(every):
        by_path.setdefault(each.path, []).append((number, each))
    for each_path in by_path.values():
        source = (ROOT / each_path[0][1].path).read_bytes()
        for number, each in sorted(each_path, key=lambda pair: -pair[1].begin):
            marked = f"(_hit({number}), ({each.before}))[1]".encode()
            source = source[: each.begin] + marked + source[each.end :]
        put(Place(each_path[0][1].path, 0, 0, len((ROOT / each_path[0][1].path).read_bytes()), "", ""), source.decode())
    by_way = {}
    for name in names:
        equals_the_cpu([name], [seed], found.clear)
        by_way[name] = sorted(found)
        dist.barrier()
    return by_way


def trains(place: Place, names: Sequence[str], seeds: Sequence[int]) -> None:
    """Train with a place taken out."""
    gc.unfreeze()
    equals_the_cpu(names, seeds, lambda: put(place, place.after))


def run(folder: Path, seeds: int, only: str = "") -> int:
    """Take out each place in turn, print which are noticed, and return how many are not."""
    every = [each for each in places() if only in each.path]
    began = time.monotonic()
    missed = unseen = 0
    with Nursery(folder) as nursery:
        ways = nursery.run(2, hits, every=every, names=list(WAYS), seed=1, deadline_s=900.0)
        for number, each in enumerate(every):
            if each.before in _NOT_NEEDED:
                print(f"not needed {each}\n           {_NOT_NEEDED[each.before]}", flush=True)
                continue
            names = [name for name in WAYS if any(number in found[name] for found in ways)]
            if not names:
                unseen += 1
                print(f"not run    {each}", flush=True)
                continue
            try:
                nursery.run(2, trains, place=each, names=names, seeds=list(range(seeds)), deadline_s=600.0)
            except WorldFailed as failed:
                why = [
                    line for line in str(failed).splitlines() if "Error" in line or "Early" in line or "Waits" in line
                ]
                print(f"noticed    {each}\n           {(why or ['a rank did not end'])[0].strip()[:150]}", flush=True)
            else:
                missed += 1
                print(f"NOT NOTICED {each}  (by {', '.join(names)})", flush=True)
    took_s = time.monotonic() - began
    print(f"{len(every)} places, {missed} not noticed within {seeds} seeds, {unseen} not run, {took_s:.0f} s")
    return missed
