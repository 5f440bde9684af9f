"""Agents on the nodes of our SLURM allocation: one `srun` per node, whose pipes are the byte stream.

A single srun for all nodes would use less time of this machine from about 32 nodes on. But its tasks' output is one
stream, so each agent would have to connect back to a port here, which sites with a firewall do not allow; nodes that
cannot would need a second transport.

Each is a job step that overlaps all others and has all resources of the job on its nodes. Variables of the job that
srun would read as options are removed from its environment: they are meant for the job, and mean something else or are
rejected in a step. Its error messages are explained with the next step.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from launcher.errors import HostError, UsageError
from launcher.hosts.host import Host
from launcher.hosts.ranges import expand
from launcher.hosts.slurm_allocation import Allocation, Node, find_allocation, step_title
from launcher.machine.gpus.vendors import VENDORS
from launcher.transport.client import Clients, ClientStream
from launcher.transport.setup import why_setup_failed

LOOK_FOR_S = 30.0  # for an answer of SLURM

# Variables that are options of srun (SLURM_...), except those that locate the cluster and the job.
_OPTION_NAMES = """
    ACCOUNT ACCTG_FREQ ARBITRARY_NODELIST BCAST BCAST_EXCLUDE BURST_BUFFER CLUSTER_CONSTRAINT COMPRESS CONSTRAINT
    CONTAINER CONTAINER_ID CORE_SPEC CPU_FREQ_REQ CPUS_PER_GPU CPUS_PER_TASK DEBUG DEBUG_FLAGS DELAY_BOOT DEPENDENCY
    DISABLE_STATUS DIST_PLANESIZE DISTRIBUTION EPILOG EXACT EXCLUSIVE EXIT_ERROR EXIT_IMMEDIATE EXPORT_ENV GPU_BIND
    GPU_FREQ GPUS GPUS_PER_NODE GPUS_PER_SOCKET GPUS_PER_TASK GRES GRES_FLAGS HINT HOSTFILE IMMEDIATE KILL_BAD_EXIT
    LABELIO MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE MPI_TYPE NCORES_PER_SOCKET NO_KILL NPROCS NSOCKETS_PER_NODE NTASKS
    NTASKS_PER_CORE NTASKS_PER_GPU NTASKS_PER_NODE NTASKS_PER_SOCKET NTASKS_PER_TRES OPEN_MODE OVERCOMMIT OVERLAP
    PARTITION POWER PROFILE PROLOG QOS RELATIVE REMOTE_CWD REQ_SWITCH RESERVATION RESV_PORTS SEND_LIBS SIGNAL SPREAD_JOB
    STDERRMODE STDINMODE STDOUTMODE STEP_GRES TASK_EPILOG TASK_PROLOG TEST_EXEC THREADS THREADS_PER_CORE THREAD_SPEC
    TIMELIMIT TREE_WIDTH TRES_BIND TRES_PER_TASK UNBUFFEREDIO USE_MIN_NODES WAIT WAIT4SWITCH WCKEY WHOLE WORKING_DIR
