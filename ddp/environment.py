"""Reads this process's placement from the launcher's environment: torchrun's variables, Open MPI's or SLURM's.

Pure functions of a mapping, called by `ddp.world`, except `typed_in_a_shell`; nothing here talks to a process group.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ddp.errors import LaunchEnvironmentError


@dataclass(frozen=True)
class Placement:
    """The place of one process in its world, as its launcher announced it.

    `source` names the launcher's convention ("env", "mpirun", "srun" or "alone"); `job_key` is a string that only the
    processes of this job share, or None if the launcher has none; `node_rank` is None if unknown.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int | None
    source: str
    job_key: str | None = None

    def __post_init__(self) -> None:
        for name, index, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if size < 1:
                raise LaunchEnvironmentError(
                    f"{self._where()}: a world for {name}s of size {size}; it must be 1 or more"
                )
            if not 0 <= index < size:
                raise LaunchEnvironmentError(
                    f"{self._where()}: {name} {index} in a world of {size}; it must be 0 to {size - 1}. "
                    "Start every process of the job with the same world size and its own rank"
                )
        if self.local_world_size > self.world_size:
            raise LaunchEnvironmentError(
                f"{self._where()}: {self.local_world_size} local processes in a world of {self.world_size}; "
                "the local world cannot be larger than the whole"
            )

    @property
    def is_single_host(self) -> bool:
        """Whether every rank of the world runs on this host."""
        return self.local_world_size == self.world_size

    def _where(self) -> str:
        names = {
            "env": "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
            "mpirun": "OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE",
            "srun": "SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID",
        }
        return f"contradiction in the environment ({names.get(self.source, self.source)})"


ALONE = Placement(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, source="alone")


def run_of(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the launcher's run id, "" without one, and the number of the attempt, from 0.

    Under dtrain, whose DTRAIN_ATTEMPT is `run id/number`, TORCHELASTIC_RESTART_COUNT also counts the restarts of a
    process within an attempt. dtrain may have started another launcher.
    """
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    run_of_dtrain, _, attempt = environ.get("DTRAIN_ATTEMPT", "").rpartition("/")
    if run_of_dtrain != run_id:
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if run_id in ("", "none") and environ.get("SLURM_STEP_ID", "").isdecimal():  # torchrun says "none" by default
        run_id = f"slurm {environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
        attempt = environ.get("SLURM_RESTART_COUNT", "")
    return "" if run_id == "none" else run_id, int(attempt) if attempt.isdecimal() else 0


def typed_in_a_shell() -> bool:
    """Return whether this process was typed in an interactive shell: it has a terminal, and a process group of its own.

    A task that `srun --pty` starts has the terminal too, but leads its session or is in the leader's group.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return os.getpgrp() != os.getsid(0)


def read_placement(environ: Mapping[str, str], *, is_typed: Callable[[], bool] = typed_in_a_shell) -> Placement:
    """Read this process's placement: from RANK and its family, else Open MPI's variables, else those of an `srun` step.

    With none of them the process is alone; so it is if a step's variables are only inherited. `is_typed` is asked in a
    shell of `srun --pty`, and in what is started there. Raises LaunchEnvironmentError for incomplete or malformed
    variables.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_env(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _from_mpirun(environ)
    # A batch script has SLURM_PROCID=0 and SLURM_NTASKS=n too, but it is one process: only a step's tasks
    # are a world.
    if "SLURM_PROCID" not in environ or not environ.get("SLURM_STEP_ID", "").isdecimal():
        return ALONE
    # A process that is typed in a shell of `srun --pty` has that step's variables.
    if _is_of_another_step(environ) or (environ.get("SLURM_PTY_PORT") and is_typed()):
        return ALONE
    return _from_srun(environ)


def roles_of(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the number of processes of each role, in the order of their ranks; empty if not set.

    DTRAIN_ROLES is "chief:1,worker:3,ps:2,evaluator:1". Raises LaunchEnvironmentError if it is malformed.
    """
    roles: dict[str, int] = {}
    for part in filter(None, environ.get("DTRAIN_ROLES", "").split(",")):
        name, _, count = part.partition(":")
        if not name or not count.isdecimal():
            raise LaunchEnvironmentError(f"DTRAIN_ROLES={environ['DTRAIN_ROLES']!r} is not name:count,name:count")
        roles[name] = int(count)
    return roles


def _from_env(environ: Mapping[str, str]) -> Placement:
    rank, world_size = _required(environ, "RANK"), _required(environ, "WORLD_SIZE")
    # torch needs no local rank; without one, the whole world is assumed to be on this host, and on a host
    # with fewer devices than that the choice of a device fails with the name of the variable to set.
    local_rank = _optional(environ, "LOCAL_RANK")
    local_world_size = _optional(environ, "LOCAL_WORLD_SIZE")
    if local_world_size is None:
        local_world_size = world_size if local_rank in (None, rank) else max(1, min(world_size, local_rank + 1))
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None else local_rank,
        local_world_size=local_world_size,
        node_rank=_optional(environ, "GROUP_RANK"),
        source="env",
    )


