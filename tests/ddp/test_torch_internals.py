"""The private names of torch that ddp needs are there and do what they are for, and only one file of ddp has any."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ddp import torch_internals as internals

ROOT = Path(__file__).resolve().parents[2]
NOT_TORCHS = {"os._exit", "sys._current_frames", "memory._owner"}  # the last: of a ctypes array


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _own_names(tree: ast.AST) -> set[str]:
    """What a file defines: functions, classes, variables, arguments, and attributes of `self`."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return own


def private_names(source: str, inherited: frozenset[str] = frozenset()) -> Iterator[str]:
    """What a file uses of others' private names: attributes, in getattr() and the like too, modules and imports.

    `inherited` are names that classes of other files may give to `self`.
    """
    tree = ast.parse(source)
    own = _own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            if ast.unparse(node.value) == "self" and node.attr in inherited:
                continue
            if ast.unparse(node) not in NOT_TORCHS:
                yield ast.unparse(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for name in (f"{module}.{alias.name}" if module else alias.name for alias in node.names):
                if any(map(_is_private, name.split("."))):
                    yield name
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = str(getattr(node.args[1], "value", ""))
            if _is_private(name) and name not in own:
                yield name


def test_no_other_file_of_ddp_has_a_private_name_of_torch() -> None:
    files = {str(file.relative_to(ROOT)): file for file in (ROOT / "ddp").rglob("*.py")}
    texts = {name: file.read_text(encoding="utf-8") for name, file in files.items() if name != "ddp/torch_internals.py"}
    inherited = frozenset(name for text in texts.values() for name in _own_names(ast.parse(text)))
    found = {name: [*private_names(text, inherited)] for name, text in texts.items()}
    assert {name: names for name, names in found.items() if names and "_fields" not in names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "torch._C._storage_Use_Count(x)",
        "module._backward_hooks = None",
        "from torch.utils._pytree import tree_map",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch._dynamo",
        "getattr(model, '_orig_mod', None)",
        "self._join_config.enable",
    ],
)
def test_the_rule_finds_private_names(source: str) -> None:
    assert list(private_names(source))


def test_the_rule_leaves_own_names_alone() -> None:
    source = "class A:\n    def __init__(self, _x):\n        self._own = _x.__dict__\n\nA(1)._own, os._exit"
    assert not list(private_names(source))


# Each of them with the installed torch


def test_a_backward_pass_tells_its_number_its_nodes_and_its_end() -> None:
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    nodes = [get_gradient_edge(parameter).node for parameter in (used, unused)]
    seen: dict[str, Any] = {}

    def on_grad(_: torch.Tensor) -> None:
        seen["number"] = internals.current_backward()
        seen["reached"] = [internals.will_be_reached(node) for node in nodes]
        internals.call_after_backward(lambda: seen.update(grad=used.grad))

    output = used * 2
    output.register_hook(on_grad)
    output.register_hook(lambda _: seen.update(node=internals.current_node()))
    assert internals.current_backward() == -1
    output.sum().backward()
    assert seen["number"] >= 0
    assert seen["reached"] == [True, False]
    assert seen["grad"] is used.grad
    assert seen["node"].name() == "MulBackward0"


def test_a_captured_leaf_is_an_error_to_ask_for() -> None:
    leaf = nn.Parameter(torch.ones(2))
    node, reported = get_gradient_edge(leaf).node, []

    def on_grad(_: torch.Tensor) -> None:
        with pytest.raises(RuntimeError):
            internals.will_be_reached(node)
        reported.append(True)

    output = leaf * 2
    output.register_hook(on_grad)
    torch.autograd.grad(output.sum(), leaf)
    assert reported


def test_gradient_hooks_are_those_in_the_order_of_registration() -> None:
    parameter = nn.Parameter(torch.ones(1))
    assert internals.gradient_hooks(parameter) is None
    handles = [parameter.register_post_accumulate_grad_hook(print) for _ in range(2)]
    assert list(internals.gradient_hooks(parameter)) == [handle.id for handle in handles]


def test_owners_of_memory_and_of_tensors_are_counted() -> None:
    tensor = torch.ones(4)
    alone = internals.memory_owner_count(tensor.untyped_storage())
    view = tensor[:2]
    assert internals.memory_owner_count(tensor.untyped_storage()) == alone + 1
    count = present(internals.tensor_owner_count)
    before = count(view)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = view
    assert count(view) == before + 1


