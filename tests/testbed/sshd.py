"""Real SSH hosts on loopback: one user-level sshd each on 127.0.0.2, 127.0.0.3, ... on one high port.

Keys, known_hosts, client configuration and a home for every host lie in one folder; nothing in /etc or ~/.ssh
is read or written. Linux only: other systems answer on 127.0.0.1 alone.
"""

import contextlib
import getpass
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, TypeAlias

import psutil
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from testbed.imports import ROOT
from testbed.lab import Lab, clear_temp
from testbed.left import own_group
from testbed.namespaces import PARTS, path_of, run_part
from testbed.ports import free_port
from testbed.processes import MARK, kill, marked, wait_until

PrivateKey: TypeAlias = Ed25519PrivateKey | EllipticCurvePrivateKey
HOST = "DTRAIN_TEST_HOST"
PASSPHRASE = "correct horse"

SSHD_CONFIG = """\
ListenAddress {address}:{port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {authorized_keys}
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UseDNS no
X11Forwarding no
PrintMotd no
PrintLastLog no
MaxStartups 100:30:200
MaxSessions 100
Subsystem sftp internal-sftp
SetEnv {environment}
"""

# No StrictHostKeyChecking here: what happens to an unknown host is the default of the program under test.
SSH_CONFIG = """\
Host {name}
  HostName {address}
  Port {port}
  User {user}
  IdentityFile {identity}
  IdentitiesOnly yes
  UserKnownHostsFile {known_hosts}
  GlobalKnownHostsFile /dev/null
  BatchMode yes
  ConnectTimeout 5
"""


# Covers folders, and becomes what follows `--`. Their parents stay: only the folders themselves are empty.
HIDE = """\
set -e
while [ "$1" != -- ]; do mount -t tmpfs -o mode=755 tmpfs "$1"; shift; done
shift
exec "$@"
"""


