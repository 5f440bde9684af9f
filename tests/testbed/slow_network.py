"""Networks of their own for a few processes, joined by a switch that lets through so much and no more. Needs root.

    with SlowNetwork(3, "100mbit") as network:
        nursery.run(3, ..., networks=network.pids)  # where each rank calls `enter(networks[rank])` first

Everything ends when the pipes to the processes that hold the networks are closed, also when pytest is killed.
"""

import ctypes
import os
import subprocess
from collections.abc import Sequence

from testbed.namespaces import await_word, bare_environment, path_of, run_part

INTERFACE = "eth0"
_CLONE_NEWNET = 0x40000000
_SUBNET = "10.213.78"


class SlowNetwork:
    """`count` network namespaces on one switch; each sends at `rate`, as tc writes it."""

    def __init__(self, count: int, rate: str) -> None:
        self._count = count
        self._rate = rate
        self._holders: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        """Processes in the networks, one for each."""
        return [holder.pid for holder in self._holders[1:]]

    def __enter__(self) -> "SlowNetwork":
        try:
            switch = self._hold()
            run_part("ip", "link", "add", "switch", "type", "bridge", "forward_delay", "0", inside=switch)
            run_part("ip", "link", "set", "switch", "up", inside=switch)
            for number in range(1, self._count + 1):
                pid = self._hold()
                port = f"port{number}"
                peer = ("peer", "name", INTERFACE, "netns", str(pid))
                run_part("ip", "link", "add", port, "type", "veth", *peer, inside=switch)
                run_part("ip", "link", "set", port, "master", "switch", "up", inside=switch)
                run_part("ip", "link", "set", "lo", "up", inside=pid)
                run_part("ip", "addr", "add", f"{_SUBNET}.{number}/24", "dev", INTERFACE, inside=pid)
                run_part("ip", "link", "set", INTERFACE, "up", inside=pid)
                self._limit(pid)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._holders:
            with holder:  # closes its pipes and waits for it
                assert holder.stdin is not None
                holder.stdin.close()

    def _hold(self) -> int:
        """Start a process with a network of its own; return its pid."""
        argv = [path_of("unshare"), "--net", "--", "sh", "-c", "echo up; read _"]
        pipe = subprocess.PIPE
        holder = subprocess.Popen(argv, stdin=pipe, stdout=pipe, env=bare_environment(), start_new_session=True)
        self._holders.append(holder)
        await_word(holder, "a network namespace")
        return holder.pid

    def _limit(self, pid: int) -> None:
        bucket = ("tbf", "rate", self._rate, "burst", "8kb", "latency", "200ms")
        run_part("tc", "qdisc", "add", "dev", INTERFACE, "root", *bucket, inside=pid)


def enter(networks: Sequence[int], rank: int) -> None:
    """Move this thread, and those that it starts from now on, into a network; gloo's new groups meet there."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/proc/{networks[rank]}/ns/net", os.O_RDONLY)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")
    finally:
        os.close(descriptor)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
