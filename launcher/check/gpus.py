"""What is wrong with the GPUs of a host. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from launcher.check.facts import Gpu, HostFacts
from launcher.check.finding import Examined, Finding, Severity, on_host
from launcher.placement.job_spec import JobSpec

__all__ = ["gpu_findings"]

USED_BYTES = 1 << 30  # more than a driver, a display or an idle context takes
BUSY_PERCENT = 10
_PRINTED = 3


def gpu_findings(spec: JobSpec, one: Examined) -> Iterator[Finding]:
    """Yield what is to be said of the cards that a run would hand out; of lost ones unless the list leaves them out."""
    facts = one.facts
    assert facts is not None
    name, there = (one.host.name,), on_host(spec, one.host)
    for gpu in facts.gpus:
        which = f"GPU {gpu.index}" + (f" ({gpu.name})" if gpu.name else "")
        if gpu.lost:
            severity = Severity.NOTE if facts.gpus_inherited else Severity.ERROR
            message = f"{which} cannot be used: {gpu.lost}; a run would go without it"
            yield Finding(severity, "gpu-lost", name, message, there("sudo dmesg | grep -i xid"))
        elif not _handed_out(gpu, facts):
            continue
        elif gpu.ecc_errors or gpu.pending:
            found = gpu.pending or f"{gpu.ecc_errors} memory errors that could not be corrected"
            yield Finding(
                Severity.ERROR,
                "gpu-memory",
                name,
                f"{which}: {found}",
                there(f"sudo nvidia-smi --gpu-reset -i {gpu.index}"),
            )
        elif busy := _busy(gpu):
            pid = gpu.processes[0].split()[1] if gpu.processes else ""
            look = f"ps -fp {shlex.quote(pid)}" if pid else f"nvidia-smi -i {gpu.index}"
            yield Finding(Severity.WARNING, "gpu-busy", name, f"{which} is in use: {busy}", there(look))
    if any(gpu.persistence is False for gpu in facts.gpus):
        message = "persistence mode is off: the first use of a GPU takes seconds"
        yield Finding(Severity.NOTE, "gpu-persistence", name, message, there("sudo nvidia-smi -pm 1"))
    yield from _driver(facts, one, spec)


def _driver(facts: HostFacts, one: Examined, spec: JobSpec) -> Iterator[Finding]:
    """Compare the CUDA of torch and of the driver: within a major version an older driver will do."""
    name = (one.host.name,)
    if not facts.gpus or facts.torch is None:
        return
    if facts.torch_cuda is None:
        message = f"it has GPUs, but torch {facts.torch} is built without CUDA"
        fix = on_host(spec, one.host)(
            f"{spec.python} -m pip install --force-reinstall torch=={facts.torch.partition('+')[0]}"
        )
        yield Finding(Severity.WARNING, "torch-without-cuda", name, message, fix)
    elif facts.driver_cuda and _major(facts.torch_cuda) > _major(facts.driver_cuda):
        message = (
            f"torch {facts.torch} needs CUDA {facts.torch_cuda}, the driver {facts.driver} knows up to "
            f"{facts.driver_cuda}; install a newer driver, or a torch for CUDA {facts.driver_cuda}"
        )
        build = "cu" + facts.driver_cuda.replace(".", "")
        fix = (
            f"{spec.python} -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{build}"
        )
        yield Finding(Severity.ERROR, "driver-too-old", name, message, on_host(spec, one.host)(fix))


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0


def _handed_out(gpu: Gpu, facts: HostFacts) -> bool:
    """Say whether a card, or a slice of it, is among those of the run; slices are not traced to their cards."""
    return any(name == str(gpu.index) or gpu.uuid.startswith(name) or name.startswith("MIG-") for name in facts.gpu_ids)


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
