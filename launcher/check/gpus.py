"""What is wrong with the GPUs of a host. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from launcher.check.facts import Gpu
from launcher.check.finding import Examined, Finding, Severity
from launcher.placement.job_spec import JobSpec

__all__ = ["gpu_findings"]

USED_BYTES = 1 << 30  # more than a driver, a display or an idle context takes
BUSY_PERCENT = 10
_PRINTED = 3


def gpu_findings(spec: JobSpec, one: Examined) -> Iterator[Finding]:
    """Yield what is to be said of the cards that a run would hand out; of lost ones unless the list leaves them out."""
    facts, finding = one.known, one.says(spec)
    for gpu in facts.gpus:
        which = f"GPU {gpu.index}" + (f" ({gpu.name})" if gpu.name else "")
        if gpu.lost:
            severity = Severity.NOTE if facts.gpus_inherited else Severity.ERROR
            message = f"{which} cannot be used: {gpu.lost}; a run would go without it"
            yield finding(severity, "gpu-lost", message, "sudo dmesg | grep -i xid")
        elif not _handed_out(gpu, one.offer.gpus):
            continue
        elif gpu.ecc_errors or gpu.pending:
            found = gpu.pending or f"{gpu.ecc_errors} memory errors that could not be corrected"
            reset = f"sudo nvidia-smi --gpu-reset -i {gpu.index}"
            yield finding(Severity.ERROR, "gpu-memory", f"{which}: {found}", reset)
        elif busy := _busy(gpu):
            pid = gpu.processes[0].split()[1] if gpu.processes else ""
            look = f"ps -fp {shlex.quote(pid)}" if pid else f"nvidia-smi -i {gpu.index}"
            yield finding(Severity.WARNING, "gpu-busy", f"{which} is in use: {busy}", look)
    if any(gpu.persistence is False for gpu in facts.gpus):
        message = "persistence mode is off: the first use of a GPU takes seconds"
        yield finding(Severity.NOTE, "gpu-persistence", message, "sudo nvidia-smi -pm 1")
    # Within a major version of CUDA an older driver will do.
    install, torch, driver = f"{spec.python} -m pip install --force-reinstall", facts.torch, facts.driver_cuda
    if not facts.gpus or torch is None:
        return
    if facts.torch_cuda is None:
        message = f"it has GPUs, but torch {torch} is built without CUDA"
        yield finding(Severity.WARNING, "torch-without-cuda", message, f"{install} torch=={torch.partition('+')[0]}")
    elif driver and _major(facts.torch_cuda) > _major(driver):
        message = (
            f"torch {torch} needs CUDA {facts.torch_cuda}, the driver {facts.driver} knows up to {driver}; "
            f"install a newer driver, or a torch for CUDA {driver}"
        )
        index = f"https://download.pytorch.org/whl/cu{driver.replace('.', '')}"
        yield finding(Severity.ERROR, "driver-too-old", message, f"{install} torch --index-url {index}")


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0


def _handed_out(gpu: Gpu, names: Sequence[str]) -> bool:
    """Say whether a card, or a slice of it, is among those of the run; slices are not traced to their cards."""
    return any(name == str(gpu.index) or gpu.uuid.startswith(name) or name.startswith("MIG-") for name in names)


def _busy(gpu: Gpu) -> str:
    said = []
    if gpu.processes:
        more = len(gpu.processes) - _PRINTED
        said.append(", ".join(gpu.processes[:_PRINTED]) + (f" and {more} more" if more > 0 else ""))
    if gpu.used_bytes is not None and gpu.memory_bytes and (gpu.processes or gpu.used_bytes > USED_BYTES):
        said.append(f"{gpu.used_bytes >> 20} of {gpu.memory_bytes >> 20} MB are taken")
    if gpu.busy_percent is not None and gpu.busy_percent >= BUSY_PERCENT:
        said.append(f"{gpu.busy_percent} % busy")
    return "; ".join(said)