"""
_OPTIONS = {"SLURMD_DEBUG", *(f"SLURM_{name}" for name in _OPTION_NAMES.split())}
_OPTION_FAMILIES = ("SRUN_", "SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_PTY_")
# Those that scripts read. They bypass srun and are passed to the workers.
_READ_BY_SCRIPTS = (
    "SLURM_CPUS_PER_GPU", "SLURM_CPUS_PER_TASK", "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK",
    "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_NTASKS_PER_NODE",
)  # fmt: skip
# GPUs named by SLURM are those of this node.
_GPU_LISTS = tuple(name for vendor in VENDORS for name in vendor.lists)
_SAYS_GPUS = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE")


class Srun:
    """Starts agents on the nodes of our allocation; owned by the transport (connect.py). Any thread may call it."""

    def __init__(self) -> None:
        self._clients = Clients()
        self._lock = threading.Lock()
        self._known: tuple[Allocation | None, dict[str, tuple[str, ...]]] | None = None  # the job never changes

    def connect(self, host: Host, command: Sequence[str], deadline: float, first: bytes = b"") -> SrunStream:
        """Start the agent on a node in its own job step; block until it or srun writes something or ends.

        `first` is written to it at once. Blocks until `deadline` (monotonic) at most. Raises HostError.
        """
        if shutil.which("srun") is None:
            raise HostError(host.name, "there is no srun in PATH here; add SLURM's commands to PATH, or name --hosts")
        try:
            allocation, granted = self._ask()
        except UsageError as error:
            raise HostError(host.name, str(error)) from error
        node = next((node for node in allocation.nodes if node.name == host.name), None) if allocation else None
        if allocation is None or node is None:
            raise HostError(host.name, "is not a node of this SLURM job; name it with --hosts to reach it by SSH")
        argv = srun_command(node, command, os.environ, granted=granted[node.name], deadline=deadline)
        env = srun_environment(os.environ)
        return self._clients.open(
            host.name, lambda finished: SrunStream(argv, env, finished=finished), deadline, first=first, what="srun"
        )

    def close(self) -> None:
        """Kill every srun that is not finished, without the lock, which is held while SLURM is asked."""
        self._clients.close()

    def _ask(self) -> tuple[Allocation | None, dict[str, tuple[str, ...]]]:
        """Return the allocation and the job's resources on each node; ask SLURM once. Raises UsageError."""
        with self._lock:
            if self._known is None:
                allocation = find_allocation(os.environ, step_title())
                nodes = () if allocation is None else allocation.nodes
                granted = {} if allocation is None else _ask_granted(allocation.job)
                self._known = (
                    allocation,
                    {node.name: granted.get(node.name) or presumed(os.environ, node, len(nodes)) for node in nodes},
                )
            return self._known


def srun_command(
    node: Node, command: Sequence[str], env: Mapping[str, str], *, granted: Sequence[str], deadline: float
) -> list[str]:
    """Return the srun command for a node, with all resources of the job there: `granted`, processors and memory.

    srun gives up some time before `deadline` (monotonic) if the step cannot start; by default it would wait forever.
    """
    kept = [f"{name}={env[name]}" for name in _READ_BY_SCRIPTS if name in env]
    return [
        "srun",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node.name}",
        *([] if node.group is None else [f"--het-group={node.group}"]),
        *granted,
        "--kill-on-bad-exit=1",
        "--mem=0",  # all of the job's
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        "--chdir=/",
        f"--immediate={max(1, int(0.8 * (deadline - time.monotonic())))}",
        "--job-name=dtrain",
        "--quiet",
        *(["env", *kept] if kept else []),
        *command,
    ]