def find_sshd() -> str | None:
    """The path of sshd (absolute, as sshd itself demands), or None; /usr/sbin is not on every user's PATH."""
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class SshHosts(Lab):
    """Hosts node1 ... nodeN, numbered from 1. They run inside the `with` block, and nothing of them after it.

    Sessions get an empty HOME of their own (so that no slow .bashrc is read), the mark by which what they
    leave behind is found, their host's name in DTRAIN_TEST_HOST, and `env`. The folders of `hidden` are empty there:
    each host then has a mount namespace of its own, which needs root.
    """

    def __init__(
        self, folder: Path, *, count: int = 4, env: Mapping[str, str] | None = None, hidden: Sequence[Path] = ()
    ) -> None:
        sshd = find_sshd()
        if sshd is None:
            raise FileNotFoundError("no sshd on this machine: apt-get install openssh-server")
        self.names = tuple(f"node{i + 1}" for i in range(count))
        self.mark = os.environ.get(MARK) or uuid.uuid4().hex
        self.folder = folder
        self.port = 0
        self._sshd = sshd
        self._env = dict(env or {})
        self._hidden = hidden
        self._keys = {i: Ed25519PrivateKey.generate() for i in self._numbers()}
        self._changed: set[int] = set()
        self._configured: set[int] = set()
        self._listeners: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def user(self) -> str:
        """The account on every host: that of the tests. An sshd without root's rights lets in no other."""
        return getpass.getuser()

    @property
    def ssh_config(self) -> Path:
        """The client configuration, as for `ssh -F`: the right key, all hosts known."""
        return self.folder / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def identity(self) -> Path:
        """The client key that every host accepts."""
        return self.folder / "id_ed25519"

    @cached_property
    def wrong_identity(self) -> Path:
        """A client key that no host accepts."""
        return write_key(self.folder / "id_wrong", Ed25519PrivateKey.generate())

    @cached_property
    def locked_identity(self) -> Path:
        """A client key that every host accepts, locked with `PASSPHRASE`."""
        key = Ed25519PrivateKey.generate()
        with (self.folder / "authorized_keys").open("a") as accepted:
            accepted.write(f"{public_line(key)} locked\n")
        return write_key(self.folder / "id_locked", key, BestAvailableEncryption(PASSPHRASE.encode()))

    @property
    def pids(self) -> frozenset[int]:
        """The listening sshd processes."""
        return frozenset(process.pid for process in self._listeners.values())

    def config(self, name: str, *, identity: Path | None = None, unknown: Collection[int] = ()) -> Path:
        """Write one more client configuration: with another key, or with some hosts not in known_hosts."""
        known_hosts = self.known_hosts
        if unknown:
            known_hosts = self.folder / f"{name}.known_hosts"
            self._write_known_hosts(known_hosts, without=unknown)
        return self._write_ssh_config(self.folder / name, identity or self.identity, known_hosts)

    def address(self, i: int) -> str:
        return f"127.0.0.{i + 1}"

    def log(self, i: int) -> str:
        """What the sshd of host i has said so far."""
        return (self._host_folder(i) / "sshd.log").read_text(errors="replace")

    def start(self, i: int) -> None:
        """Start host i unless it runs; return when it listens."""
        self._launch(i)
        self._await(i)

    def stop(self, i: int) -> None:
        """Kill host i as a crash would: its sshd, every session, and what those started, wherever it went."""
        listener = self._listeners.pop(i, None)
        if listener is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(listener.pid)
            below = root.children(recursive=True)
            kill([root])  # first, so that no new session begins
            kill(below)
        listener.wait()
        # What the sessions started may have left the tree, and may fork while it is looked for, even a last time.
        wait_until(lambda: not self._kill_marked(i) + self._kill_marked(i), f"{self.names[i - 1]} is dead")
        clear_temp(self._temp(i), own_group())

    def change_host_key(self, i: int) -> None:
        """Give host i a key that is not the one in known_hosts, as a reinstalled machine has."""
        self._changed.add(i)
        self._restart_with_key(i, Ed25519PrivateKey.generate())

    def configure(self, i: int, *lines: str) -> None:
        """Restart host i with lines of sshd_config in the places of its own, or beside them if it can have several."""
        self._configured.add(i)
        self.stop(i)
        replaced = {line.split()[0] for line in lines} - {"HostKey", "ListenAddress"}
        own = [line for line in self._sshd_config(i).splitlines() if line.split()[0] not in replaced]
        (self._host_folder(i) / "sshd_config").write_text("".join(f"{line}\n" for line in (*lines, *own)))
        self.start(i)

    def sessions(self, i: int) -> int:
        """How many connections host i has."""
        return len(psutil.Process(self._listeners[i].pid).children())

    @property
    def temps(self) -> Sequence[Path]:
        return [self._temp(i) for i in self._numbers()]

    def home(self, i: int) -> Path:
        """The HOME of sessions on host i."""
        return self._host_folder(i) / "home"

    def host_key(self, i: int) -> Path:
        return self._host_folder(i) / "host_key"

    def reset(self) -> None:
        """Undo what a test did: all hosts run, with the keys and files that they began with."""
        self._write_client_files()
        for i in self._numbers():
            if i in self._configured:
                self._configured.remove(i)
                self.stop(i)
                (self._host_folder(i) / "sshd_config").write_text(self._sshd_config(i))
            if i in self._changed:
                self._restart_with_key(i, self._keys[i])
                self._changed.remove(i)
            self._launch(i)
        for i in self._numbers():
            self._await(i)

    def _open(self) -> None:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # root's sshd refuses to start without it
        client = Ed25519PrivateKey.generate()
        write_key(self.identity, client)
        (self.folder / "authorized_keys").write_text(f"{public_line(client)} client\n")
        self.port = free_port([self.address(i) for i in self._numbers()])
        for i in self._numbers():
            self._write_host(i)
        self.reset()

    def _closers(self) -> Iterator[Callable[[], object]]:
        for i in tuple(self._listeners):
            yield partial(self.stop, i)

    def _numbers(self) -> range:
        return range(1, len(self.names) + 1)

    def _temp(self, i: int) -> Path:
        return self._host_folder(i) / "temp"

    def _host_folder(self, i: int) -> Path:
        return self.folder / self.names[i - 1]

    def _write_host(self, i: int) -> None:
        folder = self._host_folder(i)
        self.home(i).mkdir(parents=True)
        self._temp(i).mkdir()
        write_key(self.host_key(i), self._keys[i])
        (folder / "sshd_config").write_text(self._sshd_config(i))

    def _sshd_config(self, i: int) -> str:
        folder = self._host_folder(i)
        environment = {
            "HOME": str(self.home(i)), "TMPDIR": str(self._temp(i)), MARK: self.mark, HOST: self.names[i - 1],
            **for_coverage(), **self._env,
        }  # fmt: skip
        config = SSHD_CONFIG.format(
            address=self.address(i),
            port=self.port,
            folder=folder,
            authorized_keys=self.folder / "authorized_keys",
            environment=in_sshd_config(environment),
        )
        return config + self._penalties

    @cached_property
    def _penalties(self) -> str:
        return no_penalties(self._sshd, self.host_key(1))

    def _write_client_files(self) -> None:
        self._write_known_hosts(self.known_hosts)
        self._write_ssh_config(self.ssh_config, self.identity, self.known_hosts)

    def _write_known_hosts(self, path: Path, *, without: Collection[int] = ()) -> None:
        known = (i for i in self._numbers() if i not in without)
        path.write_text("".join(f"[{self.address(i)}]:{self.port} {public_line(self._keys[i])}\n" for i in known))

    def _write_ssh_config(self, path: Path, identity: Path, known_hosts: Path) -> Path:
        hosts = (
            SSH_CONFIG.format(
                name=self.names[i - 1],
                address=self.address(i),
                port=self.port,
                user=self.user,
                identity=identity,
                known_hosts=known_hosts,
            )
            for i in self._numbers()
        )
        path.write_text("".join(hosts))
        return path

    def _restart_with_key(self, i: int, key: Ed25519PrivateKey) -> None:
        self.stop(i)
        write_key(self.host_key(i), key)
        self.start(i)

    def _launch(self, i: int) -> None:
        listener = self._listeners.get(i)
        if listener is not None and listener.poll() is None:
            return
        folder = self._host_folder(i)
        argv = [self._sshd, "-D", "-e", "-f", str(folder / "sshd_config")]
        if self._hidden:
            hide = [path_of("unshare"), "--mount", "--propagation", "private", "--", "sh", "-c", HIDE, "hide"]
            argv = [*hide, *map(str, self._hidden), "--", *argv]
        with (folder / "sshd.log").open("wb") as log:
            self._listeners[i] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _await(self, i: int) -> None:
        # The log, not a connection: that would leave a session behind for a moment.
        def listens() -> bool:
            if (status := self._listeners[i].poll()) is not None:
                raise ChildProcessError(f"sshd of {self.names[i - 1]} ended with {status}: {self.log(i)}")
            return "Server listening on" in self.log(i)

        wait_until(listens, f"sshd of {self.names[i - 1]} listens on {self.address(i)}:{self.port}")

    def _kill_marked(self, i: int) -> int:
        found = marked({self.mark}, **{HOST: self.names[i - 1]})
        kill(found)
        return len(found)


