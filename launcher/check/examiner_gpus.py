"""The cards of this host for `dtrain check`, by NVML: who uses them, what is wrong with them. CUDA is never started."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

from launcher.check.facts import Driver, Gpu

__all__ = ["find_cards"]

T = TypeVar("T")


def find_cards() -> Driver:
    """Return what the driver says. Blocks while it does: seconds where its persistence mode is off."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # no driver on this host; saves the import below
        return Driver()
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # a library without its driver
        return Driver()
    try:
        number = _ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        count = _ask(pynvml.nvmlDeviceGetCount) or 0
        return Driver(
            driver=_ask(pynvml.nvmlSystemGetDriverVersion),
            driver_cuda=None if number is None else f"{number // 1000}.{number % 1000 // 10}",
            gpus=tuple(_card(index) for index in range(count)),
        )
    finally:
        pynvml.nvmlShutdown()


def _card(index: int) -> Gpu:
    import pynvml

    try:
        card = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(card)
    except pynvml.NVMLError as error:
        return Gpu(index, lost=str(error))
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, card)
    use = _ask(pynvml.nvmlDeviceGetUtilizationRates, card)
    mig = _ask(pynvml.nvmlDeviceGetMigMode, card)
    persistence = _ask(pynvml.nvmlDeviceGetPersistenceMode, card)
    return Gpu(
        index=index,
        uuid=uuid,
        name=_ask(pynvml.nvmlDeviceGetName, card) or "",
        memory_bytes=None if memory is None else int(memory.total),
        used_bytes=None if memory is None else int(memory.used),
        busy_percent=None if use is None else int(use.gpu),
        processes=tuple(
            _describe(int(one.pid)) for one in _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, card) or ()
        ),
        ecc_errors=_ask(
            pynvml.nvmlDeviceGetTotalEccErrors,
            card,
            pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            pynvml.NVML_VOLATILE_ECC,
        ),
        pending=_pending(card),
        persistence=None if persistence is None else bool(persistence),
        mig=None if mig is None else bool(mig[0]),
    )


def _describe(pid: int) -> str:
    import psutil

    try:
        process = psutil.Process(pid)
        return f"pid {pid} ({process.name()}, of {process.username()})"
    except psutil.Error:  # of another container, or ended meanwhile
        return f"pid {pid}"


def _pending(card: object) -> str:
    """Return what waits for a reset of the card: its memory has failed, and the failed rows are to be replaced."""
    import pynvml

    rows = _ask(pynvml.nvmlDeviceGetRemappedRows, card)
    if rows is not None and rows[3]:
        return "a row of its memory could not be replaced"
    if rows is not None and rows[2]:
        return "rows of its memory wait to be replaced"
    if _ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, card):
        return "pages of its memory wait to be retired"
    return ""


def _ask(question: Callable[..., T], *about: Any) -> T | None:
    """Return the driver's answer, None where it or the card does not know such a thing."""
    import pynvml

    try:
        return question(*about)
    except (pynvml.NVMLError, AttributeError):  # a function that this driver does not have yet
        return None
