"""Variables for programs of other launchers: TensorFlow, Open MPI, DeepSpeed, Horovod. Pure.

Set on request (`--env-for`), since libraries take some of them as a sign of the launcher that sets them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from launcher.errors import PlacementError, UsageError
from launcher.placement.placement import Placement, WorkerPlace
from launcher.placement.roles import Roles

ECOSYSTEMS = ("tf", "mpi", "deepspeed", "horovod")
VARIABLE_BYTES = (128 << 10) - 1  # MAX_ARG_STRLEN, without the zero at the end
_EVALUATOR = "evaluator"


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
