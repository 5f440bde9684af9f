"""The environment of a worker, as scripts for torchrun expect it. Pure."""

from __future__ import annotations

from itertools import groupby

from launcher.machine.gpus.vendors import value_for
from launcher.placement.job_spec import JobSpec
from launcher.placement.placement import Placement, WorkerPlace
from launcher.protocol.reports import StoreOpened


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
        "DTRAIN_HOST": worker.host,
        "DTRAIN_ROLES": roles,
        "DTRAIN_RUN_KEY": run_key,
        "DTRAIN_LOST_AFTER_S": f"{spec.heartbeat_timeout_s:g}",  # a host is lost after a silence of this length
        "DTRAIN_ON_NONFINITE": spec.on_nonfinite,
        "DTRAIN_ELASTIC": "1" if spec.elastic else "0",  # more attempts are possible, even without restarts
    }
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
