"""Data-parallel training: every rank holds the whole model and a share of the data, and gradients are averaged.

Three lines make a single-process script distributed:

    world = ddp.init()  # rank, world size, device; without a launcher, a world of one
    model = ddp.DistributedDataParallel(model.to(world.device))  # averages gradients during backward
    sampler = ddp.DistributedSampler(dataset)  # each rank its share of the data

`ddp.Checkpoint(folder)` saves everything that a run needs to resume, and loads the newest complete one at the start.
Start the script with `dtrain run`, torchrun, mpirun or srun, or alone with plain python.

`ddp.strategy(name)` has other ways to train the same loop; `ddp.Trainer` is a ready-made loop with `ddp.callbacks`.
`ddp.horovod` is for scripts in Horovod's style, `ddp.compression` has the options of `compression=`, `ddp.errors` the
exceptions.
"""

from ddp import callbacks, compression, errors, horovod
from ddp.checkpoint.checkpoint import Checkpoint
from ddp.compression import make_compression
from ddp.data.ledger import ledger
from ddp.data.metrics import gather_metrics, gather_samples
from ddp.data.sampler import DistributedSampler
from ddp.data.step_loader import StepLoader
from ddp.data_parallel.replicas import check_replicas
from ddp.data_parallel.wrapper import DistributedDataParallel
from ddp.resilience.loop import resilient
from ddp.resilience.state import State
from ddp.strategies.local_sgd.averaging import LocalSGD
from ddp.strategies.strategy import strategy
from ddp.torch_internals import skip_package as _skip_package
from ddp.training.trainer import Trainer
from ddp.verification.verify import verify
from ddp.world import World, init

__all__ = [
    "Checkpoint",
    "DistributedDataParallel",
    "DistributedSampler",
    "LocalSGD",
    "State",
    "StepLoader",
    "Trainer",
    "World",
    "callbacks",
    "check_replicas",
    "compression",
    "errors",
    "gather_metrics",
    "gather_samples",
    "horovod",
    "init",
    "ledger",
    "make_compression",
    "resilient",
    "strategy",
    "verify",
]

_skip_package(__name__)
