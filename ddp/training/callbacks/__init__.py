"""What a trainer does besides training: one module for each group of callbacks."""

from ddp.training.callbacks.callback import Callback
from ddp.training.callbacks.learning_rate import LearningRateScheduler, LinearScaling
from ddp.training.callbacks.reports import CSVLogger, History, ProgressBar
from ddp.training.callbacks.saving import ModelCheckpoint
from ddp.training.callbacks.stopping import EarlyStopping
from ddp.training.callbacks.tensorboard import TensorBoard

__all__ = [
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "History",
    "LearningRateScheduler",
    "LinearScaling",
    "ModelCheckpoint",
    "ProgressBar",
    "TensorBoard",
]