def _from_mpirun(environ: Mapping[str, str]) -> Placement:
    rank, world_size = _required(environ, "OMPI_COMM_WORLD_RANK"), _required(environ, "OMPI_COMM_WORLD_SIZE")
    # Open MPI 4 and 5 set different ones of these. The transports key is random for each job,
    # so a file that a crashed job left behind is never mistaken for ours.
    key = [
        f"{name}={environ[name]}"
        for name in (
            "PMIX_NAMESPACE",
            "PMIX_SERVER_URI41",
            "OMPI_MCA_ess_base_jobid",
            "OMPI_MCA_orte_hnp_uri",
            "OMPI_MCA_orte_precondition_transports",
        )
        if environ.get(name)
    ]
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=_required(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=_required(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        node_rank=None,
        source="mpirun",
        job_key="\n".join(key) or None,
    )


def _from_srun(environ: Mapping[str, str]) -> Placement:
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, world_size = _required(environ, "SLURM_PROCID"), _required(environ, size_name)
    local_rank = _required(environ, "SLURM_LOCALID")
    nodes = _optional(environ, "SLURM_STEP_NUM_NODES") or _optional(environ, "SLURM_NNODES")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    local_world_size = world_size if nodes == 1 else _tasks_on_node(tasks, _optional(environ, "SLURM_NODEID"))
    key = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size or local_rank + 1,
        node_rank=_optional(environ, "SLURM_NODEID"),
        source="srun",
        job_key="slurm " + ".".join(key) if key[0] else None,
    )


def _is_of_another_step(environ: Mapping[str, str]) -> bool:
    """Return whether the step's variables are inherited: a job submitted from within a step has those of that step.

    But SLURM_GTIDS, the ranks of the tasks on this node, is its own: a batch script is one task.
    """
    here = _tasks_on_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), _optional(environ, "SLURM_NODEID"))
    ranks = environ.get("SLURM_GTIDS", "")
    return here is not None and bool(ranks) and here != len(ranks.split(","))


def _tasks_on_node(tasks_per_node: str, node: int | None) -> int | None:
    """Return the number of tasks on node `node` in SLURM's compressed list: "4(x2),2" is 4, 4, 2. None if unknown."""
    if node is None:
        return None
    for part in filter(None, tasks_per_node.split(",")):
        count, _, times = part.partition("(x")
        node -= int(times.rstrip(")") or 1)
        if node < 0:
            return int(count)
    return None


def _required(environ: Mapping[str, str], name: str) -> int:
    value = _optional(environ, name)
    if value is None:
        raise LaunchEnvironmentError(
            f"{name} is not set, but other variables of its family are: set all of them, or none to run alone; "
            "dtrain run, torchrun, mpirun and srun set them for you"
        )
    return value


def _optional(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchEnvironmentError(
            f"{name}={text!r} is not an integer; the launcher of this process sets it"
        ) from None
