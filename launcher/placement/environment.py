"""The environment of a worker, as scripts written for torchrun expect it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from launcher.placement.placement import Placement, WorkerPlace

__all__ = ["roles_in_order", "worker_defaults", "worker_environment"]


def worker_environment(
    placement: Placement,
    worker: WorkerPlace,
    *,
    roles: str,
    run_key: str,
    run_id: str,
    attempt: int,
    max_restarts: int,
    elastic: bool,
    signals: Sequence[str],
    master_addr: str,
    master_port: int,
) -> dict[str, str]:
    """Return what is set for a worker whatever it inherits; the agent adds TORCHELASTIC_ERROR_FILE.

    `roles` is what `roles_in_order` says of the placement. `run_key` is a secret that the processes of the run share.
    """
    env = {
        "RANK": str(worker.world_rank),
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_RANK": str(worker.local_rank),
        "LOCAL_WORLD_SIZE": str(worker.local_world_size),
        "GROUP_RANK": str(worker.node_rank),
        "GROUP_WORLD_SIZE": str(placement.nodes),
        "ROLE_NAME": worker.role,
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signals),
        "DTRAIN_HOST": worker.host,
        "DTRAIN_ROLES": roles,
        "DTRAIN_RUN_KEY": run_key,
        "DTRAIN_ELASTIC": "1" if elastic else "0",  # there may be other attempts although none is said to be allowed
    }
    if worker.visible is not None:
        env[worker.gpu_variable] = worker.visible
    return env


def roles_in_order(placement: Placement) -> str:
    """Return all roles in the order of their ranks, with how many processes each has: `chief:1,worker:3,ps:2`."""
    named = groupby(placement.workers, key=lambda worker: worker.role)
    return ",".join(f"{role}:{sum(1 for _ in workers)}" for role, workers in named)


def worker_defaults(worker: WorkerPlace) -> dict[str, str]:
    """Return what is set only where the worker does not inherit a value."""
    return {"OMP_NUM_THREADS": str(worker.threads), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
