"""Train on TPUs: one process on each host, and one program for the devices of all of them.

    dtrain run --hosts tpu-0,tpu-1,tpu-2,tpu-3 --nproc-per-node 1 train.py

`mesh` calls torch_xla. The processes have a gloo group as well, for communication between hosts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ddp.comm.objects import gather_bytes, gather_values
from ddp.comm.reduction import combine, payload_of
from ddp.data.replica_loader import ReplicaLoader
from ddp.data_parallel.module_watch import sparse_names
from ddp.errors import UnsupportedError
from ddp.monitoring.progress import count_step
from ddp.strategies.strategy import Strategy, join
from ddp.strategies.tpu.mesh import Mesh
from ddp.torch_internals import tree_leaves


class Tpu(Strategy):
    """Train on all devices of all processes as on one, by torch_xla's SPMD mode.

    Every process runs the whole program: batches, losses and metrics are those of the global batch, so there is one
    replica, of `devices` devices, and BatchNorm sees the global batch. `prepare` returns the model and the optimizer
    that it was given, on `world.device`; `loader` loads each process's rows and yields the global batch on the
    devices. Recorded operations run after `optimizer.step()` and before each batch.

    All processes must compute the same. Reading a value from the devices (`.item()`, `print`) between forward and
    `optimizer.step()` is part of the program: do it in every process, not only where `is_main`. The last batch of an
    epoch may be smaller; each new size is compiled once more. torch_xla's BatchNorm keeps the biased variance of the
    batch in `running_var`; torch on other devices keeps the unbiased one. If the loss is a mean over labels,
    `ddp.Trainer` reads the number of labels from the devices in every batch, and each process waits for its devices;
    with `reduction="none"`, a mean over the samples, none does.

    Raises UnsupportedError without torch_xla, LaunchEnvironmentError if not every host of the devices runs exactly one
    process. `prepare` also raises UnsupportedError for embeddings with sparse gradients, ArgumentError for a model that
    is not on the CPU.
    """

    name = "tpu"

    def __init__(self) -> None:
        world = join("gloo")
        self._mesh = Mesh(world)
        super().__init__(replace(world, device=self._mesh.device))

    @property
    def replica(self) -> int:
        return 0

    @property
    def replicas(self) -> int:
        return 1

    @property
    def is_main(self) -> bool:
        return self.world.rank == 0

    @property
    def devices(self) -> int:
        """Number of devices that share each batch."""
        return self._mesh.devices

    def _move(self, model: nn.Module) -> None:
        if names := sorted(sparse_names(model)):
            raise UnsupportedError(
                f"strategy 'tpu': {names[0]!r} gets sparse gradients, which torch_xla cannot compute: make the "
                "embedding with sparse=False"
            )
        self._mesh.move(model)

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # moves it to where the parameters are now
        self._mesh.seed(gather_values(torch.initial_seed())[0])  # dropout must drop the same everywhere
        optimizer.register_step_post_hook(self._after_step)
        return model, optimizer

    def _after_step(self, *_: Any) -> None:
        self._mesh.flush()
        count_step()

    def _new_loader(self, dataset: Any, **options: Any) -> ReplicaLoader:
        return MeshLoader(dataset, mesh=self._mesh, replica=self.world.rank, replicas=self.world.world_size, **options)

    def shard(self, batch: Any) -> Any:
        """Return the global batch, given this process's share, as from `ddp.DistributedSampler` and a DataLoader.

        All shares must have the same length, the first dimension of each tensor: with several processes, a multiple
        of the devices of a process. The global batch has them one after the other. Every process must call it; blocks.
        `loader` needs no such call.
        """
        share = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
        self._mesh.flush()
        return self._mesh.place(batch, share * self.world.world_size)

    def reduce(self, operation: str, value: Any) -> Any:
        """Reduce a value as `Strategy.reduce` does, over the one replica; the same result in every process.

        All processes should pass the same number, which counts once. If they do not, "sum" and "mean" are the mean
        over the processes, "max" and "min" go over all of them.
        """
        mine = payload_of(operation, value)
        every = gather_bytes(mine)
        if all(torch.equal(each, mine) for each in every):
            return combine(value, [mine])
        return combine(value, gather_bytes(payload_of("mean" if operation == "sum" else operation, value)))

    def sync(self) -> None:
        """Run the recorded operations, so that reading values in one process does not wait for another."""
        self._mesh.flush()


class MeshLoader(ReplicaLoader):
    """A `ReplicaLoader` of global batches: loads the rows of this process, and yields all rows, on the devices."""

    def __init__(self, dataset: Any, *, mesh: Mesh, **options: Any) -> None:
        super().__init__(dataset, **options)
        self._mesh = mesh

    def _share(self, size: int) -> range:
        return self._mesh.rows(size)

    def _handed_out(self, batch: Any, size: int) -> Any:
        self._mesh.flush()
        return self._mesh.place(batch, size)