class BareHosts(SshHosts):
    """Hosts that have a Python and nothing else: the project, its packages, and `here`, where tests have their own."""

    parts: ClassVar[Mapping[str, str]] = {"unshare": PARTS["unshare"]}

    def __init__(self, folder: Path, *, count: int = 2) -> None:
        self.here = folder / "here"
        self.here.mkdir(parents=True)
        packages = [Path(path) for path in sys.path if Path(path).name == "site-packages" and Path(path).is_dir()]
        super().__init__(folder, count=count, hidden=(self.here, *packages, Path(sys.prefix), ROOT))

    @staticmethod
    def why_not() -> str | None:
        if os.geteuid() != 0:
            return "only root can give each host a mount namespace"
        try:
            run_part("unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt")
        except ChildProcessError as error:
            return str(error)
        return None

    def cache(self, i: int) -> Path:
        """Where host i keeps what it was sent."""
        return self.home(i) / ".cache" / "dtrain"

    def reset(self) -> None:
        for i in self._numbers():
            shutil.rmtree(self.home(i), ignore_errors=True)
            self.home(i).mkdir(parents=True)
        super().reset()


def for_coverage() -> dict[str, str]:
    """Return the variables by which what runs on a host is measured too; none unless this process is."""
    return {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}


def in_sshd_config(environment: Mapping[str, str]) -> str:
    """Variables as SetEnv takes them."""
    return " ".join(f'"{name}={value}"' for name, value in environment.items())


def no_penalties(sshd: str, host_key: Path) -> str:
    """The line of sshd's configuration by which failed logins have no consequences; empty where it knows none.

    From 9.8 on sshd shuts out an address whose logins fail; here all clients have the same one. Older ones refuse
    to start when they learn of it.
    """
    probe = [sshd, "-T", "-f", "/dev/null", "-h", str(host_key), "-o", "PerSourcePenalties=no"]
    known = subprocess.run(probe, capture_output=True).returncode == 0
    return "PerSourcePenalties no\n" if known else ""


def write_key(path: Path, key: PrivateKey, lock: KeySerializationEncryption | None = None) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(_private(key, lock))
    path.with_name(f"{path.name}.pub").write_text(f"{public_line(key)}\n")
    return path


def _private(key: PrivateKey, lock: KeySerializationEncryption | None = None) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, lock or NoEncryption())


def certify(authority: Path, key: Path, *, name: str, host: bool = False, valid: str = "+1h") -> Path:
    """Sign a key (its .pub) by an authority's key for a user or a host of that name; return the certificate."""
    options = ["-h"] if host else []
    argv = ["ssh-keygen", "-q", "-s", str(authority), *options, "-I", "test", "-n", name, "-V", valid, f"{key}.pub"]
    subprocess.run(argv, check=True, capture_output=True)
    return key.with_name(f"{key.name}-cert.pub")


def public_line(key: PrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
