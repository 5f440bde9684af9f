"""Horovod's interface for PyTorch: change `import horovod.torch as hvd` to `import ddp.horovod as hvd`.

    import ddp.horovod as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

Operations (`hvd.Average`, `Sum`, `Min`, `Max`, `Product`) and compressions (`hvd.Compression.fp16`) are passed as in
Horovod. Arguments that Horovod takes by position beyond the first few are keyword-only here. Names that Horovod has and
this module lacks raise MissingNameError, an AttributeError, which names a replacement; `hasattr(hvd, name)` is False
for them.

A script that also has `import horovod` (to read its version, for `horovod.run` or `horovod.torch.elastic`) must remove
that line: Horovod need not be installed, and its own functions would not see the processes that `hvd.init()` here has
connected. Start the script with `dtrain run` instead of `horovodrun`.
"""

from ddp.comm.broadcast_objects import broadcast_object, broadcast_optimizer_state
from ddp.errors import MissingNameError
from ddp.horovod.broadcast_state import allgather_object, broadcast_parameters
from ddp.horovod.calls import Average, Handle, Max, Min, Product, Sum, is_initialized
from ddp.horovod.collectives import (
    Compression,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    cross_rank,
    cross_size,
    grouped_allreduce,
    grouped_allreduce_,
    local_rank,
    local_size,
    poll,
    rank,
    reducescatter,
    shutdown,
    size,
    synchronize,
)
from ddp.horovod.optimizer import DistributedOptimizer
from ddp.world import init

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "grouped_allreduce",
    "grouped_allreduce_",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
    "synchronize",
]

_GROUP = "make a group with torch.distributed.new_group(ranks) and pass it as group="
_BACKEND = "torch.distributed.is_nccl_available(), is_gloo_available() and is_mpi_available() report what torch has"
_BUILT = "ccl_built cuda_built ddl_built gloo_built gloo_enabled mpi_built mpi_enabled mpi_threads_supported nccl_built"
_ONE_BY_ONE = "call the function without this suffix or prefix for each tensor, or use grouped_allreduce"
_INSTEAD = {
    "Adasum": "use op=hvd.Average, with the learning rate scaled by the number of ranks if you like",
    "SyncBatchNorm": "convert the module with torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)",
    "elastic": "use ddp.State and ddp.resilient, and start with `dtrain run --max-restarts N`",
    "is_homogeneous": "compare what hvd.allgather_object(hvd.local_size()) returns",
    "join": "wrap the module in ddp.DistributedDataParallel and use its join()",
    "run": "start the script with `dtrain run`",
    "sparse_allreduce_async": "DistributedOptimizer averages sparse gradients by their rows",
    "start_timeline": "use torch.profiler, whose traces have the collectives",
    "stop_timeline": "use torch.profiler, whose traces have the collectives",
    **dict.fromkeys((*_BUILT.split(), "rocm_built"), _BACKEND),
    **dict.fromkeys(("ProcessSet", "add_process_set", "global_process_set", "remove_process_set"), _GROUP),
    **dict.fromkeys(
        ("alltoall_async", "grouped_allgather", "grouped_allreduce_async", "reducescatter_async"), _ONE_BY_ONE
    ),
    **dict.fromkeys(("grouped_allgather_async", "grouped_allreduce_async_", "grouped_reducescatter"), _ONE_BY_ONE),
}


def __getattr__(name: str) -> object:
    """Raise MissingNameError, with a replacement, for names that Horovod has and this module lacks."""
    if name in _INSTEAD:
        raise MissingNameError(f"ddp.horovod has no {name}: {_INSTEAD[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
