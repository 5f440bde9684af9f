"""Torch's own check that the host does not wait for a CUDA device, for tests whose warnings are errors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Inside, torch raises RuntimeError where the host waits for the device: all but `Event.synchronize`."""
    try:
        with warnings.catch_warnings():
            # Torch's word that this is a prototype. It would become an error only once the mode is set.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
