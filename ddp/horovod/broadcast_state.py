"""Copies parameters from one rank to all others before training, and gathers objects from all ranks.

Scripts call these after `ddp.init()` and possibly after rank 0 has loaded a checkpoint. Nothing is unpickled: objects
are plain values (`ddp.comm.codec`), and tensors are sent as their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp.comm.broadcast_objects import READABLE, broadcast_all, written
from ddp.comm.call_check import Call, check_same_call, no_rank
from ddp.comm.layout import Entry, check_same_layout
from ddp.comm.objects import gather_values
from ddp.errors import ArgumentError
from ddp.generation.pending_group import is_pending, left_out
from ddp.horovod.calls import own_group
from ddp.monitoring.stall_report import waiting_for_peers


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Tensor] | Tensor],
    root_rank: int = 0,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Overwrite `params` on every rank with those of rank `root_rank`.

    `params` is `model.state_dict()` (buffers too), `model.named_parameters()` or `model.parameters()`. Every rank must
    call it; blocks. Raises LayoutMismatchError, which names the first difference, if names, shapes or dtypes differ
    between the ranks, and ArgumentError for values that are not tensors.
    """
    link = own_group(group, "broadcast_parameters")
    problem, named = "", []
    try:
        named = _named_tensors(params)
    except ArgumentError as error:
        problem = str(error)
    if is_pending(link):
        left_out.extend(tensor for _, tensor in named)
        return
    check_same_call(
        Call("broadcast_parameters", None, f"from rank {root_rank}", problem=problem or no_rank(root_rank, link)), link
    )
    check_same_layout(link, [Entry("tensor", name, _facts(tensor)) for name, tensor in named])
    broadcast_all([tensor for _, tensor in named], root_rank, link)


def allgather_object(obj: Any, name: str | None = None, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order; they may hold what `broadcast_object` can send.

    Every rank must call it with the same name; blocks. Raises ArgumentError on every rank if one cannot be sent.
    """
    link = own_group(group, "allgather_object")
    _, problem = written(obj)
    problems = check_same_call(Call("allgather_object", name, "", number=int(bool(problem))), link)
    if any(problems):
        every = gather_values(problem, group=link)
        texts = [f"rank {rank}: {text}" for rank, text in enumerate(every) if text]
        together = ArgumentError(f"allgather_object: {'; '.join(texts)}. An object may hold {READABLE}")
        if not problem:
            together.failed_ranks = tuple(
                rank for rank, text in zip(dist.get_process_group_ranks(link), every, strict=True) if text
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
            continue  # a buffer that is None
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
