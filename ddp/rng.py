"""The states of this process's random number generators: Python's, NumPy's if it is loaded, torch's on the CPU and on
the current CUDA device, and torch_xla's in SPMD mode. Never draws a number.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

_NUMPY_SEED_LIMIT = 1 << 32
_TORCH_SEED_LIMIT = 1 << 63


def capture() -> dict[str, Any]:
    """Return the states in types that a checkpoint holds."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = _plain(numpy.random.get_state(legacy=False), numpy)
    if torch.cuda.is_initialized():  # asking would make a context
        states["cuda"] = torch.cuda.get_rng_state()
    if (xla := _spmd()) is not None:
        states["xla"] = xla.core.xla_model.get_rng_state()
    return states


def restore(states: Mapping[str, Any]) -> None:
    """Set the generators to what `capture` returned; one that is missing here or there keeps its state."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if (numpy := sys.modules.get("numpy")) is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    if (xla := _spmd()) is not None and "xla" in states:
        xla.core.xla_model.set_rng_state(states["xla"])


def reseed(states: Mapping[str, Any], rank: int) -> None:
    """Seed every generator with a number that follows from captured states and from `rank`."""
    material = bytes(states["torch"].tolist()) + repr(states["python"]).encode()
    first, own = (int.from_bytes(hashlib.sha256(material + b" %d" % each).digest(), "little") for each in (0, rank))
    seed_on_host(own)
    seed_torch(own % _TORCH_SEED_LIMIT)
    if (xla := _spmd()) is not None:  # one program, so one seed for all
        xla.manual_seed(first % _TORCH_SEED_LIMIT)


def seed_torch(seed: int) -> None:
    """Seed torch's generators on all devices, and torch_xla's in SPMD mode."""
    torch.manual_seed(seed)
    if (xla := _spmd()) is not None:
        xla.manual_seed(seed)


def seed_on_host(seed: int) -> None:
    """Seed Python's generator, and NumPy's if it is loaded."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % _NUMPY_SEED_LIMIT)


def _spmd() -> Any:
    """Return torch_xla if this process is one of those that run one program on a mesh (`ddp.strategies.tpu`)."""
    xla = sys.modules.get("torch_xla")
    return xla if xla is not None and xla.runtime.is_spmd() else None


def _plain(value: Any, numpy: Any) -> Any:
    """Return `value` with arrays as lists, which NumPy accepts as well."""
    if isinstance(value, dict):
        return {key: _plain(item, numpy) for key, item in value.items()}
    return value.tolist() if isinstance(value, numpy.ndarray | numpy.generic) else value
