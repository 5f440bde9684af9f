"""The variables by which other launchers' programs know their place: TensorFlow, Open MPI, DeepSpeed, Horovod. Pure.

Given on request (`--env-for`), since libraries take some of them for a sign of the launcher that sets them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from launcher.errors import UsageError
from launcher.placement.placement import Placement, WorkerPlace
from launcher.placement.roles import Roles

__all__ = ["ECOSYSTEMS", "ecosystem_environment", "parse_ecosystems", "serving_ranks"]

ECOSYSTEMS = ("tf", "mpi", "deepspeed", "horovod")
_EVALUATOR = "evaluator"


def parse_ecosystems(text: str | None, roles: Roles) -> tuple[str, ...]:
    """Read `--env-for`. TensorFlow's roles ask for its variable by themselves."""
    names = [] if text is None else [name.strip().lower() for name in text.split(",")]
    for name in names:
        if name not in ECOSYSTEMS:
            raise UsageError(f"--env-for {name!r} is not known; there are: {', '.join(ECOSYSTEMS)}")
    if roles.first == "chief" or {"ps", _EVALUATOR} & {role.name for role in roles.others}:
        names.append("tf")
    return tuple(name for name in ECOSYSTEMS if name in names)


def ecosystem_environment(
    wanted: Sequence[str], placement: Placement, worker: WorkerPlace, addresses: Mapping[int, str]
) -> dict[str, str]:
    """Return the variables of a worker; `addresses` are `host:port` by rank, for the ranks of `serving_ranks`."""
    env: dict[str, str] = {}
    if "tf" in wanted and (config := _tf_config(placement, worker, addresses)) is not None:
        env["TF_CONFIG"] = json.dumps(config)
    if "mpi" in wanted:
        env |= _open_mpi(worker)
    if "deepspeed" in wanted:
        env |= _deepspeed(placement, worker)
    if "horovod" in wanted:
        env |= _horovod(placement, worker)
    return env


def serving_ranks(wanted: Sequence[str], placement: Placement) -> list[int]:
    """Return the ranks that others connect to, each of which needs a port: all of TensorFlow's but the evaluator."""
    if "tf" not in wanted:
        return []
    return [worker.rank for worker in placement.workers if _tf_type(placement, worker) not in ("", _EVALUATOR)]


# ---- TensorFlow ----------------------------------------------------------------------------------------------


def _tf_config(
    placement: Placement, worker: WorkerPlace, addresses: Mapping[int, str]
) -> dict[str, Mapping[str, object]] | None:
    """Return what TF_CONFIG holds: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG."""
    own = _tf_type(placement, worker)
    if not own:
        return None
    cluster: dict[str, list[str]] = {}
    for other in placement.workers:
        kind = _tf_type(placement, other)
        if kind and kind != _EVALUATOR:
            cluster.setdefault(kind, []).append(addresses[other.rank])
    return {"cluster": cluster, "task": {"type": own, "index": worker.role_rank}}


def _tf_type(placement: Placement, worker: WorkerPlace) -> str:
    """Return the type of a worker's task; empty for a role that TensorFlow does not know."""
    if worker.role in ("chief", "ps", _EVALUATOR):
        return worker.role
    ordinary = next((other.role for other in placement.workers if other.role != "chief"), "")
    return "worker" if worker.role == ordinary else ""


# ---- others --------------------------------------------------------------------------------------------------


def _open_mpi(worker: WorkerPlace) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_SIZE": str(worker.world_size),
        "OMPI_COMM_WORLD_RANK": str(worker.world_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(worker.local_world_size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(worker.local_rank),
        "OMPI_COMM_WORLD_NODE_RANK": str(worker.local_rank),  # its rank on the node, not the node's
        "OMPI_UNIVERSE_SIZE": str(worker.world_size),
    }


def _deepspeed(placement: Placement, worker: WorkerPlace) -> dict[str, str]:
    return {
        "CROSS_RANK": str(worker.node_rank),
        "CROSS_SIZE": str(placement.nodes),
        "LOCAL_SIZE": str(worker.local_world_size),
    }


def _horovod(placement: Placement, worker: WorkerPlace) -> dict[str, str]:
    # Its "cross" communicator joins the workers that have the same local rank on their hosts.
    same = [w.node_rank for w in placement.workers if w.role == worker.role and w.local_rank == worker.local_rank]
    return {
        "HOROVOD_RANK": str(worker.world_rank),
        "HOROVOD_SIZE": str(worker.world_size),
        "HOROVOD_LOCAL_RANK": str(worker.local_rank),
        "HOROVOD_LOCAL_SIZE": str(worker.local_world_size),
        "HOROVOD_CROSS_RANK": str(same.index(worker.node_rank)),
        "HOROVOD_CROSS_SIZE": str(len(same)),
        "HOROVOD_HOSTNAME": worker.host,
    }
