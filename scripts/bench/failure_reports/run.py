"""One run of a case by one launcher: starts its commands, keeps each line with its time, and finds what is left."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
from testbed.left import describe
from testbed.processes import MARK, kill, marked, wait_until

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 150.0
LEFT_S = 10.0  # that processes may still take to end once the commands have ended
KEEP_ALIVE_S = 5  # after which a silent host is lost
RENDEZVOUS = f"join_timeout=60,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt={KEEP_ALIVE_S}"
OF_TORCHRUN = {
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name}${rank}]:",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
DEBUG = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL"
}  # names ranks; torch's DistributedDataParallel crashes with it (2.13, CPU)


class Hosts(Protocol):
    """The hosts of testbed/sshd.py and testbed/network.py."""

    mark: str

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def ssh_config(self) -> Path: ...
    @property
    def temps(self) -> Sequence[Path]: ...
    @property
    def pids(self) -> frozenset[int]: ...


@dataclass(frozen=True)
class Line:
    """What a command wrote at a time; commands are numbered."""

    at: float
    command: int
    text: str


class Run:
    """The commands of one run, and what they wrote. They end with the `with` block."""

    def __init__(self, launcher: str, folder: Path, lab: Hosts, addresses: Sequence[str], *, debug: bool) -> None:
        """`debug`: with torch's debug level DETAIL, under torchrun."""
        self.launcher, self.folder, self.lab, self.addresses = launcher, folder, lab, addresses
        self._of_torchrun = {**OF_TORCHRUN, **(DEBUG if debug else {})}
        self.commands: list[subprocess.Popen[bytes]] = []
        self.lines: list[Line] = []
        self.began = self.ended = time.monotonic()
        self._readers: list[threading.Thread] = []
        self._files = self._files_now()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.commands:
            process.kill()
        kill(self._processes())
        for process, reader in zip(self.commands, self._readers, strict=True):
            process.wait()
            reader.join(5)

    # ---- commands ----

    def start(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a command here, in a session of its own, with a pipe as its input."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self._temp), MARK: self.lab.mark}
        environment |= self._of_torchrun if self.launcher == "torchrun" else {}
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "COLUMNS": "160"}
        self._temp.mkdir(exist_ok=True)
        self.began = time.monotonic()
        process = subprocess.Popen(
            argv,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read, args=(len(self.commands), process), daemon=True)
        self.commands.append(process)
        self._readers.append(reader)
        reader.start()
        return process

    def here(
        self,
        script: str,
        *words: str,
        workers: int,
        standalone: Sequence[str] = ("--standalone",),
        **options: Sequence[str],
    ) -> None:
        """Start a script on this machine alone; `options` are those of each launcher."""
        count, own = str(workers), options.get(self.launcher, ())
        argv = {
            "dtrain": [sys.executable, "-m", "launcher", "run", "--nproc-per-node", count],
            "torchrun": [*self._torchrun(workers), *standalone],
            "mpirun": ["mpirun", "--tag-output", "--oversubscribe", "-np", count, *self._mpi_variables("127.0.0.1")],
        }[self.launcher]
        python = [sys.executable] if self.launcher == "mpirun" else []
        self.start([*argv, *own, *python, *self._script(script, words)])

    def on_hosts(
        self, script: str, *words: str, hosts: Sequence[int], workers: int, pause_s: float = 0, **options: Sequence[str]
    ) -> None:
        """Start a script on these hosts of the lab (numbers from 0): with torchrun by one command on each."""
        names, own = [self.lab.names[i] for i in hosts], options.get(self.launcher, ())
        if self.launcher == "dtrain":
            where = ["--ssh-config", str(self.lab.ssh_config), "--hosts", ",".join(names)]
            argv = [sys.executable, "-m", "launcher", "run", *where, "--nproc-per-node", str(workers)]
            self.start([*argv, *own, *self._script(script, words)])
        elif self.launcher == "torchrun":
            endpoint = f"{self.addresses[hosts[0]]}:{free_port(self.addresses[hosts[0]])}"
            for i, name in zip(hosts, names, strict=True):
                argv = [*self._torchrun(workers), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
                argv += ["--rdzv-id", "bench", "--rdzv-conf", RENDEZVOUS]
                values = {"address": self.addresses[i], "from_last": len(hosts) - 1 - hosts.index(i)}
                mine = [word.format(**values) for word in own]
                self.start(self._ssh(name, [*argv, *mine, *self._script(script, words)]))
                time.sleep(pause_s)
        else:
            agent = self.folder / "rsh"
            agent.write_text(f'#!/bin/sh\nexec ssh -F {self.lab.ssh_config} "$@"\n')
            agent.chmod(0o700)
            mca = ("plm_rsh_agent", str(agent)), ("oob_tcp_if_include", "lo"), ("btl", "self,tcp")
            slots = ",".join(f"{name}:{workers}" for name in names)
            argv = ["mpirun", "--tag-output", *(word for pair in mca for word in ("--mca", *pair))]
            argv += ["--host", slots, "-np", str(workers * len(names)), *self._mpi_variables(self.addresses[hosts[0]])]
            self.start([*argv, *own, sys.executable, *self._script(script, words)])

    def _torchrun(self, workers: int) -> list[str]:
        """Return torchrun's command: output of all ranks on the terminal and in files, prefixed by rank."""
        argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers)]
        return [*argv, "--tee", "3", "--log-dir", str(self.folder / "logs")]

    def send(self, text: str) -> None:
        """Type text into the command that was started last."""
        stdin = self.commands[-1].stdin
        assert stdin is not None
        stdin.write(text.encode())
        stdin.flush()

    def end(self, limit_s: float = LIMIT_S) -> None:
        """Wait until all commands have ended; one that does not is killed, with what it started."""
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: all(p.poll() is not None for p in self.commands), "the commands' end", limit_s)
        self.ended = time.monotonic()

    @property
    def codes(self) -> str:
        """The exit codes; `-` for a command that had to be killed."""
        codes = ["-" if p.returncode is None else str(p.returncode) for p in self.commands]
        return codes[0] if len({*codes}) == 1 and len(codes) < 2 else " ".join(codes)

    # ---- what happened ----

    def noted(self, what: str) -> list[tuple[float, str]]:
        """Return the moments that ranks have noted, the earliest first, each with its text."""
        found = [path.read_text().partition(" ") for path in self.folder.glob(f"{what}.*.noted")]
        return sorted((float(at), text) for at, _, text in found)

    def wait(self, what: str, count: int, limit_s: float = LIMIT_S) -> None:
        """Wait until so many ranks have noted it. Raises RuntimeError, with what the commands wrote, if they do not."""

        def is_over() -> bool:
            return len(self.noted(what)) >= count or all(p.poll() is not None for p in self.commands)

        with contextlib.suppress(TimeoutError):
            wait_until(is_over, f"{count} ranks have noted {what!r}", limit_s)
        if len(self.noted(what)) < count:
            raise RuntimeError(f"{self.launcher}: fewer than {count} ranks have noted {what!r}; it wrote:\n{self.text}")

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)

    def left(self) -> list[str]:
        """Return what is left of the run: processes and where they listen, shared memory, temporary files."""
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self._processes(), "all have ended", LEFT_S)
        files = self._files_now() - self._files
        if files:  # of other programs' semaphores each is there for a moment
            time.sleep(1)
            files &= self._files_now()
        return [describe(process.pid) for process in self._processes()] + sorted(files)

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in marked({self.lab.mark}):
            with contextlib.suppress(psutil.Error):
                is_lab = process.pid in self.lab.pids or process.name().startswith("sshd")
                if process.pid != os.getpid() and not is_lab and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _files_now(self) -> set[str]:
        folders = [Path("/dev/shm"), self._temp, *self.lab.temps]
        found = {path for folder in folders if folder.exists() for path in folder.iterdir()}
        kept = re.compile(r"torchinductor_|(dtrain|ddp)-\d+$")  # torch's, and empty folders of the user for all runs
        return {
            str(path) for path in found if not kept.match(path.name) or (path.name[0] == "d" and any(path.iterdir()))
        }

    @property
    def _temp(self) -> Path:
        return self.folder / "tmp"

    def _read(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(Line(time.monotonic(), number, line.decode(errors="replace").rstrip("\r\n")))

    def _script(self, script: str, words: Sequence[str]) -> list[str]:
        return [str(SCRIPTS / script), str(self.folder), *words]

    def _ssh(self, name: str, argv: Sequence[str]) -> list[str]:
        variables = [f"{name}={value}" for name, value in {**self._of_torchrun, "PYTHONPATH": str(ROOT)}.items()]
        words = shlex.join(["env", *variables, *argv])
        return ["ssh", "-F", str(self.lab.ssh_config), name, f"cd {self.folder} && exec {words}"]

    def _mpi_variables(self, address: str) -> Iterator[str]:
        values = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port(address)), "PYTHONPATH": str(ROOT)}
        for name, value in values.items():
            yield from ("-x", f"{name}={value}")


def free_port(address: str) -> int:
    """Return a port that is free at an address of this machine; on a host with a network of its own all are."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return 29400
        return int(probe.getsockname()[1])


def signalled(process: subprocess.Popen[bytes], signum: signal.Signals) -> float:
    """Send the command a signal; return when."""
    at = time.monotonic()
    process.send_signal(signum)
    return at
