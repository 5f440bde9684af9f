"""All devices of the job in one row, as torch_xla's SPMD mode sees them, and how tensors get there.

Made by `strategy`. Only this module of `ddp` imports torch_xla, and only when the strategy is used.

Under SPMD every process runs the same program on tensors that stand for all devices ("xla:0"): a batch is the global
one, with some rows on each device, and parameters are the same on each device. The compiler adds the all-reduces
(https://github.com/pytorch/xla/blob/master/docs/source/perf/spmd_basic.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp.comm.broadcast import broadcast_tensors
from ddp.comm.layout import check_same_layout, describe
from ddp.comm.objects import gather_values
from ddp.errors import ArgumentError, LaunchEnvironmentError, UnsupportedError
from ddp.torch_internals import tree_map_only
from ddp.world import World

_AXIS = "batch"


class Mesh:
    """The devices of all processes of `world`, those of a process side by side, in the order of the ranks.

    Every process must make it; blocks until all have. Raises UnsupportedError without torch_xla, LaunchEnvironmentError
    if the processes' devices cannot be one mesh.
    """

    def __init__(self, world: World) -> None:
        if world.local_world_size > 1:
            raise LaunchEnvironmentError(
                f"strategy 'tpu': {world.local_world_size} processes were started on this host, but one process drives "
                "all devices of a host: start the run with --nproc-per-node 1"
            )
        self._xla, runtime, self._spmd = _torch_xla()
        if not runtime.is_spmd():
            runtime.use_spmd()
        if (joined := runtime.process_count()) != world.world_size:
            raise LaunchEnvironmentError(
                f"strategy 'tpu': the run has {world.world_size} processes, but the runtime for PJRT_DEVICE="
                f"{os.environ.get('PJRT_DEVICE')} joins the devices of {joined}: start one process on each host of the "
                "TPU slice, on no host more; virtual devices of the CPU (PJRT_DEVICE=CPU) are one process's alone"
            )
        self.device: torch.device = self._xla.device()
        mine = [int(name.rpartition(":")[2]) for name in self._xla.real_devices()]
        every: list[list[int]] = gather_values(mine)
        ids = [device for each in every for device in each]
        self.devices = len(ids)
        self._before = sum(len(each) for each in every[: world.rank])
        self._own = len(mine)
        self._processes = world.world_size
        self._mesh = self._spmd.Mesh(ids, (len(ids),), (_AXIS,))
        self._check_rows()

    def rows(self, size: int) -> range:
        """Return the rows of a global batch of `size` on this process's devices: equal parts, fewer at the end."""
        each = -(-size // self.devices)
        return range(min(self._before * each, size), min((self._before + self._own) * each, size))

    def place(self, batch: Any, size: int) -> Any:
        """Return the global batch of `size` samples, given this process's `rows(size)`.

        Its tensors (rows, ...) become (size, ...) on the mesh; other values in the batch stay as they are. Every
        process must call it with its rows of the same batch. A host without a row passes tensors of length 0.
        """
        rows = self.rows(size)
        return tree_map_only(torch.Tensor, lambda tensor: self._placed(tensor, rows, size), batch)

    def _placed(self, tensor: torch.Tensor, rows: range, size: int) -> torch.Tensor:
        if tensor.dim() == 0 or len(tensor) != len(rows):
            raise ArgumentError(
                f"a batch has a tensor of shape {tuple(tensor.shape)}, but {len(rows)} samples of this process: each "
                "tensor must have the samples as its first dimension"
            )
        if len(rows) < size:  # rows of other processes' devices are never read here
            whole = tensor.new_empty(size, *tensor.shape[1:])
            whole[rows.start : rows.stop] = tensor
            tensor = whole
        placed = tensor.to(self.device)
        self._spmd.mark_sharding(placed, self._mesh, (_AXIS, *[None] * (tensor.dim() - 1)))
        return placed

    def _check_rows(self) -> None:
        """Raise LaunchEnvironmentError if the devices of this process hold other rows than those of `rows`."""
        size = 2 * self.devices
        numbers = self.place(torch.tensor(self.rows(size), device="cpu"), size)
        if numbers.tolist() != list(range(size)):
            raise LaunchEnvironmentError(
                f"strategy 'tpu': torch_xla {self._xla.__version__} deals rows out over {self.devices} devices in "
                "another order than this version of ddp expects"
            )

    def move(self, model: nn.Module) -> None:
        """Give all processes rank 0's parameters and buffers, and put those on the mesh, whole on each device.

        The tensors stay the same Python objects, so that an optimizer, and weights that are tied, keep them. Every
        process must call it; blocks. Raises LayoutMismatchError if the processes' models differ.
        """
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.device.type != "cpu":
                raise ArgumentError(
                    f"{name!r} is on {tensor.device}: make the model on the CPU; prepare() moves it to the devices"
                )
            tensors[id(tensor)] = tensor
        if self._processes > 1:
            group = dist.group.WORLD
            assert group is not None
            check_same_layout(group, describe({}, model.named_parameters(), model.named_buffers()))
            broadcast_tensors(group, list(tensors.values()))
        _move(tensors.values(), self.device)

    def seed(self, seed: int) -> None:
        """Seed the devices' random number generator."""
        self._xla.manual_seed(seed)

    def flush(self) -> None:
        """Start the recorded operations on the devices. Every process must call it at the same place."""
        self._xla.sync()


def _move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    # On XLA devices, Module.to() makes new parameters, unknown to the optimizer, and unties tied ones.
    for tensor in tensors:
        moved = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, tensor.requires_grad)
            moved.grad = None if tensor.grad is None else tensor.grad.to(device)
        try:
            torch.utils.swap_tensors(tensor, moved)
        except RuntimeError as error:  # a graph or a weak reference still has the tensor
            raise ArgumentError(
                f"a tensor of shape {tuple(tensor.shape)} of the model cannot be moved to {device}: {error}; call "
                "prepare() before the model's first forward pass"
            ) from error


def _torch_xla() -> tuple[Any, Any, Any]:
    """Import torch_xla, its runtime and its SPMD module. Raises UnsupportedError with the command that installs it."""
    try:
        import torch_xla
        import torch_xla.distributed.spmd
        import torch_xla.runtime
    except ImportError as error:
        raise UnsupportedError(
            f"strategy 'tpu' needs torch_xla, built for the same version of torch (here {torch.__version__}): "
            f"pip install torch==2.9.0 'torch_xla[tpu]==2.9.0'; importing it failed with {error}"
        ) from error
    return torch_xla, torch_xla.runtime, torch_xla.distributed.spmd
