"""What is left of ddp with a torch that lacks one of the private names that ddp/torch_internals.py uses.

    python -m programs.hidden_names FOLDER NAME...

One process imports torch, but not ddp. For each name it forks a world of two ranks, in which that file alone asks for
another name in its place, one that torch does not have; torch itself is whole. That world tries the features that call
something of the file which the name is in: a first world, with all names, has tried all features and noted what each
calls. Prints {name: [{feature: outcome} of each rank]} as JSON; an outcome is "works", or what was raised or warned of.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
import inspect
import json
import pickle
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

from testbed import nursery
from testbed.fork_memory import share_memory

FILE = nursery.ROOT / "ddp/torch_internals.py"
GONE = "_gone"
DEADLINE_S = 100.0


def torchs_names(source: str) -> list[str]:
    """The private names that a file asks torch for, and what it asks those for: in attributes and in strings."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        parts = _parts(node)
        while parts and (not _is_private(parts[0]) or parts[0] in own):
            parts = parts[1:]
        found |= dict.fromkeys(part for part in parts if part not in own)
    return [*found]


def _is_private(name: str) -> bool:
    return re.match("_[^_]", name) is not None


def _parts(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*_parts(node.value), node.attr]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
        return node.value.split(".")
    return []


class _Rename(ast.NodeTransformer):
    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == self.name and any(_is_private(part) for part in _parts(node)):
            node.attr += GONE
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            node.value = re.sub(rf"\b{self.name}\b", self.name + GONE, node.value)
        return node


class _NoteCalls(ast.NodeTransformer):
    """Have each function, and each constant that may be one, note that it is called, by its name in the module."""

    def visit_Module(self, node: ast.Module) -> ast.Module:
        for statement in node.body:
            name = _defined(statement)
            if isinstance(statement, ast.FunctionDef):
                for function in ast.walk(statement):
                    if isinstance(function, ast.FunctionDef):
                        function.body[:0] = ast.parse(f"_called.add({name!r})").body
            elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value:
                statement.value = ast.Call(ast.Name("_noting", ast.Load()), [ast.Constant(name), statement.value], [])
        return ast.fix_missing_locations(node)


