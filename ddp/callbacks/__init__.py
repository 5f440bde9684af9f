"""What a trainer does besides training: one module for each group of callbacks."""

from ddp.callbacks.callback import Callback
from ddp.callbacks.learning_rate import LearningRateScheduler, LinearScaling
from ddp.callbacks.reports import CSVLogger, History, ProgressBar
from ddp.callbacks.saving import ModelCheckpoint
from ddp.callbacks.stopping import EarlyStopping
from ddp.callbacks.tensorboard import TensorBoard

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
