"""Errors of GPUs are read from the kernel's log: records of NVIDIA's driver in the form that users post."""

from __future__ import annotations

import socket
import time

import pytest

from launcher.machine.gpus.kernel_log import device_error, errors_in, logged_errors
from launcher.machine.oom import OomWatch

BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
# What the driver writes, and what is said of it.
WRITTEN = {
    BUS: "Xid 79 of 0000:3b:00: GPU has fallen off the bus",
    "NVRM: Xid (PCI:0000:86:00): 48, pid=1234, name=python3, DBE (double bit error) ECC error": (
        "Xid 48 of 0000:86:00: DBE (double bit error) ECC error (pid 1234, python3)"
    ),
    "NVRM: Xid (PCI:0000:0f:00): 31, pid=812, Ch 00000008, intr 10000000. MMU Fault: ENGINE GRAPHICS": (
        "Xid 31 of 0000:0f:00: pid=812, Ch 00000008, intr 10000000. MMU Fault: ENGINE GRAPHICS"
    ),
    "NVRM: Xid (PCI:0000:c1:00): 74, pid='812', name=python, NVLink: fatal error detected on link 2(0x10000, 0x0)": (
        "Xid 74 of 0000:c1:00: NVLink: fatal error detected on link 2(0x10000, 0x0) (pid 812, python)"
    ),
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 46 egress non-posted PRIV error (First)": (
        "SXid 12028 of 0000:c1:00.0: Non-fatal, Link 46 egress non-posted PRIV error (First)"
    ),
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15": "",
    "usb 1-1: new device": "",
}


@pytest.mark.parametrize(("text", "said"), WRITTEN.items())
def test_an_error_is_read_from_its_record(text: str, said: str) -> None:
    assert device_error(f"3,1017,99,-;{text}\n SUBSYSTEM=pci\n".encode()) == said
    assert device_error(f"12,1017,99,-;{text}\n".encode()) == "", "of a user, who may write to the log"


def test_the_errors_so_far_have_their_age() -> None:
    kernel, log = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a record a read, as /dev/kmsg
    with kernel, log:
        log.setblocking(False)
        kernel.send(b"6,1,1,-;something before\n")
        kernel.send(f"3,2,{int(1e6 * (time.monotonic() - 90))},-;{BUS}\n".encode())
        ((age_s, text),) = errors_in(log.fileno())
    assert 90 <= age_s < 120
    assert text == WRITTEN[BUS]


def test_the_log_of_this_machine_is_read_to_its_end() -> None:
    began = time.monotonic()
    assert isinstance(logged_errors(), tuple)
    assert time.monotonic() - began < 10


def test_errors_during_a_run_are_kept_beside_kills() -> None:
    watch = OomWatch()
    kernel, log = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with kernel, log:
        log.setblocking(False)
        watch._log._file, watch._log._has_pids = log.fileno(), True
        kernel.send(f"3,1,5,-;{BUS}\n".encode())
        kernel.send(b"3,2,6,-;Out of memory: Killed process 812 (python) total-vm:1kB, anon-rss:4096kB\n")
        for number in range(30):
            kernel.send(f"3,{3 + number},7,-;{BUS}\n".encode())
        assert watch.killed(812).startswith("the out-of-memory killer: it held 4 MiB")
    assert watch.device_errors == [WRITTEN[BUS]] * 20
