"""Servers hold the parameters and step them; workers push gradients and pull values (Li et al. 2014, OSDI).

    dtrain run --ps 2 --nproc-per-node 4 --hosts alpha,beta train.py

starts the same script in every process. In a server, `prepare` serves until the workers have finished and then ends
the process; in the evaluator, `evaluations` repeatedly loads the newest parameters.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import Dataset

from ddp.data.replica_loader import ReplicaLoader
from ddp.data_parallel.module_watch import ModuleWatch
from ddp.device_choice import choose_device
from ddp.environment import Placement
from ddp.errors import ArgumentError, BackwardError
from ddp.monitoring import timeline
from ddp.monitoring.progress import count_step, set_restart_policy
from ddp.strategies.parameter_server.client import Client
from ddp.strategies.parameter_server.consistency import Mode
from ddp.strategies.parameter_server.endpoints import EndpointOptions, ServerEndpoint
from ddp.strategies.parameter_server.messages import Compression
from ddp.strategies.parameter_server.rendezvous import ProcessRole, ServerDirectory, read_role
from ddp.strategies.parameter_server.run_plan import Options, RunPlan, make_plan, plain_groups
from ddp.strategies.parameter_server.server import Server
from ddp.strategies.sharding.optimizer_state import split_state, whole_state
from ddp.strategies.sharding.stand_in_optimizer import StandInOptimizer
from ddp.strategies.strategy import Strategy, Weighting
from ddp.world import World, world_at

_OTHERS_GO_ON, _OTHERS_WAIT = 1, 2  # values for `set_restart_policy`


class ParameterServer(Strategy):
    """Train with parameter servers.

    - `mode`: "sync": the mean of all workers' gradients makes one step, as with all-reduce; "async": each gradient is a
      step, as it arrives; "bounded": the same, but a worker that is more than `staleness` steps ahead of the slowest
      waits. `backup_workers=b`: "sync" that waits for all but b, and drops gradients that arrive later.
    - `overlap`: `step()` returns while the gradient is in flight, and loads the values of the step before:
      communication overlaps with the next step, at the cost of one more step of staleness.
    - `compression`: "fp16", "bf16" or "int8" between hosts. int8 is for gradients, with the rounding error added to
      the next one; values are sent back in bf16 then. Within a host, values go uncompressed through shared memory.
    - `snapshots`: a folder, shared by the hosts of the servers, where each server writes its state every
      `snapshot_every` steps. With it, dtrain restarts a server that dies (`--max-restarts`), and it continues from its
      last snapshot, as does a whole run that is started again. Without, its failure ends the attempt.
    - `encrypt`: encrypt all traffic with CURVE; it is authenticated in any case.
    - `shared_memory=False`: use the network within a host too. `chunk_mb`: size of a message (default: an eighth of
      the model, from 1 to 16).
    - `lost_after_s`: the others do not wait for a worker that is silent for this long (in "sync" mode without backup
      workers they do, for `timeout_s`). A worker that fails does not stop the others in modes "async" and "bounded"
      and with backup workers; after a restart it starts where training is: its loaders skip what the others have done.

    Gradients are not clipped or scaled: `step()` sends the contents of `.grad`. All workers should make the same number
    of steps. A world of one trains alone, as if there were no strategy.
    """

    name = "parameter_server"
    has_servers = True
    collective = False
    averages_in_step = True

    def __init__(
        self,
        *,
        mode: Mode = "sync",
        staleness: int = 2,
        backup_workers: int = 0,
        overlap: bool = False,
        compression: Compression | None = None,
        encrypt: bool = False,
        shared_memory: bool = True,
        snapshots: str | os.PathLike[str] | None = None,
        snapshot_every: int = 100,
        chunk_mb: float | None = None,
        lost_after_s: float = 10.0,
        timeout_s: float = 300.0,
    ) -> None:
        self.options = Options(
            mode=mode,
            staleness=staleness,
            backup_workers=backup_workers,
            overlap=overlap,
            compression=compression,
            encrypt=encrypt,
            shared_memory=shared_memory,
            snapshots=snapshots,
            snapshot_every=snapshot_every,
            chunk_mb=chunk_mb,
            lost_after_s=lost_after_s,
            timeout_s=timeout_s,
        )
        self.process = read_role(os.environ)
        self.role = self.process.role
        super().__init__(_world_of(self.process))
        self._directory = None if self.process.is_alone else ServerDirectory(timeout_s=timeout_s)
        self._client: Client | None = None
        self._joined_at = 0

    @property
    def weighting(self) -> Weighting:
        """A replica's own, unless the servers wait for all: they average without weights."""
        is_together = self.options.mode == "sync" and not self.options.backup_workers
        return "refused" if is_together and self.replicas > 1 else "own"

    @property
    def joined_at(self) -> int:
        return self._joined_at

    @property
    def step(self) -> int:
        """Number of steps that the training had made, as last reported to this worker."""
        return 0 if self._client is None else self._client.step

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        if self._directory is None:
            return model, optimizer
        if self._client is not None:
            raise ArgumentError(
                "prepare() was called twice, but the servers of a run hold one model: put all in one module and one "
                "optimizer with several param groups, or use 'all_reduce'"
            )
        plan = make_plan(model, optimizer, self.options, workers=self.process.workers, servers=self.process.servers)
        if self.role == "ps":
            _serve(plan, optimizer, self.process, self._directory)
            sys.exit(0)
        client = Client(plan, self.process, self._directory)
        try:
            self._joined_at = client.join()
        except BaseException:
            client.leave("an error while it joined")
            raise
        self._client = client
        atexit.register(_leave, client)
        if self.role == "evaluator":
            optimizer.register_step_pre_hook(_refuse_training)
            set_restart_policy(_OTHERS_GO_ON)
            return model, optimizer
        _watch_exit()
        goes_on = self.options.mode != "sync" or self.options.backup_workers > 0
        set_restart_policy(_OTHERS_GO_ON if goes_on else _OTHERS_WAIT)
        return model, RemoteOptimizer(model, optimizer, client)

    def loader(self, dataset: Dataset[Any], **arguments: Any) -> ReplicaLoader:
        """See `Strategy.loader`. With `shuffle`, samples used before this worker joined are skipped."""
        loader = super().loader(dataset, **arguments)
        if loader.shuffle:
            loader.begin_after(lambda: self._joined_at)
        return loader

    def _gather(self, payload: torch.Tensor) -> list[torch.Tensor]:
        if self._directory is None or self.role != "worker":
            return [payload]
        if self._client is None:
            raise ArgumentError("call prepare() before reduce(): the workers communicate through the servers")
        return self._client.gather(payload)

    def sync(self) -> None:
        """Load the newest parameters, and the buffers of replica 0. No other process need call it; blocks."""
        if self._client is not None:
            if self.is_main:
                self._client.send_extras()
            else:
                self._client.load_extras()
            self._client.pull()

    def publish(self) -> None:
        """Give all workers the model of replica 0, after it was changed by hand or loaded.

        Every worker must call it; blocks. For optimizer state, call `optimizer.load_state_dict` on replica 0.
        """
        if self._client is None or self.role != "worker":
            return
        if self.is_main:
            self._client.send_values()
        self._client.gather(torch.zeros(1, dtype=torch.uint8, device="cpu"))
        self.sync()

    def evaluations(self, *, every_s: float = 1.0) -> Iterator[int]:
        """Load newer parameters, in the evaluator, and yield the number of steps made each time.

        Checks every `every_s` seconds. The last time is after the last worker has finished.
        """
        if self._client is None or self.role != "evaluator":
            raise ArgumentError(
                "evaluations() is for the process of role evaluator (dtrain run --evaluator), after prepare()"
            )
        seen = -1
        while True:
            self._client.load_extras()
            self._client.pull()
            is_over = self._client.is_over
            if self._client.trained > seen or is_over:
                seen = self._client.trained
                yield seen
            if is_over:
                return
            time.sleep(every_s)

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of this worker and of each server: bytes, seconds of waiting, queues, staleness."""
        if self._client is None:
            return {"worker": {}, "servers": []}
        return {"worker": dict(self._client.statistics), "servers": self._client.server_statistics()}

    def close(self) -> None:
        """Report that this worker has finished. Called automatically when the process exits normally."""
        if self._client is not None:
            self._client.leave()


class RemoteOptimizer(StandInOptimizer):
    """Replaces the user's optimizer (see `StandInOptimizer`); the servers make the steps.

    `step()` sends the gradients to the servers and loads the new values; whether it blocks depends on the mode. It
    raises BackwardError if the model was changed after `prepare()`, ParameterServerError if a server is gone for good
    or the others do not join. The servers hold the optimizer's state: `state_dict()` fetches it, and the other workers
    need not call it; `load_state_dict()` sends it to them, on replica 0 (elsewhere it only sets the rates).
    """

    _step_supports_amp_scaling = True  # a GradScaler then leaves the handling of infs to step()

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, client: Client) -> None:
        super().__init__(optimizer)
        self._client = client
        self._watch = ModuleWatch(model, ())
        self._places = [parameter.data_ptr() for parameter in client.plan.parameters]

    def _make_step(self) -> None:
        self._check_model()
        client, options = self._client, self._client.plan.options
        gradients = self._gradients()
        if options.overlap:
            self._finish()
        if client.process.index == 0:
            client.send_extras()
        client.push(gradients, plain_groups(self))
        if not options.overlap:
            self._finish()
        client.next_step()
        count_step()

    def _finish(self) -> None:
        """Wait for the servers, and with them for the other workers."""
        recorded = timeline.wait_begins()
        try:
            self._client.finish()
        finally:
            timeline.wait_ended(recorded)

    def _gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients to send: none if a GradScaler found an inf, so that this worker makes no step."""
        gradients = [parameter.grad for parameter in self._client.plan.parameters]
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and float(found_inf) > 0:
            return [None] * len(gradients)
        if scale is None:
            return gradients
        return [None if gradient is None else gradient / float(scale) for gradient in gradients]

    def _check_model(self) -> None:
        problem = self._watch.problem()
        if problem is not None:
            raise BackwardError(
                f"the model was changed after prepare(): parameter {problem.parameter!r} was added, replaced or "
                "converted, and the servers would not train it: change the model before prepare()",
                parameter=problem.parameter,
            )
        parameters = self._client.plan.parameters
        for place, parameter, name in zip(self._places, parameters, self._client.plan.names, strict=True):
            if parameter.data_ptr() != place:
                raise BackwardError(
                    f"parameter {name!r} was moved to other memory after prepare(), where its new values would not "
                    "arrive: move and convert the model before prepare()",
                    parameter=name,
                )

    def _whole_state(self) -> dict[str, Any]:
        return whole_state(self._client.plan.partition, self, self._client.optimizer_states())

    def _load_whole_state(self, state: Mapping[str, Any]) -> None:
        if self._client.process.index == 0:
            self._client.load_optimizer_states(split_state(self._client.plan.partition, state))

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("this optimizer stands for parameter servers and cannot be copied or pickled: use state_dict()")


