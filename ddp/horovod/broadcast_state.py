"""Copies what one rank has to all others before training: parameters, an optimizer's state, an object.

Scripts call these, after `ddp.init()` and perhaps after rank 0 has loaded a checkpoint. Nothing that arrives is
unpickled: objects are plain values (`ddp.comm.codec`), and tensors travel as their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.comm.broadcast import broadcast_tensors
from ddp.comm.codec import PLAIN, decode, encode
from ddp.comm.layout import Entry, check_same_layout
from ddp.comm.objects import device_of, gather_values
from ddp.errors import ArgumentError
from ddp.horovod.calls import Call, check_same_call, no_rank, own_group
from ddp.monitoring.stall_report import waiting_for_peers

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]

_READABLE = f"{PLAIN}: send a dict of such values instead, and rebuild the object from it"


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Tensor] | Tensor],
    root_rank: int = 0,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Overwrite `params` on every rank with those of rank `root_rank`.

    `params` is `model.state_dict()` (buffers too), `model.named_parameters()` or `model.parameters()`. Every rank must
    call it; blocks. Raises LayoutMismatchError, which names the first difference, if the ranks have other names, shapes
    or dtypes, and ArgumentError for what is no tensor.
    """
    link = own_group(group, "broadcast_parameters")
    problem, named = "", []
    try:
        named = _named_tensors(params)
    except ArgumentError as error:
        problem = str(error)
    check_same_call(
        Call("broadcast_parameters", None, f"from rank {root_rank}", problem=problem or no_rank(root_rank, link)), link
    )
    check_same_layout(link, [Entry("tensor", name, _facts(tensor)) for name, tensor in named])
    _broadcast_all([tensor for _, tensor in named], root_rank, link)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, *, group: dist.ProcessGroup | None = None
) -> None:
    """Give `optimizer` on every rank the state and the settings (learning rates, ...) of that on rank `root_rank`.

    The others may have none, or other values. Every rank must call it, with an optimizer of the same class and as many
    parameters in each group; blocks. Raises ArgumentError on every rank if these differ, or if the root's state holds
    what cannot be sent.
    """
    link = own_group(group, "broadcast_optimizer_state")
    counts = [len(param_group["params"]) for param_group in optimizer.param_groups]
    facts = f"from rank {root_rank}, {type(optimizer).__name__} with {counts} parameters in its groups"
    check_same_call(Call("broadcast_optimizer_state", None, facts, problem=no_rank(root_rank, link)), link)
    is_root = link.rank() == root_rank
    tensors: list[Tensor] = []
    state = optimizer.state_dict() if is_root else {}
    frame = broadcast_object(_taken_apart(state, tensors), root_rank, "the optimizer's state", group=link)
    if not is_root:
        devices = {"cpu": torch.device("cpu")}
        devices |= {p.device.type: p.device for each in optimizer.param_groups for p in each["params"]}
        state = _put_together(frame, tensors, devices)
    _broadcast_all(tensors, root_rank, link)
    if not is_root:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> Any:
    """Return rank `root_rank`'s `obj`; on that rank, the object itself. Tensors arrive on the CPU.

    An object is made of None, numbers, strings, bytes, tensors, and tuples, lists, sets and dicts of them. Every rank
    must call it with the same name; blocks. Raises ArgumentError on every rank if the root's is of something else.
    """
    link = own_group(group, "broadcast_object")
    is_root = link.rank() == root_rank
    data, problem = _written(obj) if is_root else (b"", "")
    data = data or problem.encode()
    call = Call(
        "broadcast_object",
        name,
        f"from rank {root_rank}",
        number=-len(data) if problem else len(data),
        problem=no_rank(root_rank, link),
    )
    length = check_same_call(call, link)[root_rank]
    received = _broadcast_bytes(data, abs(length), root_rank, link)
    if length < 0:
        text = received.decode(errors="replace")
        raise ArgumentError(f"{call}: rank {root_rank}'s object cannot be sent: {text}. It may hold {_READABLE}")
    return obj if is_root else decode(torch.frombuffer(received, dtype=torch.uint8))


def allgather_object(obj: Any, name: str | None = None, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the objects of all ranks, in their order, each of what `broadcast_object` can send.

    Every rank must call it with the same name; blocks. Raises ArgumentError on every rank if one cannot be sent.
    """
    link = own_group(group, "allgather_object")
    _, problem = _written(obj)
    problems = check_same_call(Call("allgather_object", name, "", number=int(bool(problem))), link)
    if any(problems):
        told = gather_values(problem, group=link)
        texts = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
        together = ArgumentError(f"allgather_object: {'; '.join(texts)}. An object may hold {_READABLE}")
        if not problem:
            together.failed_ranks = tuple(
                rank for rank, text in zip(dist.get_process_group_ranks(link), told, strict=True) if text
            )
        raise together
    with waiting_for_peers("allgather_object", link):
        return gather_values(obj, group=link)


def _named_tensors(params: Any) -> list[tuple[str, Tensor]]:
    items = list(params.items() if isinstance(params, Mapping) else params)
    named = []
    for index, item in enumerate(items):
        name, value = item if isinstance(item, tuple) and len(item) == 2 else (str(index), item)
        if value is None:
            continue  # a buffer that a module has not made
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            what = f"a {value.layout} tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ArgumentError(
                f"{name!r} is {what}, and only dense tensors are broadcast here: use broadcast_object for other "
                "values, broadcast_optimizer_state for an optimizer"
            )
        named.append((str(name), value))
    return named


def _facts(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device.type}"


def _broadcast_all(tensors: list[Tensor], root: int, link: dist.ProcessGroup) -> None:
    if link.size() > 1:
        with waiting_for_peers(f"broadcast from rank {root}", link):
            broadcast_tensors(link, [tensor.detach() for tensor in tensors], root)


def _written(obj: Any) -> tuple[bytes, str]:
    """`obj` as bytes, or why there are none."""
    try:
        return encode(obj).numpy().tobytes(), ""
    except Exception as error:  # whatever an unknown object raises, the other ranks must not wait for this one
        return b"", str(error) or type(error).__name__


def _broadcast_bytes(data: bytes, length: int, root: int, link: dist.ProcessGroup) -> bytearray:
    memory = bytearray(data) if link.rank() == root else bytearray(length)
    if length:
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        there = flat.to(device_of(link))
        _broadcast_all([there], root, link)
        if there is not flat:
            flat.copy_(there)
    return memory


_TENSOR = "\0tensor"  # a tensor's place in a state that travels: (_TENSOR, dtype, shape, type of device)


def _taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    """`value` with marks in the place of its tensors, which are added to `tensors` in order."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        tensors.append(value)
        return (_TENSOR, value.dtype, tuple(value.shape), value.device.type)
    return _mapped(value, lambda part: _taken_apart(part, tensors))


def _put_together(value: Any, tensors: list[Tensor], devices: Mapping[str, torch.device]) -> Any:
    """The other way, with empty tensors on `devices`, by type."""
    if isinstance(value, tuple) and value and value[0] == _TENSOR:
        _, dtype, shape, device = value
        tensors.append(torch.empty(shape, dtype=dtype, device=devices.get(device, torch.device("cpu"))))
        return tensors[-1]
    return _mapped(value, lambda part: _put_together(part, tensors, devices))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: change(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    return value
