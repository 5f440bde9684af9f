"""Broadcasts an object or an optimizer's state to all ranks: for `ddp.resilience`, and users of `ddp.horovod`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.comm.broadcast import broadcast_tensors
from ddp.comm.call_check import Call, check_same_call, no_rank
from ddp.comm.codec import PLAIN, decode, encode
from ddp.comm.objects import device_of, member_group
from ddp.errors import ArgumentError
from ddp.generation.pending_group import is_pending, left_out
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.stall_report import waiting_for_peers

READABLE = f"{PLAIN}: send a dict of such values instead, and rebuild the object from it"


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, *, group: dist.ProcessGroup | None = None
) -> None:
    """Give `optimizer` on every rank the state and the settings (learning rates, ...) of that on rank `root_rank`.

    The others may have none, or other values. Every rank must call it, with an optimizer of the same class and as many
    parameters in each group; blocks. Raises ArgumentError on every rank if these differ, or if the root's state cannot
    be sent.
    """
    link = member_group(group, "ddp.horovod.broadcast_optimizer_state")
    if is_pending(link):
        left_out.append(optimizer)
        return
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
    broadcast_all(tensors, root_rank, link)
    if not is_root:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, *, group: dist.ProcessGroup | None = None
) -> Any:
    """Return rank `root_rank`'s `obj`; on that rank, the object itself. Tensors arrive on the CPU.

    An object consists of None, numbers, strings, bytes, tensors, and tuples, lists, sets and dicts of them. Every rank
    must call it with the same name; blocks. Raises ArgumentError on every rank if the root's has anything else.
    """
    link = member_group(group, "ddp.horovod.broadcast_object")
    is_root = link.rank() == root_rank
    data, problem = written(obj) if is_root else (b"", "")
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
        raise ArgumentError(f"{call}: rank {root_rank}'s object cannot be sent: {text}. It may hold {READABLE}")
    return obj if is_root else decode(torch.frombuffer(received, dtype=torch.uint8))


def broadcast_all(tensors: list[Tensor], root: int, link: dist.ProcessGroup) -> None:
    """Overwrite `tensors` with those of rank `root`, also if shared or strided. Every rank must call it; blocks."""
    if link.size() > 1:
        with waiting_for_peers(f"broadcast from rank {root}", link):
            broadcast_tensors(link, [tensor.detach() for tensor in tensors], root)


def written(obj: Any) -> tuple[bytes, str]:
    """Return `obj` as bytes, or the reason why it cannot be encoded."""
    try:
        return encode(obj).numpy().tobytes(), ""
    except Exception as error:  # an unknown object may raise anything; the other ranks must not wait for this one
        if is_interrupt(error):
            raise
        return b"", str(error) or type(error).__name__


def _broadcast_bytes(data: bytes, length: int, root: int, link: dist.ProcessGroup) -> bytearray:
    memory = bytearray(data) if link.rank() == root else bytearray(length)
    if length:
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        there = flat.to(device_of(link))
        broadcast_all([there], root, link)
        if there is not flat:
            flat.copy_(there)
    return memory


_TENSOR = "\0tensor"  # marks a tensor in a state that is sent: (_TENSOR, dtype, shape, type of device)


def _taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    """Replace the tensors in `value` by marks, and add them to `tensors` in order."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        tensors.append(value)
        return (_TENSOR, value.dtype, tuple(value.shape), value.device.type)
    return _mapped(value, lambda part: _taken_apart(part, tensors))


def _put_together(value: Any, tensors: list[Tensor], devices: Mapping[str, torch.device]) -> Any:
    """Replace the marks by empty tensors on `devices`, by type, and add these to `tensors`."""
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