def test_versions_count_and_many_tensors_are_copied_at_once() -> None:
    tensors, sources = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    before = internals.version_of(tensors[0])
    internals.foreach_copy(tensors, sources)
    assert internals.version_of(tensors[0]) == before + 1
    assert all(map(torch.equal, tensors, sources))


def test_many_tensors_are_put_together_at_once() -> None:
    tensors = [torch.tensor(1.0), torch.arange(6.0).view(2, 3).t(), torch.zeros(0), nn.Parameter(torch.ones(2))]
    for flatten in (internals.flatten_tensors, internals._flatten_each):
        assert flatten(tensors).tolist() == [1, 0, 3, 1, 4, 2, 5, 1, 1]


def test_many_tensors_are_added_at_once() -> None:
    for add in (internals.foreach_add, internals._add_each):
        tensors = [torch.ones(2), torch.zeros(2, 2).t()]
        add(tensors, [torch.ones(2), torch.arange(4.0).view(2, 2)])
        assert [each.tolist() for each in tensors] == [[2, 2], [[0, 1], [2, 3]]]


def test_many_tensors_are_divided_at_once() -> None:
    dense, sparse = torch.full((2,), 6.0), torch.eye(2).mul(9).to_sparse()
    internals.foreach_divide([dense, sparse], 3.0)
    assert dense.tolist() == [2, 2]
    assert torch.equal(sparse.to_dense(), torch.eye(2).mul(3))


def test_modules_give_their_dicts() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert internals.submodules_of(module) == {"0": module[0]}
    assert [*internals.parameters_of(module[0])] == ["weight", "bias"]
    assert "running_mean" in internals.buffers_of(module[0])
    internals.apply_to_tensors(module, lambda tensor: tensor.double())
    assert module[0].weight.dtype == module[0].running_mean.dtype == torch.float64
    TorchDistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    assert internals.ignored_names(module) == {"0.weight"}


def test_torch_compile_knows_them() -> None:
    module = nn.Linear(2, 2)
    assert internals.compiled_module(module) is None
    assert internals.compiled_module(torch.compile(module, backend="eager")) is module
    internals._skip_when_compiling((lambda: None).__code__)
    assert not internals.in_compiled_autograd()
    assert internals.not_traced(lambda: 1)() == 1
    assert internals.swap_active_ddp_module(module) is None
    assert TorchDistributedDataParallel._get_active_ddp_module() is module
    assert internals.swap_active_ddp_module(None) is module


def test_process_groups_tell_their_store_backend_and_timeout(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=7))
    try:
        group = present(dist.group.WORLD)
        internals.default_store().set("key", "value")
        assert internals.default_store().get("key") == b"value"
        assert isinstance(internals.backend_of(group, cpu), dist.ProcessGroupGloo)
        assert cpu in internals.device_types_of(group)
        assert internals.timeout_of(group, cpu) == timedelta(seconds=7)
        assert internals.timeout_of(group, torch.device("xpu")) is None
        into, mine = torch.zeros(2), torch.ones(2)
        work = internals.allgather_flat(group, into, mine)
        work.wait()
        assert into.tolist() == [1, 1]
        assert isinstance(work.get_future(), internals.AnyFuture)
    finally:
        dist.destroy_process_group()
    assert isinstance(torch.futures.Future(), internals.AnyFuture)
    assert internals.device_index(3) == 3


def test_optimizers_tell_their_hooks_and_who_steps_in_backward() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not internals.in_backward_optimizers(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which this imports
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
    assert [type(optimizer) for optimizer in internals.in_backward_optimizers(parameter)] == [torch.optim.SGD]
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for when in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
        assert internals.state_dict_hooks(optimizer, when) == []
        getattr(optimizer, f"register_{when}_hook")(print)
        assert internals.state_dict_hooks(optimizer, when) == [print]
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    internals.mark_as_stepped(optimizer)
    assert optimizer._opt_called


def test_a_joinable_tells_whether_it_is_in_join() -> None:
    class Alone(dist.algorithms.join.Joinable):
        join_hook = join_device = join_process_group = None  # type: ignore[assignment]  # nothing asks for them

        def __init__(self) -> None:
            super().__init__()

    joinable = Alone()
    assert not internals.is_in_join(joinable)


def test_trees_are_flattened_and_mapped() -> None:
    tree = {"a": [1, 2], "b": (3,)}
    assert internals.tree_leaves(tree) == internals.tree_flatten(tree)[0] == [1, 2, 3]
    assert internals.tree_map(lambda leaf: leaf + 1, tree) == {"a": [2, 3], "b": (4,)}
    assert internals.tree_map_only(str, len, ["abc", 1]) == [3, 1]
