"""The GPUs of this host for `dtrain check`: their processes and problems. No runtime is ever started.

NVIDIA's by NVML, AMD's by sysfs.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from launcher.check.facts import Driver, Gpu
from launcher.errors import UsageError
from launcher.machine.gpus import amd
from launcher.machine.gpus.card import Card, DriverError
from launcher.machine.gpus.kernel_log import logged_errors
from launcher.machine.gpus.nvidia import slowed_by, started
from launcher.machine.gpus.vendors import VENDORS, by_torch
from launcher.machine.packages import torch_build
from launcher.machine.system_files import SYSFS, read_text

T = TypeVar("T")


def find_cards() -> Driver:
    """Return the driver's facts on all GPUs here: on those that torch was built for, otherwise on any.

    Blocks, for seconds if NVIDIA's persistence mode is off.
    """
    for vendor in by_torch([vendor for vendor in VENDORS if vendor.is_present()]):
        try:
            found = {"NVIDIA": _by_nvml, "AMD": _by_amdgpu}[vendor.name]()
        except DriverError as error:
            if vendor.built != torch_build():
                continue
            return Driver(vendor.name, trouble=str(error))
        if found.gpus:
            return found
    return Driver()


def _by_amdgpu() -> Driver:
    try:
        cards = amd.list_cards(os.environ)
    except UsageError:  # an invalid list, which is a separate finding
        cards = amd.list_cards({})
    return Driver("AMD", _driver_version("amdgpu"), gpus=tuple(map(_amd, cards)))


def _amd(card: Card) -> Gpu:
    """Return the facts in sysfs on an AMD card; some models and partitions have fewer."""
    device = SYSFS / "bus/pci/devices" / card.bus_id
    processes = [
        folder.name
        for folder in sorted((SYSFS / "class/kfd/kfd/proc").glob("[0-9]*"))
        if read_text(folder / f"vram_{card.node}") not in ("", "0")
    ]
    return Gpu(
        index=card.index,
        uuid=card.uuid,
        name=card.model,
        memory_bytes=_number(device / "mem_info_vram_total"),
        used_bytes=_number(device / "mem_info_vram_used"),
        busy_percent=_number(device / "gpu_busy_percent"),
        processes=tuple(_describe(int(pid)) for pid in processes),
        ecc_errors=_uncorrected(device / "ras"),
    )


def _uncorrected(folder: Path) -> int | None:
    """Return the number of uncorrectable errors (`ue: 0`) of the card's memory and other parts."""
    counts = [re.match(r"ue: (\d+)", read_text(file)) for file in sorted(folder.glob("*_err_count"))]
    return sum(int(found[1]) for found in counts if found) if any(counts) else None


def _driver_version(module: str) -> str | None:
    """Return the version of a kernel module; the kernel's version if it is part of that."""
    folder = SYSFS / "module" / module
    return read_text(folder / "version") or (f"of Linux {platform.release()}" if folder.is_dir() else None)


def _number(file: Path) -> int | None:
    text = read_text(file)
    return int(text) if text.isdigit() else None


def _by_nvml() -> Driver:
    """Return the facts from NVML. Raises DriverError if it does not list the cards."""
    with started() as is_there:
        if not is_there:
            return Driver()
        import pynvml

        number = _ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        return Driver(
            driver=_ask(pynvml.nvmlSystemGetDriverVersion),
            logged=logged_errors(),
            driver_cuda=None if number is None else f"{number // 1000}.{number % 1000 // 10}",
            gpus=tuple(_card(index) for index in range(pynvml.nvmlDeviceGetCount())),
        )


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
        slowed=", ".join(slowed_by(_ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, card) or 0)),
        persistence=None if persistence is None else bool(persistence),
        mig=None if mig is None else bool(mig[0]),
    )


def _describe(pid: int) -> str:
    import psutil

    try:
        process = psutil.Process(pid)
        return f"pid {pid} ({process.name()}, of {process.username()})"
    except psutil.Error:  # in another container, or ended meanwhile
        return f"pid {pid}"


def _pending(card: object) -> str:
    """Return what waits for a reset of the card: failed rows of its memory that must be replaced."""
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
    """Return the driver's answer; None if the driver or the card does not support the query."""
    import pynvml

    try:
        return question(*about)
    # The last two: a function that this driver does not have, or only in an older version.
    except (pynvml.NVMLError, AttributeError, pynvml.NVMLLibraryMismatchError):
        return None
