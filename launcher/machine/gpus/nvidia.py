"""NVIDIA's GPUs, listed by NVML without ever starting CUDA."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from launcher.frozen import replace
from launcher.machine.gpus.card import Card, DriverError

T = TypeVar("T")
_NO_DRIVER = (9, 12)  # NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND
# By bits of nvmlClocksThrottleReasons.
_SLOWED = {"slowed down by heat": 0x20 | 0x40, "slowed down by the power supply": 0x80}


def list_cards(_: Mapping[str, str]) -> list[Card] | None:
    """Return every card or MIG slice; None if there is no driver. Raises DriverError if it does not list them."""
    with started() as is_there:
        return _list_cards() if is_there else None


@contextlib.contextmanager
def started() -> Iterator[bool]:
    """Start NVML; yield whether there is a driver. Raises DriverError if it fails to start, or within the block."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # no driver on this host; saves the import below, which takes 50 ms
        yield False
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value not in _NO_DRIVER:
            raise _driver_error(error) from error
        yield False
        return
    try:
        yield True
    except pynvml.NVMLError as error:
        raise _driver_error(error) from error
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def as_written(entries: Sequence[str], cards: Sequence[Card]) -> list[Card]:
    """Return the cards under the names that the user gave: CUDA may number them differently from NVML."""
    return [replace(card, name=entry) for entry, card in zip(entries, cards, strict=True)]


def numbers_are_certain(chosen: Sequence[Card], cards: Sequence[Card], env: Mapping[str, str]) -> bool:
    """Return whether the numbers of the chosen cards are the same in CUDA and NVML.

    CUDA numbers different cards by their speed, unless CUDA_DEVICE_ORDER is set.
    """
    if env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or not any(card.name.isdigit() for card in chosen):
        return True
    return len({card.model for card in cards}) <= 1


def usage(names: Collection[str]) -> dict[str, list[int]]:
    """Return for each card, by its number or UUID: percent busy, bytes in use, total bytes. Blocks with the driver.

    For a MIG slice only the memory is known: it counts as 0 % busy. Cards that do not answer are left out.
    """
    return _of_each(names, _usage)


def troubles(names: Collection[str]) -> dict[str, dict[str, int]]:
    """Return for each card, as `usage` does, how often the driver has counted what in it; 1 for what lasts."""
    return _of_each(names, _troubles)


def slowed_by(reasons: int) -> list[str]:
    """Return why the clock of a card is held down; not if it is for its power limit, which is usual."""
    return [what for what, bits in _SLOWED.items() if reasons & bits]


def _of_each(names: Collection[str], question: Callable[[Any], T]) -> dict[str, T]:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    import pynvml

    found = {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        for name in names:
            with contextlib.suppress(pynvml.NVMLError, AttributeError):  # lost, or not supported by the driver
                handle = (
                    pynvml.nvmlDeviceGetHandleByIndex(int(name))
                    if name.isdigit()
                    else pynvml.nvmlDeviceGetHandleByUUID(name)
                )
                found[name] = question(handle)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return found


def _usage(handle: object) -> list[int]:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return [_busy(handle), int(memory.used), int(memory.total)]


def _troubles(handle: object) -> dict[str, int]:
    import pynvml

    def ask(question: str, *about: Any) -> Any:
        try:
            return getattr(pynvml, question)(handle, *about)
        except (pynvml.NVMLError, AttributeError):  # the driver or the card does not count it
            return None

    rows, pages = ask("nvmlDeviceGetRemappedRows"), ask("nvmlDeviceGetRetiredPages", 1)  # 1: for double bit errors
    counts = {
        "memory errors that could not be corrected": ask("nvmlDeviceGetTotalEccErrors", 1, 0),
        "rows of memory replaced": None if rows is None else rows[0] + rows[1],
        "pages of memory retired": None if pages is None else len(pages),
    }
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    counts |= dict.fromkeys(slowed_by(reasons), 1)
    return {what: int(count) for what, count in counts.items() if count is not None}


def _busy(handle: object) -> int:
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except pynvml.NVMLError:  # a MIG slice
        return 0


def _driver_error(error: Any) -> DriverError:
    """Return it with NVML's text, which nvidia-smi shows too: that of pynvml differs."""
    import pynvml

    return DriverError(f"NVML says: {_text(pynvml.nvmlErrorString(error.value))}")


def _list_cards() -> list[Card]:
    import pynvml

    cards: list[Card] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
            slices = _mig_slices(handle, uuid)
        except pynvml.NVMLError:  # a card that fell off the bus
            continue
        card = Card(str(index), index, uuid, _bus_id(handle), _model(handle))
        cards += [replace(card, name=name, alias=alias) for name, alias in slices] or [card]
    numbers = {card.index for card in cards}
    if numbers == {*range(len(numbers))}:
        return cards
    # It is not documented whether CUDA counts a lost card: after one, only UUIDs are certain.
    return [replace(card, name=card.uuid) if card.name == str(card.index) else card for card in cards]


def _mig_slices(handle: object, uuid: str) -> list[tuple[str, str]]:
    """Return for each slice its UUID and its older name, used by drivers before R470 and some versions of SLURM."""
    import pynvml

    try:
        if not pynvml.nvmlDeviceGetMigMode(handle)[0]:
            return []
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except (pynvml.NVMLError, AttributeError):  # a card or driver without MIG
        return []
    slices = []
    for index in range(count):
        try:
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            name = _text(pynvml.nvmlDeviceGetUUID(mig))
        except pynvml.NVMLError:  # no slice at this index
            continue
        try:
            instances = pynvml.nvmlDeviceGetGpuInstanceId(mig), pynvml.nvmlDeviceGetComputeInstanceId(mig)
            alias = f"MIG-{uuid}/{instances[0]}/{instances[1]}"
        except (pynvml.NVMLError, AttributeError):
            alias = ""
        slices.append((name, alias))
    return slices


def _bus_id(handle: object) -> str:
    import pynvml

    try:
        return _text(pynvml.nvmlDeviceGetPciInfo(handle).busId)
    except pynvml.NVMLError:
        return ""


def _model(handle: object) -> str:
    import pynvml

    try:
        return _text(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError:
        return ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
