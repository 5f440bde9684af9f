"""The role of this command in a run whose command is typed on every node, or started there by srun.

Node 0 runs the controller, the others join it (run_node.py). Under srun every task is a node of the run, so nothing is
started twice, and each keeps the GPUs that SLURM assigned to it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.options import Options
from launcher.errors import UsageError
from launcher.frozen import dataclass
from launcher.hosts.host import Host, HostKind
from launcher.placement.job_spec import DEFAULT_PORT
from launcher.protocol.message import AGENT_MACHINE, AGENT_SLOTS

if TYPE_CHECKING:
    from launcher.hosts.slurm_allocation import Step

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class NodeRole:
    """The role of this command among those of the run.

    `node_rank` is None if any free slot will do. `lead`: it is node 0, or may become it if it has no rank. `folder` and
    `name` locate the file through which the nodes find each other if they share a folder; `address` is empty if that
    file has it. `agent_environment` gives this node's agent the number of workers given here (see agent/host_facts.py).
    """

    node_rank: int | None
    nodes: tuple[int, int]
    hosts: tuple[Host, ...]
    lead: bool
    address: str
    port: int
    agent_environment: Mapping[str, str]
    folder: Path | None = None
    name: str = ""
    token_file: Path | None = None
    by_hand: bool = True  # a user typed the command; otherwise srun started it on every node


def find_node_role(options: Options, *, nproc: int | str | None, has_source: bool) -> NodeRole | None:
    """Return our role among several commands of one run; None if this command starts the whole run.

    Raises UsageError if the options for it are incomplete.
    """
    if has_source:
        if options.node_rank is not None and not options.as_torchrun:
            raise UsageError("--node-rank is for a command typed on every node; leave out the hosts or --node-rank")
        return None
    if options.standalone:  # as in torchrun: a run on this node only, however many there are
        return None
    step = _step()
    if step is not None:
        return _role_in_step(step, options, nproc)
    nodes = options.nnodes or (1, 1)
    if options.node_rank is None and not (options.as_torchrun and nodes[1] > 1):
        return None
    if options.nnodes is None:
        raise UsageError("--node-rank needs the number of nodes; add --nnodes")
    return _role_typed(options, nodes, nproc)


def _role_typed(options: Options, nodes: tuple[int, int], nproc: int | str | None) -> NodeRole:
    from launcher.machine.network import is_loopback
    from launcher.transport.tcp.rendezvous import local_folder

    node_rank = options.node_rank
    any_rank = node_rank is None and options.rdzv_backend == "c10d"
    if node_rank is None and not any_rank:
        node_rank = 0  # torchrun's default
    if node_rank is not None and not 0 <= node_rank < nodes[1]:
        raise UsageError(f"--node-rank is {node_rank}; with --nnodes {nodes[1]} it must be 0 to {nodes[1] - 1}")
    address = options.master_addr or (_LOOPBACK if options.as_torchrun or nodes[1] == 1 else None)
    if address is None:
        raise UsageError("the address of node 0 is missing; write --master-addr ADDR on every node")
    port = 0 if options.any_port else options.master_port or DEFAULT_PORT
    return NodeRole(
        node_rank=node_rank,
        nodes=nodes,
        hosts=_hosts([f"node{k}" for k in range(nodes[1])]),
        lead=_hosts_rendezvous(options, address) if any_rank else node_rank == 0,
        address=address,
        port=port,
        agent_environment=_agent_environment(nproc, options),
        folder=local_folder() if is_loopback(address) else None,
        name=f"port-{port}",
        token_file=_token_file(options),
    )


def _hosts_rendezvous(options: Options, address: str) -> bool:
    from launcher.machine.network import is_own

    return is_own(address) if options.rdzv_is_host is None else options.rdzv_is_host


def _token_file(options: Options) -> Path | None:
    return Path(options.token_file) if options.token_file else None


def _agent_environment(slots: int | str | None, options: Options) -> dict[str, str]:
    return {} if slots is None else {AGENT_SLOTS: f"{slots}:{options.gpus_per_proc or 1}"}


def _hosts(names: list[str]) -> tuple[Host, ...]:
    kinds = [HostKind.LOCAL, *[HostKind.JOINED] * (len(names) - 1)]
    return tuple(Host(name, kind) for name, kind in zip(names, kinds, strict=True))


def _step() -> Step | None:
    """Return the SLURM step if this process is one of several tasks in it."""
    if "SLURM_STEP_ID" not in os.environ:
        return None
    from launcher.hosts.slurm_allocation import find_step, step_title

    step = find_step(os.environ, step_title())
    return step if step is not None and step.tasks > 1 and not step.interactive else None


def _role_in_step(step: Step, options: Options, nproc: int | str | None) -> NodeRole:
    from launcher.machine.network import choose_address
    from launcher.transport.tcp.rendezvous import find_token

    asked = options.nnodes
    one_a_node = step.tasks == len(step.nodes)
    here, local = step.nodes[step.node_rank], step.tasks_per_node[step.node_rank]
    if asked is not None and not asked[0] <= len(step.nodes) <= asked[1]:
        raise UsageError(
            f"--nnodes is {asked[0]}:{asked[1]}, but srun started this step on {len(step.nodes)} nodes; leave it out"
        )
    if not one_a_node and options.nproc_per_node not in (None, "1", str(local)):
        raise UsageError(
            f"srun started {local} tasks here, each of which is a worker, but --nproc-per-node is "
            f"{options.nproc_per_node}; leave it out, or have srun start one task on each node"
        )
    names = list(step.nodes) if one_a_node else _task_names(step)
    others = [name for name in step.nodes if name != here]
    token_file = _token_file(options)
    named = options.master_addr  # the address of node 0; without a token, it is in a file
    if named is not None and find_token(os.environ, token_file) is None:
        named = None
    address = named or ""
    if named is None and step.rank == 0:
        address = choose_address((), others[0], None) if others else _LOOPBACK
    agent_environment = _agent_environment(nproc if one_a_node else 1, options)
    return NodeRole(
        node_rank=step.rank,
        nodes=(step.tasks, step.tasks),
        hosts=_hosts(names),
        lead=step.rank == 0,
        address=address,
        port=0 if named is None else options.master_port or DEFAULT_PORT,
        agent_environment=agent_environment if one_a_node else {**agent_environment, AGENT_MACHINE: here},
        folder=Path(options.log_dir or "runs") if named is None else None,
        name=f".slurm-{step.job}.{os.environ['SLURM_STEP_ID']}",
        token_file=token_file,
        by_hand=False,
    )


def _task_names(step: Step) -> list[str]:
    """Name every task, after its node if srun fills one node after the other, which is its default."""
    if not os.environ.get("SLURM_DISTRIBUTION", "block").startswith("block"):
        return [f"task{k}" for k in range(step.tasks)]
    counts = zip(step.nodes, step.tasks_per_node, strict=True)
    return [f"{node}.{local}" for node, count in counts for local in range(count)]