def _refuse_training(*_: Any) -> None:
    raise ArgumentError(
        'this process is the evaluator (strategy.role == "evaluator") and does not train: let it loop over '
        "strategy.evaluations() instead"
    )


def _serve(plan: RunPlan, optimizer: torch.optim.Optimizer, process: ProcessRole, directory: ServerDirectory) -> None:
    """Run a parameter server until the workers have finished."""
    life = directory.start_life(process.index)
    options = EndpointOptions(process.key, encrypt=plan.options.encrypt, max_frame_bytes=plan.frame_bytes)
    with ServerEndpoint(options, host=directory.host) as endpoint:
        server = Server(plan, optimizer, endpoint, index=process.index, life=life)
        try:
            server.begin(directory)
            directory.announce(process.index, life, endpoint.address)
            if plan.options.snapshots is not None:
                set_restart_policy(_OTHERS_WAIT)
            server.serve()
        finally:
            server.close()


def _leave(client: Client) -> None:
    """Report to the servers how this process ends, so that the others need not wait for a timeout."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        client.leave(f"{type(error).__name__}: {error}")
    else:
        client.leave(f"sys.exit({_exit_status!r})" if _exit_status not in (None, 0) else None)


_exit_status: object = None


def _watch_exit() -> None:
    """Record the argument of `sys.exit`: exit handlers cannot find out otherwise that the process failed."""
    leave = sys.exit

    def remember(status: Any = None, /) -> NoReturn:
        global _exit_status
        _exit_status = status
        leave(status)

    sys.exit = remember


def _world_of(process: ProcessRole) -> World:
    """Return the workers as a world without a process group; the evaluator gets its own world, with all the data."""
    is_worker = process.role == "worker"
    is_server = process.role == "ps"  # several may be on one host, each with a world of its own
    node_rank = os.environ.get("GROUP_RANK", "")
    placement = Placement(
        rank=process.index if is_worker else 0,
        world_size=process.workers if is_worker else 1,
        local_rank=0 if is_server else int(os.environ.get("LOCAL_RANK", "0")),
        local_world_size=1 if is_server else int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        node_rank=int(node_rank) if node_rank.isdecimal() else None,
        source="parameter_server",
    )
    # The evaluator comes after the workers of its host and may share a device with one of them.
    device = choose_device(placement, "gloo" if is_server else None, may_share=True)
    return world_at(placement, device, "parameter_server")
