"""Stepping pieces on several servers is stepping whole tensors: same parameters, same state, for every optimizer."""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from testbed import same

from ddp.errors import ArgumentError, UnsupportedError
from ddp.strategies.sharding.chunk_gradient import ChunkGradient, Rows, average, average_in_rows, flatten_gradients
from ddp.strategies.sharding.optimizer_state import hyperparameters, split_state, whole_state
from ddp.strategies.sharding.partition import Chunk, Partition, partition
from ddp.strategies.sharding.shards import Shards, splits_by_element

F64 = torch.float64
SHAPES: list[tuple[int, ...]] = [(7, 5), (5,), (), (0, 3), (33, 4), (3, 0), (1,), (2, 3, 4), (6, 6)]
Make = Callable[..., torch.optim.Optimizer]
O = torch.optim  # noqa: E741  # the table below is read by columns


class Trust(torch.optim.Optimizer):
    """A step of the length of the parameter: what cannot be done by pieces. Keeps its parameters in a list as well."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.all = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's has overloads
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    assert any(p is other for other in self.all)
                    self.state[p]["count"] = self.state[p].get("count", 0) + 1
                    p.sub_(p.grad, alpha=group["lr"] * float(p.norm() / (p.grad.norm() + 1)))


OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "sgd": (O.SGD, {"lr": 0.1}),
    "sgd momentum": (O.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1}),
    "sgd nesterov": (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "sgd foreach": (O.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "sgd fused": (O.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adam": (O.Adam, {"lr": 0.01}),
    "adam amsgrad": (O.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "adam fused": (O.Adam, {"lr": 0.01, "fused": True}),
    "adam foreach": (O.Adam, {"lr": 0.01, "foreach": True, "maximize": True}),
    "adamw": (O.AdamW, {"lr": 0.01, "betas": (0.8, 0.95)}),
    "adamw tensor lr": (O.AdamW, {"lr": torch.tensor(0.01)}),
    "nadam": (O.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (O.RAdam, {"lr": 0.01}),
    "adamax": (O.Adamax, {"lr": 0.01}),
    "adadelta": (O.Adadelta, {"lr": 1.0}),
    "adagrad": (O.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "rmsprop": (O.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "rprop": (O.Rprop, {"lr": 0.01}),
    "asgd": (O.ASGD, {"lr": 0.01, "t0": 2.0}),
    "adafactor": (O.Adafactor, {"lr": 0.01}),
    "trust": (Trust, {}),
}


def build(
    make: Make,
    options: dict[str, Any],
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    *,
    dtype: torch.dtype = F64,
    values: Sequence[torch.Tensor] | None = None,
) -> Any:
    """Parameters, one of them transposed, and an optimizer of three groups with different rates."""
    torch.manual_seed(1)
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes] if values is None else [v.clone() for v in values]
    if len(shapes) > 2:
        tensors[0] = tensors[0].t().contiguous().t()
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
    third = max(1, len(parameters) // 3)
    groups: list[dict[str, Any]] = [
        {"params": parameters[:third]},
        {"params": parameters[third : 2 * third], "lr": 0.02},
        {"params": parameters[2 * third :], "weight_decay": 0.05},
    ]
    if make in (Trust, O.SparseAdam):
        groups[2].pop("weight_decay")
    return parameters, make([group for group in groups if group["params"]], **copy.deepcopy(options))


def gradients_at(step: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = F64) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    made = [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]
    return [None if step >= 2 and (number + step) % 4 == 0 else made[number] for number in range(len(shapes))]


def set_rates(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        if step == 3 and isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(0.5)
        elif step == 3:
            group["lr"] *= 0.5


def own_memory(chunks: Sequence[Chunk]) -> dict[int, torch.Tensor]:
    return {chunk.index: torch.empty(chunk.numel, dtype=chunk.dtype) for chunk in chunks}


class Servers:
    """All servers of a partition, in this process."""

    def __init__(self, optimizer: Any, parameters: Sequence[torch.Tensor], servers: int, chunk_bytes: int) -> None:
        self.optimizer, self.parameters = optimizer, list(parameters)
        self.partition: Partition = partition(
            parameters,
            servers=servers,
            chunk_bytes=chunk_bytes,
            splits=splits_by_element(optimizer),
        )
        self.memories = [torch.zeros(self.partition.bytes(s), dtype=torch.uint8) for s in range(servers)]
        self.shards = []
        for server, memory in enumerate(self.memories):
            chunks = self.partition.of(server)
            values = {chunk.index: chunk.in_memory(memory) for chunk in chunks}
            self.shards.append(Shards(optimizer, chunks, values))

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for server, shards in enumerate(self.shards):
            cut = {chunk.index: flatten_gradients(chunk, gradients) for chunk in self.partition.of(server)}
            shards.step(cut, groups=hyperparameters(self.optimizer.param_groups))

    def load(self, state: dict[str, Any]) -> None:
        for group, loaded in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
        states = split_state(self.partition, state)
        for server, shards in enumerate(self.shards):
            shards.load_state({chunk.index: states[chunk.index] for chunk in self.partition.of(server)})

    def values(self) -> list[torch.Tensor]:
        found = [torch.empty_like(p, requires_grad=False) for p in self.parameters]
        for server, shards in enumerate(self.shards):
            for chunk in self.partition.of(server):
                assert shards.values[chunk.index].data_ptr() - self.memories[server].data_ptr() == chunk.offset_bytes
                torch._foreach_copy_(chunk.in_parameters(found), chunk.in_flat(shards.values[chunk.index]))
        return found

    def state(self) -> dict[str, Any]:
        states = {index: state for shards in self.shards for index, state in shards.state().items()}
        return whole_state(self.partition, self.optimizer, states)


assert_same = functools.partial(same.assert_same, rtol=1e-14)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stepping_pieces_is_stepping_whole_tensors(name: str) -> None:
    make, options = OPTIMIZERS[name]
    shapes = [shape for shape in SHAPES if 0 not in shape] if name == "adafactor" else SHAPES  # it divides by them
    for servers, chunk_bytes in ((1, 1 << 20), (3, 120)):
        whole, optimizer = build(make, options, shapes)
        parameters, theirs = build(make, options, shapes)
        there = Servers(theirs, parameters, servers, chunk_bytes)
        for step in range(6):
            gradients = gradients_at(step, shapes)
            for p, gradient in zip(whole, gradients, strict=True):
                p.grad = None if gradient is None else torch.empty_like(p).copy_(gradient)  # strides as autograd has
            set_rates(optimizer, step)
            set_rates(there.optimizer, step)
            optimizer.step()
            there.step(gradients)
            if step == 3:  # through a checkpoint, to other servers; and to a plain optimizer
                state, values = saved_and_loaded(there.state()), there.values()
                assert_same(state, optimizer.state_dict(), name)
                parameters, theirs = build(make, options, shapes, values=values)
                there = Servers(theirs, parameters, 4 - servers, 120)
                there.load(state)
                whole, optimizer = build(make, options, shapes, values=values)
                optimizer.load_state_dict(state)
        assert_same(there.values(), [p.detach() for p in whole], name)
        assert_same(there.state(), optimizer.state_dict(), name)
        assert_same([p.detach() for p in parameters], values, "the user's own parameters were changed")
        assert not theirs.state or name == "adagrad", "the user's own optimizer was changed"


def saved_and_loaded(state: Any) -> Any:
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    return torch.load(saved, weights_only=True)


def test_a_step_of_one_chunk_leaves_the_others_alone() -> None:
    parameters, optimizer = build(*OPTIMIZERS["adamw"])
    there = Servers(optimizer, parameters, 2, 64)
    first, second = there.partition.of(0)[:2]
    shards = there.shards[0]
    before = {index: value.clone() for index, value in shards.values.items()}
    assert shards.step({first.index: torch.ones(first.numel, dtype=F64)}) == {first.index: None}
    assert not torch.equal(shards.values[first.index], before[first.index])
    assert all(torch.equal(shards.values[i], before[i]) for i in before if i != first.index)
    assert [bool(state) for state in shards.state()[second.index]] == [False] * len(second.pieces)
    for _ in range(2):  # a parameter whose chunks were stepped differently often
        shards.step({chunk.index: torch.ones(chunk.numel) for chunk in there.partition.of(0)})  # of another dtype
    state = there.state()
    assert {float(entry["step"]) for entry in state["state"].values()} == {2.0, 3.0}
    optimizer.load_state_dict(state)


def test_stepping_neighbours_as_one_is_left_and_taken_up_again() -> None:
    """Absent pieces divide a chunk, each time where they must; a loaded state is stepped together where it can be."""
    shapes = [(4, 3), (5,), (), (2, 2), (3,)]
    whole, optimizer = build(O.Adam, {"lr": 0.1}, shapes)
    parameters, theirs = build(O.Adam, {"lr": 0.1}, shapes)
    there = Servers(theirs, parameters, 1, 1 << 20)
    (chunk,) = there.partition.chunks
    units = []
    for absent in [(), (4,), (1,), (), (0, 1, 2, 3, 4), (2, 3)]:
        gradients = [None if n in absent else torch.randn_like(p) for n, p in enumerate(whole)]
        for p, gradient in zip(whole, gradients, strict=True):
            p.grad = gradient
        optimizer.step()
        there.step(gradients)
        units.append([(first, stop) for _, first, stop, _ in there.shards[0].live()])
    assert units == [[(0, 1), (1, 2), (2, 5)]] + 5 * [[(0, 1), (1, 2), (2, 4), (4, 5)]]
    assert_same(there.values(), [p.detach() for p in whole])
    assert_same(there.state(), optimizer.state_dict())
    fresh = Shards(theirs, there.partition.chunks, own_memory(there.partition.chunks))
    fresh.load_state(there.shards[0].state())
    assert len(list(fresh.live())) == 3, "by now all of the last group have made four steps"
    with pytest.raises(ArgumentError, match="not absent"):
        fresh.step({chunk.index: ChunkGradient(None)})


SPARSE: dict[str, tuple[Make, dict[str, Any]]] = {
    "sgd": (O.SGD, {"lr": 0.1}),
    "sgd momentum": (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (O.Adagrad, {"lr": 0.1}),
    "sparse adam": (O.SparseAdam, {"lr": 0.1}),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_change_and_report_their_rows(name: str) -> None:
    make, options = SPARSE[name]
    torch.sparse.check_sparse_tensor_invariants.disable()  # or torch's own optimizers warn
    shapes = [(40, 3), (9,), (25, 2)]
    for servers, chunk_bytes in ((1, 1 << 20), (3, 160)):
        torch.manual_seed(1)
        whole = [torch.nn.Parameter(torch.randn(shape, dtype=F64)) for shape in shapes]
        copies = [torch.nn.Parameter(p.detach().clone()) for p in whole]
        optimizer, theirs = make(whole, **options), make(copies, **options)
        there = Servers(theirs, copies, servers, chunk_bytes)
        for step in range(4):
            before = there.values()
            for p in whole:
                numbers = torch.randint(len(p), (step * 3,))
                p.grad = torch.sparse_coo_tensor(numbers[None], torch.randn(step * 3, *p.shape[1:]).double(), p.shape)
            if step == 2:
                whole[2].grad = None
            if step == 3 and name in ("sgd", "adagrad"):  # the others cannot, in torch
                whole[1].grad = torch.randn_like(whole[1])
            gradients = [p.grad.coalesce() if p.grad is not None and p.grad.is_sparse else p.grad for p in whole]
            optimizer.step()
            reported: list[set[int]] = [set(), set(), set()]
            for server, shards in enumerate(there.shards):
                cut = {chunk.index: flatten_gradients(chunk, gradients) for chunk in there.partition.of(server)}
                for index, changed in shards.step(cut).items():
                    pieces = there.partition.chunks[index].pieces
                    assert changed is None or len(changed) == len(pieces)
                    for piece, rows in zip(pieces, changed or [None] * len(pieces), strict=True):
                        found = range(piece.end - piece.begin) if rows is None else rows.tolist()
                        reported[piece.parameter] |= {piece.begin + row for row in found}
            for old, new, known in zip(before, there.values(), reported, strict=True):
                assert set((old != new).reshape(len(old), -1).any(1).nonzero().flatten().tolist()) <= known
            assert len(reported[0]) <= 3 * step * (step if name == "sgd momentum" else 1)
        assert_same(there.values(), [p.detach() for p in whole])
        ours, plain = there.state(), optimizer.state_dict()
        for state in (ours, plain):
            for entry in state["state"].values():
                entry.update({k: v.to_dense() for k, v in entry.items() if isinstance(v, torch.Tensor) and v.is_sparse})
        assert_same(ours, plain)


def test_several_workers_rows_of_one_piece_are_added_up() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    optimizer = O.SGD([parameter], lr=1.0)
    there = Servers(optimizer, [parameter], 1, 1 << 20)
    rows = Rows(torch.tensor([3, 1, 3]), torch.tensor([[1.0, 2.0], [5.0, 5.0], [10.0, 20.0]]))
    changed = there.shards[0].step({0: ChunkGradient(None, sparse={0: rows})})
    assert changed[0] is not None
    assert [None if each is None else each.tolist() for each in changed[0]] == [[1, 3]]
    assert there.values()[0].tolist() == [[0, 0], [-5, -5], [0, 0], [-11, -22]]
    with pytest.raises(RuntimeError, match=r"ind\w+"):
        there.shards[0].step({0: ChunkGradient(None, sparse={0: Rows(torch.tensor([4]), torch.ones(1, 2))})})


@pytest.mark.parametrize(
    ("mean_of", "dtype", "wide"),
    [(average, F64, F64), (average, torch.bfloat16, torch.float32), (average_in_rows, F64, F64)],
)
def test_the_average_of_dense_absent_and_sparse_gradients(
    mean_of: Callable[..., Any], dtype: torch.dtype, wide: torch.dtype
) -> None:
    """For every kind that three replicas may have of one parameter: none, dense, or rows."""
    (chunk,) = partition([torch.empty(6, 2, dtype=dtype)] * 27, servers=1).chunks
    torch.manual_seed(3)
    has_rows = all if mean_of is average else any
    every: list[list[torch.Tensor | None]] = [[], [], []]
    for kinds in itertools.product(("none", "dense", "rows"), repeat=3):
        for replica, kind in enumerate(kinds):
            dense = torch.randn(6, 2).to(dtype) * torch.tensor([[1.0], [0], [1], [1], [0], [0]]).to(dtype)
            every[replica].append({"none": None, "dense": dense, "rows": dense.to_sparse(1)}[kind])
    mean = mean_of(chunk, [flatten_gradients(chunk, each) for each in every], torch.empty(chunk.numel, dtype=wide))
    assert isinstance(mean, ChunkGradient)
    for position, given in enumerate(zip(*every, strict=True)):
        there = [gradient for gradient in given if gradient is not None]
        assert (position in mean.absent) == (not there)
        assert (position in mean.sparse) == (bool(there) and has_rows(gradient.is_sparse for gradient in there))
        if not there:
            continue
        expected = sum(gradient.to_dense().to(wide) for gradient in there) / 3
        found = torch.zeros(6, 2, dtype=wide)
        if position in mean.sparse:
            rows = mean.sparse[position]
            assert mean_of is average_in_rows or rows.numbers.unique().equal(rows.numbers)
            found.index_add_(0, rows.numbers, rows.values)
        elif mean.flat is not None:
            found = chunk.pieces[position].in_flat(mean.flat)
        torch.testing.assert_close(found, expected)


def test_sums_are_made_in_the_order_of_the_replicas() -> None:
    (chunk,) = partition([torch.empty(1, 1)], servers=1).chunks
    row = Rows(torch.tensor([0]), torch.tensor([[-1e8]]))
    gradients: list[torch.Tensor | ChunkGradient] = [
        torch.tensor([1e8]),
        torch.tensor([1.0]),
        ChunkGradient(None, sparse={0: row}),
    ]
    mean = average(chunk, gradients, torch.empty(1))
    assert isinstance(mean, ChunkGradient)
    assert mean.flat is not None
    assert mean.flat.tolist() == [0.0]  # 1 is lost beside 1e8; with the rows first it would not be


def test_rows_are_divided_before_they_are_added_up() -> None:
    (chunk,) = partition([torch.empty(2, 1, dtype=torch.float16)], servers=1).chunks
    large = torch.tensor([[60000.0]], dtype=torch.float16)
    rows = [ChunkGradient(None, sparse={0: Rows(torch.tensor([1]), large)}) for _ in range(2)]
    mean = average_in_rows(chunk, rows, torch.empty(2, dtype=torch.float16))
    assert isinstance(mean, ChunkGradient)
    assert mean.flat is None
    assert [each.tolist() for each in mean.sparse[0]] == [[1, 1], [[30000.0], [30000.0]]]


@pytest.mark.parametrize(("make", "options"), [(O.SparseAdam, {"lr": 0.1}), (O.SGD, {"lr": 0.1, "momentum": 0.9})])
def test_a_sparse_state_is_stepped_with_a_dense_gradient(make: Make, options: dict[str, Any]) -> None:
    whole, parameter = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(4, 2))
    optimizer, theirs = make([whole], **options), make([parameter], **options)
    there = Servers(theirs, [parameter], 1, 1 << 20)
    (chunk,) = there.partition.of(0)
    rows = torch.tensor([[1.0, 2], [0, 0], [3, 4], [0, 0]])
    for other in (rows.to_sparse(1), torch.full((4, 2), 5.0)):
        cut = [flatten_gradients(chunk, [each]) for each in (rows.to_sparse(1), other)]
        mean = average_in_rows(chunk, cut, torch.empty(chunk.numel))
        there.shards[0].step({chunk.index: mean}, groups=hyperparameters(theirs.param_groups))
        whole.grad = ((rows + other.to_dense()) / 2).to_sparse(1)
        optimizer.step()
    assert_same(there.values(), [whole.detach()])


def test_the_users_object_its_hooks_and_its_state() -> None:
    parameters, optimizer = build(O.Adam, {"lr": 0.01})
    whole, plain = build(O.Adam, {"lr": 0.01})
    for step in range(3):  # state from before, perhaps of a checkpoint
        for p, q, gradient in zip(parameters, whole, gradients_at(step, SHAPES), strict=True):
            p.grad = q.grad = gradient
        optimizer.step()
        plain.step()
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # patches the object's step()
    there = Servers(optimizer, parameters, 2, 200)
    assert_same(there.state()["state"], plain.state_dict()["state"])
    kept = copy.deepcopy(optimizer.state_dict())
    gradients = gradients_at(3, SHAPES)
    for q, gradient in zip(whole, gradients, strict=True):
        q.grad = gradient
    plain.step()
    there.step(gradients)
    assert_same(there.values(), [p.detach() for p in whole])
    assert_same(there.state()["state"], plain.state_dict()["state"])
    assert_same(optimizer.state_dict(), kept)
    assert not calls


def test_chunks_have_one_dtype_and_memory_may_be_their_own() -> None:
    shapes: list[tuple[int, ...]] = [(8, 3), (7,), (5, 5), ()]
    dtypes = [torch.float32, F64, torch.bfloat16, torch.complex64]
    made = [torch.randn(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    whole = [torch.nn.Parameter(tensor.clone()) for tensor in made]
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in made]
    optimizer, theirs = O.AdamW(whole, capturable=False), O.AdamW(parameters)
    cut = partition(parameters, servers=1)
    shards = Shards(theirs, cut.chunks, own_memory(cut.chunks))
    for _ in range(3):
        gradients = [torch.randn_like(p) for p in whole]
        for p, gradient in zip(whole, gradients, strict=True):
            p.grad = gradient
        optimizer.step()
        out = {chunk.index: torch.zeros(chunk.numel, dtype=chunk.dtype) for chunk in cut.chunks}
        shards.step({chunk.index: flatten_gradients(chunk, gradients, out[chunk.index]) for chunk in cut.chunks})
    for chunk in cut.chunks:
        for left, right in zip(chunk.in_flat(shards.values[chunk.index]), chunk.in_parameters(whole), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)
    for group in theirs.param_groups:  # as on a device; the copies are in host memory, where that cannot be
        group["capturable"] = True
    again = Shards(theirs, cut.chunks, own_memory(cut.chunks))
    again.step({0: torch.ones(24)}, groups=hyperparameters(theirs.param_groups))


class Closed(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        """Needs the model."""


def test_what_no_server_can_step_is_an_error() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    for optimizer in (O.LBFGS(parameters), Closed(parameters), O.SGD(parameters, differentiable=True)):
        with pytest.raises(UnsupportedError):
            splits_by_element(optimizer)
    assert not splits_by_element(Trust(parameters))
    assert not splits_by_element(type("Mine", (O.Adam,), {})(parameters)), "who knows what it does"
    locked = Trust(parameters)
    locked.all = open("/dev/null")  # type: ignore[assignment]  # noqa: SIM115
    chunks = partition(parameters, servers=1, splits=False).chunks
    with locked.all, pytest.raises(UnsupportedError, match="cannot be copied"):  # type: ignore[attr-defined]
        Shards(locked, chunks, own_memory(chunks))


def test_states_and_groups_of_another_model_are_errors() -> None:
    parameters, optimizer = build(*OPTIMIZERS["adam"])
    there = Servers(optimizer, parameters, 2, 64)
    there.step(gradients_at(0, SHAPES))
    state, shards = there.state(), there.shards[0]
    with pytest.raises(ArgumentError, match="other chunks"):
        shards.load_state(there.shards[1].state())
    with pytest.raises(ArgumentError, match="9 parameters, and the optimizer has 1"):
        split_state(partition([torch.empty(3)], servers=1), state)
    swapped = {**state, "state": {**state["state"], 4: state["state"][8]}}
    with pytest.raises(ArgumentError, match=r"parameter 4 has 'exp_avg' of shape \(6, 6\)"):
        split_state(there.partition, swapped)
    with pytest.raises(ArgumentError, match="param groups now"):
        shards.step({}, groups=hyperparameters(optimizer.param_groups)[:1])
