"""The environment of a worker, as scripts for torchrun expect it, and variables for programs of other launchers. Pure.

Variables for others, TensorFlow, Open MPI, DeepSpeed and Horovod, are set on request (`--env-for`), since libraries
take some of them as a sign of the launcher that sets them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from launcher.errors import PlacementError, UsageError
from launcher.machine.gpus.vendors import value_for
from launcher.placement.job_spec import REPLAYABLE, JobSpec
from launcher.placement.placement import Placement, WorkerPlace
from launcher.placement.roles import Roles
from launcher.protocol.reports import StoreOpened

ECOSYSTEMS = ("tf", "mpi", "deepspeed", "horovod")
VARIABLE_BYTES = (128 << 10) - 1  # MAX_ARG_STRLEN, without the zero at the end
_EVALUATOR = "evaluator"


def worker_environment(
    spec: JobSpec, placement: Placement, worker: WorkerPlace, store: StoreOpened, *, roles: str, run_key: str
) -> dict[str, str]:
    """Return the variables that are always set for a worker; the agent adds TORCHELASTIC_ERROR_FILE.

    `store` is the attempt's; `roles` is the result of `roles_in_order`. `run_key` is a secret shared by the processes
    of the run.
    """
    sees_one_gpu = spec.virtual_local_rank or (worker.bound and len(worker.gpus) == 1)
    env = {
        "RANK": str(worker.world_rank),
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_RANK": "0" if sees_one_gpu else str(worker.local_rank),  # cuda:LOCAL_RANK is its own GPU
        "LOCAL_WORLD_SIZE": str(worker.local_world_size),
        "GROUP_RANK": str(worker.node_rank),
        "GROUP_WORLD_SIZE": str(placement.nodes),
        "ROLE_NAME": worker.role,
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": store.address,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": spec.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(store.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.first_attempt + spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(spec.signals),
        "DTRAIN_ATTEMPT": f"{spec.run_id}/{store.attempt}",  # the same for processes that are restarted within it
        "DTRAIN_HOST": worker.host,
        "DTRAIN_ROLES": roles,
        "DTRAIN_RUN_KEY": run_key,
        "DTRAIN_LOST_AFTER_S": f"{spec.heartbeat_timeout_s:g}",  # a host is lost after a silence of this length
        "DTRAIN_ON_NONFINITE": spec.on_nonfinite,
        "DTRAIN_ELASTIC": "1" if spec.elastic else "0",  # more attempts are possible, even without restarts
    }
    if spec.replayable is not None:
        env["DTRAIN_REPLAYABLE"] = str(spec.replayable)
        env["DTRAIN_REPLAYABLE_FOLDER"] = str((spec.log_dir / spec.run_id / REPLAYABLE).absolute())
    if len(worker.gpus) > 1 and worker.visible == ",".join(worker.gpus) and spec.gpus_per_proc is not None:
        env["DTRAIN_OWN_GPUS"] = spec.run_id  # cuda:0 is its first one, whatever its local rank
    if worker.visible is not None:
        env[worker.gpu_variable] = value_for(worker.gpu_variable, worker.visible)
    return env


def roles_in_order(placement: Placement) -> str:
    """Return all roles in the order of their ranks, with their numbers of processes: `chief:1,worker:3,ps:2`."""
    named = groupby(placement.workers, key=lambda worker: worker.role)
    return ",".join(f"{role}:{sum(1 for _ in workers)}" for role, workers in named)


def worker_defaults(worker: WorkerPlace) -> dict[str, str]:
    """Return variables that are set only if the worker inherits no value; DTRAIN_DEFAULTS names those that were set."""
    return {"OMP_NUM_THREADS": str(worker.threads), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


# ---- for programs of other launchers ----


def parse_ecosystems(text: str | None, roles: Roles) -> tuple[str, ...]:
    """Parse `--env-for`. A chief or an evaluator implies TensorFlow's variable; parameter servers may be ddp's."""
    names = [] if text is None else [name.strip().lower() for name in text.split(",")]
    for name in names:
        if name not in ECOSYSTEMS:
            raise UsageError(f"--env-for {name!r} is not known; there are: {', '.join(ECOSYSTEMS)}")
    if roles.first == "chief" or _EVALUATOR in roles.names:
        names.append("tf")
    return tuple(name for name in ECOSYSTEMS if name in names)


def shared_prefixes(wanted: Sequence[str], placement: Placement, addresses: Mapping[int, str]) -> dict[str, str]:
    """Return common prefixes of some variables' values, which are the same in every worker that has them, and long.

    `addresses` are `host:port` by rank, for the ranks of `serving_ranks`.
    """
    return {"TF_CONFIG": f'{{"cluster": {_tf_cluster(placement, addresses)}, '} if "tf" in wanted else {}


def ecosystem_environments(
    wanted: Sequence[str], placement: Placement, prefixes: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """Yield the variables of each worker, the values without the prefixes of `shared_prefixes`.

    Raises PlacementError if a variable would exceed the size limit.
    """
    cross = _cross_ranks(placement) if "horovod" in wanted else {}
    for worker in placement.workers:
        env: dict[str, str] = {}
        if "tf" in wanted and (kind := _tf_type(placement, worker)):
            env["TF_CONFIG"] = _tf_task(prefixes["TF_CONFIG"], kind, worker)
        if "mpi" in wanted:
            env |= _open_mpi(worker)
        if "deepspeed" in wanted:
            env |= _deepspeed(placement, worker)
        if "horovod" in wanted:
            env |= _horovod(cross[worker.role, worker.local_rank], worker)
        yield env


def serving_ranks(wanted: Sequence[str], placement: Placement) -> list[int]:
    """Return the ranks that others connect to, each of which needs a port: all of TensorFlow's except the evaluator."""
    if "tf" not in wanted:
        return []
    return [worker.rank for worker in placement.workers if _tf_type(placement, worker) not in ("", _EVALUATOR)]


