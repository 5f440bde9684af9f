"""A small real SLURM cluster on loopback: munged, slurmctld and a slurmd for every node, all on this machine.

Everything lies in one folder: key, configuration, state, logs, and the GPUs, which are clones of /dev/null. Nothing in
/etc is read or written, nothing listens but on 127.0.0.1. No control groups and no task plugin: what SLURM gives to a
job confines it only as far as environment variables do. Needs root. Jobs inherit the test's mark with its environment.
"""

import contextlib
import datetime
import os
import socket
import stat
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from testbed.lab import Lab
from testbed.namespaces import SYSTEM_PATH, find_part
from testbed.processes import MARK, TIMEOUT_S, Result, kill_tree, run_program, wait_until

PARTS = {  # and their packages
    "slurmctld": "slurmctld", "slurmd": "slurmd", "munged": "munge", "srun": "slurm-client",
}  # fmt: skip
HOST = "127.0.0.1"
START_S = 90.0
NODE = "DTRAIN_TEST_NODE"
FIRST_PORT = 23000  # of those looked at for free ones; below the range that the kernel hands out
NULL_DEVICE = os.makedev(1, 3)

CONFIG = """\
ClusterName=lab
SlurmctldHost={controller}({host})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={kill_wait_s}
SlurmdTimeout=10
SlurmctldTimeout=10
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,max_array_tasks=100
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
LaunchParameters=use_interactive_step
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Node:
    cpus: int = 2
    gpus: int = 0


class SlurmCluster(Lab):
    """Nodes node1 ... nodeN. They run inside the `with` block, and nothing of them or their jobs after it."""

    parts = PARTS

    def __init__(self, folder: Path, nodes: Sequence[Node], *, kill_wait_s: int = 2) -> None:
        self.folder = folder
        self.nodes = {f"node{i}": node for i, node in enumerate(nodes, 1)}
        self.mark = uuid.uuid4().hex
        self._kill_wait_s = kill_wait_s
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # by node; and munged, slurmctld

    @staticmethod
    def why_not() -> str | None:
        return None if os.geteuid() == 0 else "only root can run one"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.nodes)

    @property
    def config(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def env(self) -> Mapping[str, str]:
        """What makes SLURM's commands speak to this cluster."""
        return {"SLURM_CONF": str(self.config)}

    @property
    def pids(self) -> frozenset[int]:
        """The processes that make the cluster."""
        found = {process.pid for process in self._processes.values()}
        for process in self._processes.values():  # slurmctld has a helper
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {child.pid for child in psutil.Process(process.pid).children()}
        return frozenset(found)

    def run(
        self,
        *argv: str | Path,
        cwd: Path | None = None,
        stdin: str | None = None,
        timeout: float = TIMEOUT_S,
        outlived: bool = False,
    ) -> Result:
        """Run one of SLURM's commands, or a program that calls them, to its end. A job that it submits outlives it."""
        return run_program(*argv, env=self.env, cwd=cwd, stdin=stdin, timeout=timeout, outlived=outlived)

    def say(self, *argv: str | Path, cwd: Path | None = None, stdin: str | None = None, outlived: bool = False) -> str:
        """Run a command that must succeed; return what it printed."""
        result = self.run(*argv, cwd=cwd, stdin=stdin, outlived=outlived)
        assert result.returncode == 0, f"{argv}: {result.stderr}"
        return result.stdout.strip()

    # ---- jobs ----

    def submit(self, script: Path | str, *options: str, cwd: Path | None = None) -> str:
        """Submit a script, by its file or as text; return the job's id."""
        if isinstance(script, Path):
            return self.say("sbatch", "--parsable", *options, script, cwd=cwd, outlived=True)
        return self.say("sbatch", "--parsable", *options, cwd=cwd, stdin=script, outlived=True)

    def facts(self, job: str) -> dict[str, str]:
        """What scontrol shows of a job."""
        words = self.say("scontrol", "--oneliner", "show", "job", job).splitlines()[0].split()
        return dict(word.partition("=")[::2] for word in words)

    def await_state(self, job: str, *states: str, timeout: float = TIMEOUT_S) -> dict[str, str]:
        """Wait until the job is in one of these states; return its facts."""
        found: dict[str, str] = {}

        def reached() -> bool:
            found.update(self.facts(job))
            return found["JobState"] in states

        wait_until(reached, f"job {job} is {' or '.join(states)}", timeout)
        return found

    def start_now(self, job: str) -> None:
        """Begin a job that was queued again, which SLURM itself would do after two minutes."""

        def ready() -> bool:
            facts = self.facts(job)
            if (facts["JobState"], facts["Reason"]) != ("PENDING", "BeginTime"):
                return False
            # Within two seconds its nodes still refuse the job by the word that ended it.
            waits = datetime.datetime.fromisoformat(facts["StartTime"]) - datetime.datetime.now()
            return waits.total_seconds() < 118

        wait_until(ready, f"job {job} is queued again")
        self.say("scontrol", "update", f"JobId={job}", "StartTime=now")

    def reset(self) -> None:
        """Undo what a test did: no jobs, all nodes up and idle."""
        self.run("scancel", "--quiet", "--user=root")
        for name in self.names:
            if self._processes[name].poll() is not None:
                self.boot(name)
        self._await_idle()

    # ---- faults ----

    def crash(self, name: str) -> None:
        """Kill a node's slurmd, so that it reports nothing, then every step there with all that it started."""
        slurmd = self._processes[name]
        slurmd.kill()
        slurmd.wait()
        wait_until(lambda: not self._kill_steps(name), f"nothing of a job runs on {name}")

    def boot(self, name: str) -> None:
        """Start the slurmd of a node that crashed, and wait until it can be used."""
        # SLURM would find out by itself, half a minute later.
        self.say("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=crashed")
        self._start_node(name)
        self._await_idle()

    def steps(self, name: str) -> list[psutil.Process]:
        """The slurmstepd processes of a node."""
        variable = f"{NODE}={self._tag(name)}".encode()
        found = []
        for process in psutil.process_iter():
            # Read by itself: a slurmstepd writes its title over the beginning of its environment.
            with contextlib.suppress(psutil.Error, OSError):
                if process.name() == "slurmstepd":
                    variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                    found += [process] if variable in variables else []
        return found

    def _kill_steps(self, name: str) -> int:
        steps = self.steps(name)
        for step in steps:
            kill_tree(step.pid)
        return len(steps)

    def _tag(self, name: str) -> str:
        return f"{self.folder}:{name}"

    # ---- from beginning to end ----

    def _open(self) -> None:
        self._write_files()
        self._start_munged()
        self._start("slurmctld", "slurmctld", "-D", "-c", "-f", str(self.config))
        for name in self.names:
            self._start_node(name)
        self._await_idle()

    def _closers(self) -> Iterator[Callable[[], object]]:
        for name, process in self._processes.items():
            yield partial(self._stop, name, process)
        for name in self.names:
            yield partial(self._kill_steps, name)

    def _write_files(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(128))
        first = _free_ports(1 + len(self.nodes))
        lines = CONFIG.format(
            controller=socket.gethostname().split(".")[0],
            host=HOST,
            port=first,
            folder=self.folder,
            kill_wait_s=self._kill_wait_s,
        )
        gres = ""
        for port, (name, node) in enumerate(self.nodes.items(), first + 1):
            gpus = f"Gres=gpu:{node.gpus}" if node.gpus else ""
            lines += (
                f"NodeName={name} NodeHostname={socket.gethostname().split('.')[0]} NodeAddr={HOST} Port={port} "
                f"CPUs={node.cpus} RealMemory=2000 {gpus}\n"
            )
            gres += f"NodeName={name} Name=gpu File={self._make_gpus(name, node.gpus)}\n" if node.gpus else ""
        self.config.write_text(lines)
        (self.folder / "gres.conf").write_text(gres)

    def _make_gpus(self, name: str, count: int) -> str:
        """Make devices; only of those does SLURM tell a job by CUDA_VISIBLE_DEVICES."""
        folder = self.folder / f"dev.{name}"
        folder.mkdir()
        for number in range(count):
            os.mknod(folder / f"gpu{number}", 0o666 | stat.S_IFCHR, NULL_DEVICE)
        return f"{folder}/gpu[0-{count - 1}]"

    def _start_munged(self) -> None:
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        self._start("munged", "munged", "--foreground", "--force", *options)  # force: others cannot enter the folder
        wait_until((self.folder / "munge.socket").exists, "munged has its socket")

    def _start_node(self, name: str) -> None:
        self._start(name, "slurmd", "-D", "-N", name, "-f", str(self.config))

    def _start(self, name: str, part: str, *args: str) -> None:
        path = find_part(part)
        assert path is not None, f"no {part} on this machine: apt-get install {PARTS[part]}"
        environment = {"PATH": SYSTEM_PATH, "LC_ALL": "C", **self.env, MARK: self.mark, NODE: self._tag(name)}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [path, *args], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
            )

    def _await_idle(self) -> None:
        def idle() -> bool:
            for name, process in self._processes.items():
                if (status := process.poll()) is not None:
                    log = (self.folder / f"{name}.log").read_text(errors="replace")
                    raise ChildProcessError(f"{name} ended with {status}: {log[-2000:]}")
            states = self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
            return states == ["idle"] * len(self.nodes)

        wait_until(idle, "all nodes are idle", START_S)

    def _stop(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        with process:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                kill_tree(process.pid)


def _free_ports(count: int) -> int:
    """The first of so many ports in a row that are free on this host."""
    begin = FIRST_PORT + time.monotonic_ns() % 7000  # another test run beside this one looks elsewhere first
    for first in range(begin, begin + 2000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind((HOST, port))
            except OSError:
                continue
            return first
    raise OSError(f"no {count} ports in a row are free from {begin} on")