class _Changing(SourceFileLoader):
    """Finds and loads that one file, changed. What it can note as called is in `known`, what was called in `called`."""

    def __init__(self, change: ast.NodeTransformer) -> None:
        super().__init__("ddp.torch_internals", str(FILE))
        self._change = change
        self.known = {_defined(each) for each in _tree().body if isinstance(each, ast.FunctionDef)}
        self.called: set[str] = set()

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(fullname, FILE, loader=self) if fullname == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._change.visit(_tree()), str(FILE), "exec")

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_called=self.called, _noting=self._noting)
        super().exec_module(module)

    def _noting(self, name: str, value: Any) -> Any:
        if not inspect.isroutine(value):
            return value
        self.known.add(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.called.add(name)
            return value(*args, **kwargs)

        return call


def _tree() -> ast.Module:
    return ast.parse(FILE.read_text(encoding="utf-8"))


def _defined(statement: ast.stmt) -> str:
    """The name that a statement of a module defines, else ""."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement.name
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return next((each.id for each in targets if isinstance(each, ast.Name)), "")


def touched(hidden: str) -> set[str]:
    """What the file defines by asking for the name, or by means of such a definition; "" if that is unknown."""
    body = _tree().body
    found = {_defined(each) for each in body if ast.dump(_Rename(hidden).visit(copy.deepcopy(each))) != ast.dump(each)}
    while more := {_defined(each) for each in body if not found.isdisjoint(_loaded(each))} - found:
        found |= more
    return found


def _loaded(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id


def noted() -> tuple[dict[str, str], set[str], dict[str, set[str]]]:
    """On each rank, with all names: what becomes of each feature, what can be noted as called, what each calls."""
    sys.meta_path.insert(0, loader := _Changing(_NoteCalls()))
    said: dict[str, str] = {}
    called: dict[str, set[str]] = {}
    for name in FEATURES:
        loader.called.clear()
        said |= _outcomes([name])
        called[name] = {*loader.called}
    return said, loader.known, called


def outcomes(hidden: str, features: Sequence[str]) -> dict[str, str]:
    """On each rank: what becomes of these features."""
    assert "ddp" not in sys.modules
    sys.meta_path.insert(0, _Changing(_Rename(hidden)))
    return _outcomes(features)


def _outcomes(features: Iterable[str]) -> dict[str, str]:
    import torch.distributed as dist

    found = {}
    for name in features:
        found[name] = "\n".join(_try(FEATURES[name])) or "works"
        dist.barrier()  # a rank that goes on, or ends, would fail the other, which is not as far
    return found


def _try(feature: Callable[[], None]) -> Iterator[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            feature()
        except Exception as error:
            yield f"{type(error).__name__}: {error}"
    yield from (str(warning.message) for warning in caught)


def _import() -> None:
    import ddp  # noqa: F401


def _model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.ReLU(), nn.Linear(4, 2)).double()


def _follows_whole_batch(wrap: Callable[[Any], Any], optimizer_of: Callable[[Any], Any] | None = None) -> None:
    """Three steps on two shares give what one process gets from the whole batch."""
    import torch
    import torch.distributed as dist

    x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)
    alone, shared = _model(), _model()
    model = wrap(shared)
    steps = [(alone, torch.optim.SGD(alone.parameters(), 0.1), x)]
    own = torch.optim.SGD(shared.parameters(), 0.1)
    steps.append((model, optimizer_of(own) if optimizer_of else own, x.chunk(2)[dist.get_rank()]))
    for _ in range(3):
        for net, optimizer, share in steps:
            optimizer.zero_grad()
            net(share).square().mean().backward()
            optimizer.step()
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12), "the average is wrong"


def _step() -> None:
    import ddp

    _follows_whole_batch(ddp.DistributedDataParallel)


def _join() -> None:
    import ddp

    model = ddp.DistributedDataParallel(_model())
    with model.join():
        model(_x()).sum().backward()


def _device_ids() -> None:
    from ddp.torch_internals import device_index

    assert device_index(1) == 1


def _local_sgd() -> None:
    import torch

    import ddp

    model = ddp.DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    local = ddp.LocalSGD(model, optimizer, every=2)
    for _ in range(2):
        model(_x()).sum().backward()
        optimizer.step()
    local.sync()


def _int8() -> None:
    import ddp

    model = ddp.DistributedDataParallel(_model(), compression="int8")
    model(_x()).sum().backward()


def _sparse_rows() -> None:
    from torch import nn

    import ddp

    model = ddp.DistributedDataParallel(nn.Embedding(8, 2, sparse=True))
    model(_x().long()).sum().backward()


def _horovod() -> None:
    import ddp.horovod as hvd

    _follows_whole_batch(lambda model: model, hvd.DistributedOptimizer)


def _verify() -> None:
    import ddp

    assert ddp.verify(_model(), lambda model, x: model(x).square().mean(), _x()).ok


def _central_storage() -> None:
    import torch

    import ddp

    model = _model()
    model, optimizer = ddp.strategy("central_storage").prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    model(_x()).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def _control_group() -> None:
    import torch
    import torch.distributed as dist

    from ddp.comm.objects import control_group

    group = dist.new_group(backend="cuda:gloo")
    assert isinstance(group, dist.ProcessGroup)
    control_group(group, torch.device("cuda"))


def _other_devices_beside_shm() -> None:
    import torch
    import torch.distributed as dist

    import ddp.comm.shm.backend  # noqa: F401

    try:
        group: Any = dist.new_group(backend="cpu:shm,cuda:gloo")
        group._get_backend(torch.device("cuda"))
    finally:
        dist.barrier()  # or the first closes before the other is connected, also where it fails
    dist.destroy_process_group(group)


def _version() -> None:
    from ddp.torch_internals import version_of

    x = _x()
    assert version_of(x.add_(1)) == 1


def _compiled_state() -> None:
    import torch

    from ddp.torch_internals import unwrapped

    model = _model()
    assert unwrapped(cast(torch.nn.Module, torch.compile(model, backend="eager"))) is model


def _x() -> Any:
    import torch

    return torch.zeros(4, 3, dtype=torch.float64)


FEATURES: dict[str, Callable[[], None]] = {
    "import": _import,
    "step": _step,
    "join": _join,
    "device_ids": _device_ids,
    "LocalSGD": _local_sgd,
    "int8": _int8,
    "sparse rows": _sparse_rows,
    "horovod": _horovod,
    "verify": _verify,
    "central storage": _central_storage,
    "control group": _control_group,
    "other devices beside shm": _other_devices_beside_shm,
    "buffers' versions": _version,
    "states of compiled models": _compiled_state,
}


def main(parent: Path, names: Sequence[str]) -> None:
    """Fork a world for each name, and for none at all ("")."""
    import torch._dynamo  # noqa: F401  # which the first step of an optimizer imports, in seconds

    _import_what_ddp_does(parent)
    share_memory()
    began = time.monotonic()
    ranks = _run(parent, 2, "noted")
    if not isinstance(ranks[0], tuple):
        raise SystemExit(ranks[0])
    found: dict[str, Any] = {"": [said for said, _, _ in ranks]}
    for name in names:
        found[name] = _run(parent, 2, "outcomes", hidden=name, features=_features_to_try(touched(name), ranks))
        print(f"{time.monotonic() - began:.1f} s: {name} {found[name]}", file=sys.stderr)
    print(json.dumps(found))


def _features_to_try(touched: set[str], ranks: list[tuple[dict[str, str], set[str], dict[str, set[str]]]]) -> list[str]:
    """Those that call something of these, and the import; all, if no one can tell or the import calls some."""
    known = set.intersection(*(known for _, known, _ in ranks))
    calling = [name for name in FEATURES if any(not touched.isdisjoint(called[name]) for _, _, called in ranks)]
    return [*FEATURES] if "import" in calling or not touched <= known else ["import", *calling]


def _run(parent: Path, world_size: int, case: str, **arguments: Any) -> list[Any]:
    """Run a function of this module in a new world; return what each rank's call returned, or why it failed."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        ranks = range(world_size)
        name = f"programs.hidden_names:{case}"
        pids = {nursery._fork(rank, world_size, name, "gloo", arguments, Path(folder)): rank for rank in ranks}
        if failure := nursery._watch(pids, DEADLINE_S, Path(folder)):
            return [failure] * world_size
        return [pickle.loads((Path(folder) / f"result.{rank}").read_bytes()) for rank in ranks]


def others_of_ddp() -> list[str]:
    """The modules that importing ddp imports, but for its own."""
    before = {*sys.modules}
    _import()
    return [name for name in sys.modules if name not in before and name.partition(".")[0] != "ddp"]


def _import_what_ddp_does(parent: Path) -> None:
    for name in _run(parent, 1, "others_of_ddp")[0]:
        with contextlib.suppress(ImportError):  # made by another module
            importlib.import_module(name)
    assert not [name for name in sys.modules if name.partition(".")[0] == "ddp"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
