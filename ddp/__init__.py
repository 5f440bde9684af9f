"""Data-parallel training: every rank holds the whole model and a share of the data, and gradients are averaged.

Two lines make a single-process script distributed:

    world = ddp.init()  # who this rank is; without a launcher, a world of one
    model = ddp.DistributedDataParallel(model.to(world.device))  # averages gradients during backward

and `ddp.DistributedSampler(dataset)` gives each rank its share of the data. `ddp.Checkpoint(folder)` saves all that a
run needs to go on, and finds the newest whole one when it starts again. Start the script with `dtrain run`,
torchrun, mpirun or srun, or alone with plain python.

Other ways to train the same loop are behind `ddp.strategy(name)`; `ddp.Trainer` is the loop already written;
`ddp.DistributedOptimizer` and the collectives are for scripts in Horovod's style.
"""

from ddp.callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    History,
    LearningRateScheduler,
    LinearScaling,
    ModelCheckpoint,
    ProgressBar,
    TensorBoard,
)
from ddp.checkpoint.checkpoint import Checkpoint, Restored
from ddp.compression import Half, Int8, PowerSGD, make_compression
from ddp.data.metrics import gather_metrics, gather_samples
from ddp.data.sampler import DistributedSampler
from ddp.data_parallel.tracing import skip_package
from ddp.data_parallel.wrapper import DistributedDataParallel
from ddp.errors import (
    ArgumentError,
    BackwardError,
    CheckpointError,
    CollectiveError,
    DdpError,
    DriftError,
    KeyRefusedError,
    LaunchEnvironmentError,
    LayoutMismatchError,
    NotInitializedError,
    ParameterServerError,
    PeerFailedError,
    RendezvousError,
    UnsupportedError,
    VersionMismatchError,
)
from ddp.horovod.broadcast_state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from ddp.horovod.collectives import (
    Average,
    Compression,
    Handle,
    Max,
    Min,
    Product,
    Sum,
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
    is_initialized,
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
from ddp.strategies.local_sgd.averaging import LocalSGD
from ddp.strategies.strategy import Strategy, strategy
from ddp.training.trainer import Trainer
from ddp.verify.verification import Difference, Verification, verify
from ddp.world import World, init

__all__ = [
    "ArgumentError",
    "Average",
    "BackwardError",
    "CSVLogger",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "CollectiveError",
    "Compression",
    "DdpError",
    "Difference",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "DistributedSampler",
    "DriftError",
    "EarlyStopping",
    "Half",
    "Handle",
    "History",
    "Int8",
    "KeyRefusedError",
    "LaunchEnvironmentError",
    "LayoutMismatchError",
    "LearningRateScheduler",
    "LinearScaling",
    "LocalSGD",
    "Max",
    "Min",
    "ModelCheckpoint",
    "NotInitializedError",
    "ParameterServerError",
    "PeerFailedError",
    "PowerSGD",
    "Product",
    "ProgressBar",
    "RendezvousError",
    "Restored",
    "Strategy",
    "Sum",
    "TensorBoard",
    "Trainer",
    "UnsupportedError",
    "Verification",
    "VersionMismatchError",
    "World",
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
    "gather_metrics",
    "gather_samples",
    "grouped_allreduce",
    "grouped_allreduce_",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "make_compression",
    "poll",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
    "strategy",
    "synchronize",
    "verify",
]

skip_package(__name__)