def srun_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of srun, and thus of the agent: without srun's options and this node's GPUs."""
    named = any(name in env for name in _SAYS_GPUS)
    dropped = {*_OPTIONS, *(_GPU_LISTS if named else ()), *_SAYS_GPUS}
    return {k: v for k, v in env.items() if k not in dropped and not k.startswith(_OPTION_FAMILIES)}


def parse_granted(text: str) -> dict[str, tuple[str, ...]]:
    """Parse `scontrol --details show job`: return the job's resources on each node, as options of srun.

    Empty if it has only processors and memory on every node: the cluster may not define other resources.

    >>> parse_granted("Nodes=n[1-2] CPU_IDs=0-3 Mem=0 GRES=gpu:a100:2(IDX:0-1),nic:1(CNT:1)")
    {'n1': ('--gpus=a100:2', '--gres=nic:1'), 'n2': ('--gpus=a100:2', '--gres=nic:1')}
    """
    granted: dict[str, tuple[str, ...]] = {}
    for nodes, gres in re.findall(r"\bNodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", text):
        items = [item for item in re.sub(r"\([^)]*\)", "", gres).split(",") if item]
        gpus = [item.removeprefix("gpu:") for item in items if item.startswith("gpu:")]
        others = [item for item in items if not item.startswith("gpu:")]
        options = [f"--{name}={','.join(values)}" for name, values in (("gpus", gpus), ("gres", others)) if values]
        granted.update(dict.fromkeys(expand(nodes), tuple(options) or ("--gres=none",)))
    return granted if set(granted.values()) != {("--gres=none",)} else {}


def presumed(env: Mapping[str, str], node: Node, nodes: int) -> tuple[str, ...]:
    """Return the same for a node from variables if SLURM could not be asked; they are incomplete.

    Without any of these options a step requests what the job requested for every node.
    """
    for variable, share in (("SLURM_GPUS_PER_TASK", float(node.tasks or 1)), ("SLURM_GPUS", 1 / nodes)):
        kind, colon, number = env.get(variable, "").rpartition(":")
        if re.fullmatch("[0-9]{1,6}", number):
            return (f"--gpus={kind}{colon}{max(1, int(int(number) * share))}",)
    return ()


def _ask_granted(job: str) -> dict[str, tuple[str, ...]]:
    """Ask SLURM for the resources of the job; empty if it does not answer."""
    try:
        done = subprocess.run(
            ["scontrol", "--details", "--oneliner", "show", "job", job],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LOOK_FOR_S,
            start_new_session=True,
        )
        return parse_granted(done.stdout.decode("utf-8", "replace"))
    except (OSError, subprocess.TimeoutExpired, UsageError):  # missing, busy, or an unknown format
        return {}


class SrunStream(ClientStream):
    """An srun and its pipes."""

    def finish(self, wait_s: float) -> tuple[int | None, str]:
        status, words = super().finish(wait_s)
        if status is not None and status < 0:
            words += f"srun: the srun here was killed by signal {-status}\n"
        return status, explain(words)


def explain(words: str) -> str:
    """Return in one line why srun ended, from the stderr of srun, slurmstepd and the agent.

    If --setup failed, the result is all that it wrote.
    """
    lines = [line for line in map(str.strip, words.splitlines()) if line and not _NOISE.search(line)]
    if why_setup_failed(words):
        return "\n".join(lines)
    for pattern, meaning in _MEANINGS:
        for line in lines:
            if _PREFIX.match(line) and re.search(pattern, line):
                return f"{_PREFIX.sub('', line)} ({meaning})"
    return _PREFIX.sub("", lines[-1]) if lines else ""


_PREFIX = re.compile(r"^(?:srun|slurmstepd(?:-\S+)?): (?:error: |fatal: )?")
_NOISE = re.compile(
    r"lacks support for cpu binding|tasks? [-0-9,]+: (?:Exited with exit code|Killed|Terminated)"
    r"|Job step aborted|[Ff]orc(?:e|ing) [Tt]erminat|couldn't chdir|launch/slurm: "
)
_MEANINGS = (
    (r"DUE TO TIME LIMIT", "the job may run longer with sbatch --time"),
    (r"DUE TO PREEMPTION", "another job preempted it; a job with --requeue is requeued"),
    (r"DUE TO NODE FAILURE|Node failure on", "SLURM lost the node; see sinfo --list-reasons"),
    (r"CANCELLED AT", "the job or its step was cancelled, or SLURM ended it"),
    (r"[Nn]odes are busy|temporarily disabled", "other steps of the job use the node; start them with --overlap"),
    (r"[Nn]ode.* not available|Invalid node name", "the node is down, or not the job's; see sinfo --list-reasons"),
    (r"\(gres\)|have GRES", "ask for GPUs by node: sbatch --gpus-per-node"),
    (
        r"Invalid job id|[Jj]ob.* (?:expired|revoked|complet)",
        "the job is over, or its SLURM_JOB_ID is not this cluster's",
    ),
    (r"[Mm]unge", "is munged running here? In a container, its socket under /run/munge must be there"),
    (r"configuration source|cannot stat file", "no slurm.conf here; in a container, /etc/slurm must be there"),
    (r"contact slurm controller|Unable to contact", "slurmctld does not answer; try: scontrol ping"),
    (r"Task launch .*failed|Communication connection|Connection refused", "its slurmd does not answer; see sinfo"),
    (r"oom.kill|Out Of Memory", "it used more memory than the job has on the node; see sbatch --mem"),
)
