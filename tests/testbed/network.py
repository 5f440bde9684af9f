"""Hosts with a network of their own, on which real faults can be made: a pulled cable, lost packets, a power loss.

Each host has its own network, host name, process numbers, /proc and /dev/shm, and an sshd on port 22. All are plugged
into one switch, and so is the network namespace that the tests run in. Files are this machine's. Needs root.

    tests' own namespace                 switch                        far1, far2, ...
    dtrain-testN 198.x.y.254 ---- up0 | bridge "switch" | port1 ---- eth0 198.x.y.1

Nothing has a name or a file by which it would outlive its processes, and those end when the pipe to them is closed:
all is gone a moment after pytest is killed. Not simulated: a router. All hosts are neighbours, so that a *new*
connection to one that does not answer fails after 3 s with "no route to host"; connections that were there hang.
"""

import contextlib
import errno
import os
import secrets
import subprocess
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import psutil
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from testbed.lab import Lab
from testbed.left import own_group
from testbed.namespaces import PARTS, await_word, bare_environment, path_of, run_part
from testbed.network_host import Host, is_sshd
from testbed.processes import MARK
from testbed.sshd import (
    HOST,
    SSH_CONFIG,
    SSHD_CONFIG,
    find_sshd,
    for_coverage,
    in_sshd_config,
    no_penalties,
    public_line,
    write_key,
)

PORT = 22
SUBNETS = 512  # of 256 addresses each in 198.18.0.0/15, which RFC 2544 sets aside for tests

# Ends when its stdin does. `up0` takes its other end, our side of the cable, with it.
SWITCH = """\
set -e
ip link add switch type bridge forward_delay 0
ip link set switch up
echo up
exec cat
"""

# Everything that the hosts need, in namespaces that end with it.
TRIAL = """\
set -e
ip link add switch type bridge
ip link add port1 type veth peer name eth0
tc qdisc add dev port1 root blackhole
mount -t tmpfs tmpfs /dev/shm
"""


def why_not() -> str | None:
    """Why this process cannot make such hosts though all parts are there, as in most containers; None if it can."""
    if os.geteuid() != 0:
        return "only root can make them"
    namespaces = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    try:
        run_part("unshare", *namespaces, "sh", stdin=TRIAL)
        run_part("ip", "link", "set", "lo", "up")  # it is, nearly always; but may we?
    except ChildProcessError as error:
        return str(error)
    return None


