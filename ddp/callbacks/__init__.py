"""The callbacks of a trainer: one module for each group."""

from ddp.callbacks.callback import Callback
from ddp.callbacks.learning_rate import LearningRateScheduler, LinearScaling
from ddp.callbacks.monitors import EarlyStopping, ModelCheckpoint
from ddp.callbacks.reports import CSVLogger, History, ProgressBar, TensorBoard

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
