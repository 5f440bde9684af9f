"""Data-parallel training: every rank holds the whole model and a share of the data, and gradients are averaged.

Two lines make a single-process script distributed:

    world = ddp.init()  # who this rank is; without a launcher, a world of one
    model = ddp.DistributedDataParallel(model.to(world.device))  # averages gradients during backward

and `ddp.DistributedSampler(dataset)` gives each rank its share of the data. `ddp.Checkpoint(folder)` saves all that a
run needs to go on, and finds the newest whole one when it starts again. Start the script with `dtrain run`,
torchrun, mpirun or srun, or alone with plain python.
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
from ddp.checkpoint import Checkpoint, Restored
from ddp.compression import Half, Int8, PowerSGD, make_compression
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
from ddp.local_sgd import LocalSGD
from ddp.metrics import gather_metrics, gather_samples
from ddp.parallel import DistributedDataParallel
from ddp.sampler import DistributedSampler
from ddp.strategy import Strategy, strategy
from ddp.tracing import skip_package
from ddp.trainer import Trainer
from ddp.verify import Difference, Verification, verify
from ddp.world import World, init

__all__ = [
    "ArgumentError",
    "BackwardError",
    "CSVLogger",
    "Callback",
    "Checkpoint",
    "CheckpointError",
    "CollectiveError",
    "DdpError",
    "Difference",
    "DistributedDataParallel",
    "DistributedSampler",
    "DriftError",
    "EarlyStopping",
    "Half",
    "History",
    "Int8",
    "KeyRefusedError",
    "LaunchEnvironmentError",
    "LayoutMismatchError",
    "LearningRateScheduler",
    "LinearScaling",
    "LocalSGD",
    "ModelCheckpoint",
    "NotInitializedError",
    "ParameterServerError",
    "PeerFailedError",
    "PowerSGD",
    "ProgressBar",
    "RendezvousError",
    "Restored",
    "Strategy",
    "TensorBoard",
    "Trainer",
    "UnsupportedError",
    "Verification",
    "VersionMismatchError",
    "World",
    "gather_metrics",
    "gather_samples",
    "init",
    "make_compression",
    "strategy",
    "verify",
]

skip_package(__name__)