class NetworkHosts(Lab):
    """Hosts far1 ... farN. They run inside the `with` block, and nothing of them is left after it.

    Sessions have an empty HOME of their own, the mark by which what they leave behind is found, and their host's name
    in DTRAIN_TEST_HOST. Faults are made and undone by the host's name; what they do is true once they return.
    """

    parts = PARTS
    why_not = staticmethod(why_not)

    def __init__(self, folder: Path, count: int = 3) -> None:
        sshd = find_sshd()
        if sshd is None:
            raise FileNotFoundError("no sshd on this machine: apt-get install openssh-server")
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self._sshd = sshd
        self._switch: subprocess.Popen[bytes] | None = None
        self._cable = ""  # its end here
        self._network = ""  # the first three numbers of all addresses
        group = own_group()
        self._groups = {i: group / f"dtrain-test-{self.mark[:16]}-far{i}" for i in range(1, count + 1) if group}
        self._hosts = {f"far{i}": Host(i, folder, self._groups.get(i)) for i in range(1, count + 1)}

    @property
    def temps(self) -> Sequence[Path]:
        return [host.temp for host in self._hosts.values()]

    @property
    def groups(self) -> Sequence[Path]:
        return [*self._groups.values()]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._hosts)

    @property
    def ssh_config(self) -> Path:
        """The client configuration, as for `ssh -F`: the right key, all hosts known."""
        return self.folder / "ssh_config"

    @property
    def address_here(self) -> str:
        """The address under which the hosts reach the tests' own machine."""
        return f"{self._network}.254"

    def address(self, name: str) -> str:
        return f"{self._network}.{self._hosts[name].number}"

    def log(self, name: str) -> str:
        """What the sshd of this host has said since it was booted."""
        return self._hosts[name].log()

    def processes(self, name: str) -> list[psutil.Process]:
        """What runs there now, but for what makes it a host: its process 1, its sshd and the sessions of that.

        Seen from here: with pids of this machine.
        """
        return [process for process in self._hosts[name].processes() if not is_sshd(process)]

    @property
    def pids(self) -> frozenset[int]:
        """The processes that make the hosts and the switch, sshd's sessions among them."""
        found = set() if self._switch is None else {self._switch.pid}
        for host in self._hosts.values():
            found |= host.pids()
        return frozenset(found)

    @property
    def traces(self) -> tuple[Path, ...]:
        """All that shows on this machine that they run, apart from processes and the folder."""
        return (Path("/sys/class/net", self._cable), *self._groups.values())

    # ---- faults ----

    def cut(self, name: str) -> None:
        """Pull the cable at the switch. The host sees that it has no carrier; everyone else sees silence."""
        host = self._touched(name)
        self._ip_at_switch(f"link set {host.port} down")

    def drop(self, name: str, direction: Literal["both", "in", "out"] = "both") -> None:
        """Lose every packet to the host ("in"), of the host ("out"), or both. Its carrier stays."""
        host = self._touched(name)
        if direction != "out":
            run_part("tc", "qdisc", "replace", "dev", host.port, "root", "blackhole", inside=self._switch_pid)
        if direction != "in":
            run_part("tc", "qdisc", "replace", "dev", "eth0", "root", "blackhole", inside=host.pid)

    def mend(self, name: str) -> None:
        """Undo `cut` and `drop`. Open connections go on with their next retransmission, some seconds later."""
        host = self._hosts[name]
        self._ip_at_switch(f"link set {host.port} up")
        run_part("tc", "qdisc", "replace", "dev", host.port, "root", "noqueue", inside=self._switch_pid)
        run_part("tc", "qdisc", "replace", "dev", "eth0", "root", "noqueue", inside=host.pid)

    def freeze(self, name: str) -> None:
        """Stop everything that runs there, sshd too. The kernel still takes and acknowledges packets."""
        self._touched(name).freeze()

    def thaw(self, name: str) -> None:
        """Let everything there go on, also what a test had stopped by itself."""
        self._hosts[name].thaw()

    def poweroff(self, name: str) -> None:
        """Pull the cable, then end the host: no packet tells anybody. Does nothing to a host that is off."""
        host = self._hosts[name]
        if host.is_on:
            with contextlib.suppress(ChildProcessError):  # the host's own end took it away
                self._ip_at_switch(f"link del {host.port}")
            host.end()

    def boot(self, name: str) -> None:
        """Start a host that is off, with the address and keys that it had; return when its sshd listens."""
        self._boot([name])

    def kill_sshd(self, name: str) -> None:
        """Kill sshd and its sessions, but not what was started by them. Their connections are closed."""
        self._touched(name).kill_sshd()

    def start_sshd(self, name: str) -> None:
        """Start sshd after `kill_sshd`; return when it listens."""
        self._hosts[name].start_sshd()
        self._hosts[name].await_sshd()

    def reset(self) -> None:
        """Undo all faults: boot every host that is off, had a fault, or has more than sshd's listener running."""
        for name, host in self._hosts.items():
            if not host.is_fresh():
                self.poweroff(name)
        self._boot(self.names)

    # ---- from beginning to end ----

    def _open(self) -> None:
        self._start_switch()
        self._write_files()
        self._boot(self.names)

    def _closers(self) -> Iterator[Callable[[], object]]:
        yield self._stop_switch
        for name in self.names:
            yield partial(self.poweroff, name)

    @property
    def _switch_pid(self) -> int:
        assert self._switch is not None, "only inside of the with block"
        return self._switch.pid

    def _touched(self, name: str) -> "Host":
        host = self._hosts[name]
        host.touched = True
        return host

    def _ip_at_switch(self, *commands: str) -> None:
        run_part("ip", "-batch", "-", inside=self._switch_pid, stdin="\n".join(commands))

    def _start_switch(self) -> None:
        self._switch = subprocess.Popen(
            [path_of("unshare"), "--net", "--", "sh", "-c", SWITCH],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=bare_environment(),
        )
        await_word(self._switch, "the switch")
        self._plug_in()
        self._ip_at_switch("link set up0 master switch", "link set up0 up")
        commands = (f"addr add {self.address_here}/24 dev {self._cable}", f"link set {self._cable} up")
        run_part("ip", "-batch", "-", stdin="\n".join(commands))

    def _plug_in(self) -> None:
        """Lay a cable to the switch. Its end here is named after the subnet, which others can then not take."""
        first = secrets.randbelow(SUBNETS)
        for number in (*range(first, SUBNETS), *range(first)):
            cable = f"dtrain-test{number}"
            peer = ("peer", "name", "up0", "netns", str(self._switch_pid))
            try:
                run_part("ip", "link", "add", cable, "type", "veth", *peer)
            except ChildProcessError as error:
                if os.strerror(errno.EEXIST) not in str(error):
                    raise
                continue
            self._cable, self._network = cable, f"198.{18 + number // 256}.{number % 256}"
            return
        raise OSError("no subnet of 198.18.0.0/15 is free")

    def _stop_switch(self) -> None:
        if (switch := self._switch) is None:
            return
        with contextlib.suppress(ChildProcessError):  # none was plugged in
            self._ip_at_switch("link del up0")  # now, not when the kernel gets round to it
        self._switch = None
        with switch:
            switch.kill()

    def _write_files(self) -> None:
        client = Ed25519PrivateKey.generate()
        identity = write_key(self.folder / "id_ed25519", client)
        authorized_keys, known_hosts = self.folder / "authorized_keys", self.folder / "known_hosts"
        authorized_keys.write_text(f"{public_line(client)} client\n")
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # root's sshd refuses to start without it
        known, configs, names, penalties = "", "", "127.0.0.1 localhost\n", None
        for name, host in self._hosts.items():
            (host.folder / "home").mkdir(parents=True)
            key = Ed25519PrivateKey.generate()
            host_key = write_key(host.folder / "host_key", key)
            host.temp.mkdir()
            home, temp = str(host.folder / "home"), str(host.temp)
            environment = {"HOME": home, "TMPDIR": temp, MARK: self.mark, HOST: name, **for_coverage()}
            config = SSHD_CONFIG.format(
                address="0.0.0.0",
                port=PORT,
                folder=host.folder,
                authorized_keys=authorized_keys,
                environment=in_sshd_config(environment),
            )
            penalties = no_penalties(self._sshd, host_key) if penalties is None else penalties
            (host.folder / "sshd_config").write_text(config + penalties)
            known += f"{self.address(name)} {public_line(key)}\n"
            names += f"{self.address(name)} {name}\n"
            configs += SSH_CONFIG.format(
                name=name,
                address=self.address(name),
                port=PORT,
                user="root",
                identity=identity,
                known_hosts=known_hosts,
            )
        known_hosts.write_text(known)
        self.ssh_config.write_text(configs)
        (self.folder / "hosts").write_text(names)

    def _boot(self, names: Collection[str]) -> None:
        off = {name: self._hosts[name] for name in names if not self._hosts[name].is_on}
        for host in off.values():
            host.begin(self._sshd)
        for name, host in off.items():
            host.await_up()
            # A machine keeps its hardware address: the others still know it.
            hardware = f"address 02:00:00:00:00:{host.number:02x}"
            self._ip_at_switch(
                f"link add {host.port} type veth peer name eth0 {hardware} netns {host.pid}",
                f"link set {host.port} master switch",
                f"link set {host.port} up",
            )
            commands = ("link set lo up", f"addr add {self.address(name)}/24 dev eth0", "link set eth0 up")
            run_part("ip", "-batch", "-", inside=host.pid, stdin="\n".join(commands))
            host.start_sshd()
        for host in off.values():
            host.await_sshd()