def _tf_cluster(placement: Placement, addresses: Mapping[int, str]) -> str:
    """Return the part of TF_CONFIG that is the same in all workers, as JSON."""
    cluster: dict[str, list[str]] = {}
    for worker in placement.workers:
        kind = _tf_type(placement, worker)
        if kind and kind != _EVALUATOR:
            cluster.setdefault(kind, []).append(addresses[worker.rank])
    return json.dumps(cluster)


def _tf_task(prefix: str, kind: str, worker: WorkerPlace) -> str:
    """Return the rest of TF_CONFIG: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG."""
    task = f'"task": {json.dumps({"type": kind, "index": worker.role_rank})}}}'
    size = len(prefix) + len(task)
    if len("TF_CONFIG=") + size > VARIABLE_BYTES:
        raise PlacementError(
            f"TF_CONFIG names every process, and would need {size:,} bytes; the limit for a variable is "
            f"{VARIABLE_BYTES:,}. Start fewer processes, or leave out --env-for tf, --chief and --evaluator"
        )
    return task


def _tf_type(placement: Placement, worker: WorkerPlace) -> str:
    """Return the type of a worker's task; empty for a role unknown to TensorFlow."""
    if worker.role in ("chief", "ps", _EVALUATOR):
        return worker.role
    ordinary = next((other.role for other in placement.workers if other.role != "chief"), "")
    return "worker" if worker.role == ordinary else ""


def _open_mpi(worker: WorkerPlace) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_SIZE": str(worker.world_size),
        "OMPI_COMM_WORLD_RANK": str(worker.world_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(worker.local_world_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(worker.local_rank),
        "OMPI_COMM_WORLD_NODE_RANK": str(worker.local_rank),  # rank on the node, not rank of the node
        "OMPI_UNIVERSE_SIZE": str(worker.world_size),
    }


def _deepspeed(placement: Placement, worker: WorkerPlace) -> dict[str, str]:
    return {
        "CROSS_RANK": str(worker.node_rank),
        "CROSS_SIZE": str(placement.nodes),
        "LOCAL_SIZE": str(worker.local_world_size),
    }


def _cross_ranks(placement: Placement) -> dict[tuple[str, int], dict[int, int]]:
    """Return, by role and local rank, the ranks in Horovod's "cross" communicator by node rank.

    It joins the workers with the same local rank on their hosts.
    """
    ranks: dict[tuple[str, int], dict[int, int]] = {}
    for worker in placement.workers:
        same = ranks.setdefault((worker.role, worker.local_rank), {})
        same[worker.node_rank] = len(same)
    return ranks


def _horovod(cross: Mapping[int, int], worker: WorkerPlace) -> dict[str, str]:
    return {
        "HOROVOD_RANK": str(worker.world_rank),
        "HOROVOD_SIZE": str(worker.world_size),
        "HOROVOD_LOCAL_RANK": str(worker.local_rank),
        "HOROVOD_LOCAL_SIZE": str(worker.local_world_size),
        "HOROVOD_CROSS_RANK": str(cross[worker.node_rank]),
        "HOROVOD_CROSS_SIZE": str(len(cross)),
        "HOROVOD_HOSTNAME": worker.host,
    }
