"""The wrapper that a user sees: equalises the replicas, runs forward, informs the reducer; torch's interface."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from ddp.comm.broadcast import BufferSync, broadcast_tensors
from ddp.comm.channel import Channel
from ddp.comm.failures import describe_failure
from ddp.comm.layout import check_same_layout, describe
from ddp.compression import Half, Int8, PowerSGD, make_compression
from ddp.compression.compressor import Compressor
from ddp.compression.compressors import named
from ddp.compression.powersgd import PowerSGDCompressor
from ddp.data.micro_batch import MicroBatch, current
from ddp.data_parallel.arguments import (
    Deterministic,
    bucket_limits,
    check_torchs_arguments,
    checked_deterministic,
    checked_device,
    checked_device_ids,
    checked_group,
    replanning,
)
from ddp.data_parallel.buckets.comm_hook import CommHook
from ddp.data_parallel.checksum import WeightChecksum
from ddp.data_parallel.forward_buffers import ForwardBuffers
from ddp.data_parallel.forward_policy import ForwardPolicy, tensors_in
from ddp.data_parallel.module_watch import ModuleWatch, sparse_names
from ddp.data_parallel.planning.bucket_planner import BucketPlanner, Measurement
from ddp.data_parallel.planning.step_report import StepReport, explain
from ddp.data_parallel.reducer import Reducer
from ddp.data_parallel.step_watch import StepWatch
from ddp.data_parallel.torch_surface import TorchSurface, announce, share_iteration
from ddp.errors import ArgumentError, BackwardError, ReplacementError, UnsupportedError
from ddp.generation.pending_group import is_pending
from ddp.monitoring import timeline
from ddp.monitoring.progress import count_step_after
from ddp.torch_internals import (
    foreach_divide,
    ignored_names,
    is_in_join,
    not_traced,
    swap_active_ddp_module,
    tree_map_only,
)
from ddp.world import before_leaving

# The number of the next wrapper over each group, which is the same on all ranks. By the group, not by its name: after a
# failure the new group has the old name, and a replaced rank has made fewer wrappers than the others.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class DistributedDataParallel(TorchSurface):
    """Wrap `module` so that its gradients are the averages over the ranks of the group.

    Every rank of the group must construct it, with a module of the same layout; construction blocks until all do,
    compares the layouts (LayoutMismatchError names the first difference and the rank) and copies parameters and buffers
    of the group's rank 0 to the others. After that, forward and backward passes on every rank leave the same averaged
    gradients in `.grad` on each, and an unmodified optimizer keeps the replicas equal. The gradient of a mean loss over
    equal shards is that of the mean loss over the whole batch. For a loss that is a sum, multiply it by the number of
    ranks; for shards of different size use `backward(loss, weight=...)`, or multiply the mean by this rank's share
    times the number of ranks.

    The arguments are those of `torch.nn.parallel.DistributedDataParallel`:

    - `device_ids`: at most one device, to which tensors among the inputs are moved. None: they are on it already.
    - `broadcast_buffers` (`forward_sync_buffers` in newer torch): every forward after a reduction starts with rank 0's
      buffers.
    - `init_sync=False`: skip the comparison and the first broadcast; the caller guarantees equality.
    - `process_group`: the ranks that average with each other; default: all.
    - `device_mesh`: a one-dimensional mesh, instead of `process_group`; also a slice, as `mesh["dp"]` of a mesh whose
      other dimension the module uses by itself.
    - `bucket_cap_mb`: size in MiB at which a bucket is closed; by default 25 (4 with compression), and 1 for the first
      so that communication starts early. `bucket_cap_mb_list`: one for each bucket in launch order. By default, these
      are only the initial sizes: on the CPU, after five steps, the sizes with the quickest simulated step on this link
      replace them, but only if averages stay the same to the bit: with two ranks, `deterministic`, or a backend whose
      order of sums is the same for any size. "auto" allows it everywhere; then two runs of one script may differ in
      the last bits of their sums. With a fixed `compression` or a communication hook the sizes stay, with a warning.
    - `gradient_as_bucket_view`: make `.grad` always a view of its bucket, even if it was another tensor before, and
      reuse the bucket even if an older gradient may still be referenced elsewhere. By default `.grad` is a view only if
      that cannot be noticed, and a gradient that is kept does not change.
    - `find_unused_parameters`, `static_graph`: accepted, not needed. Parameters that a rank does not use are always
      handled exactly: if some rank used one, it is averaged with zeros for the others; if none did, it keeps its old
      gradient.
    - `mixed_precision` (private in torch) raises UnsupportedError: use torch.autocast. Arguments that have no effect
      here are accepted with a warning that says why.

    These are new:

    - `compression`: how to send gradients: "bf16", "fp16", "int8" or "powersgd" (see `ddp.compression`).
    - `deterministic`: with True, on the CPU, the bits of a sum depend on the ranks' gradients alone: not on buckets,
      the backend, or which ranks share a host. The ranks are added in pairs, the pairs in pairs, and so on; 16-bit
      gradients in float32. By default so in a function of `@ddp.resilient`, and with the backend `shm` on one host.
      Not with compression or a communication hook. With "device", for a module on a GPU: deterministic operators for
      this process (`torch.use_deterministic_algorithms`, CUBLAS_WORKSPACE_CONFIG; wrap before the first operation
      there), and LayoutMismatchError unless all ranks have one model of GPU. A run with the same ranks then has the
      same bits, as far as NCCL's sums have. No GPU has run it yet. On the CPU it is True.
    - `measure`: by default, on the CPU, collectives of three sizes are timed here (about 0.1 s at most on links of 10
      MB/s and more), and the first steps; buckets of the second and third step wait for the end of backward.
      `measurement` has the figures. With True also on a device, for `explain` only: by its events, which are read once
      they are over. Nothing is measured if you give bucket sizes, or with `init_sync=False`.
    - `weight_checksum`: compare the weights of all ranks in every backward pass, at the cost of reading them once;
      DriftError names the first parameter that differs, the step and the rank.
    - `stall_timeout_s`: when a rank has waited this long for the others, CollectiveError says where each of them is;
      default: nine tenths of the group's own timeout. It also holds for waits that belong to no model (checkpoints,
      `gather_metrics`, LocalSGD, evaluations), where the least of all living models counts; but a rank that reads or
      writes a checkpoint is waited for as long as that group's timeout allows.

    No pass ends silently different on some ranks. If the forward or backward of one rank raises, all others raise
    PeerFailedError in theirs, with its message. If a rank skipped a backward pass, unfroze a parameter that another did
    not, stepped an optimizer within backward, or began with other gradients than the rest, all raise BackwardError; if
    it stepped more often than others and weights differ, DriftError. After these, `.grad` is None on every rank, and
    training can continue with the next step. A parameter that is unfrozen on all ranks is reduced from then on.

    It is a subclass of torch's, so that libraries which check for that accept it. A world of one does not communicate.

    The method is from Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
    13(12).
    """

    _least_ranks = 2  # that communicate; 1 lets tests and benchmarks run a reduction on a single device
    _reducer: Reducer | None = None  # None in a world of one, as are the next two
    _policy: ForwardPolicy
    _forward_buffers: ForwardBuffers
    _end: Callable[[], Any] | None = None
    _method: Half | Int8 | PowerSGD | None = None  # of the compression that is used

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | Literal["auto"] | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: object = None,
        param_to_hook_all_reduce: object = None,
        mixed_precision: object = None,
        device_mesh: object = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        compression: str | Half | Int8 | PowerSGD | None = None,
        deterministic: Deterministic = None,
        weight_checksum: bool = False,
        measure: bool | None = None,
        stall_timeout_s: float | None = None,
    ) -> None:
        given = {**locals()}
        nn.Module.__init__(self)  # torch's own constructor is for its reducer
        Joinable.__init__(self)
        timeline.prepare(self)
        check_torchs_arguments(given)
        self.process_group = checked_group(process_group, device_mesh)
        self._number = _made.get(self.process_group, 0)  # a copy has that of its original
        _made[self.process_group] = self._number + 1
        self.module = module
        self.parameters_to_ignore = ignored_names(module)
        parameters = self._named_parameters()
        self.device = checked_device(parameters)
        self.device_type = self.device.type
        self.device_ids = checked_device_ids(device_ids, output_device, self.device)
        self.output_device = self.device_ids[0] if self.device_ids else None
        self.is_multi_device_module = len({parameter.device for _, parameter in parameters}) > 1
        self.dim = dim
        self.device_mesh = device_mesh
        # As in torch, broadcast_buffers=False excludes buffers from the first broadcast too; forward_sync_buffers=False
        # does not.
        with_buffers = broadcast_buffers is not False or forward_sync_buffers is not None
        self.forward_sync_buffers = (
            broadcast_buffers is not False if forward_sync_buffers is None else forward_sync_buffers
        )
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.compression: Compressor | None = None
        self._deterministic = checked_deterministic(deterministic, self.device, compression)
        self._weight_checksum = weight_checksum
        self._stall_timeout_s = stall_timeout_s
        self._replanning = replanning(
            measure, bucket_cap_mb, bucket_cap_mb_list, compression, self.device, init_sync=init_sync
        )
        self._limits = bucket_limits(
            bucket_cap_mb, bucket_cap_mb_list, self.device, is_compressed=compression is not None
        )
        self.steps_alone = False  # set by LocalSGD: the gradients of this rank are not averaged
        self.bucket_bytes_cap = self._limits.cap_bytes
        self.bucket_bytes_cap_list = list(self._limits.first_caps_bytes) if bucket_cap_mb_list else []
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        self._weight = 0.0  # of a world of one, since its gradients were averaged
        self._has_synced_forward = True  # whether the last forward of a world of one was outside no_sync()
        is_waiting = is_pending(self.process_group)
        if self.process_group.size() >= self._least_ranks and not is_waiting:
            channel = self._new_channel()
            with channel.closing_on_error():
                if init_sync:
                    self._compare(channel, compression)
                    self._equalise(channel, 0, with_buffers=with_buffers)
                planner = None
                if self._replanning is not None:
                    by_tree = self._deterministic is True
                    planner = BucketPlanner.of(channel, parameters, self._replanning, by_tree=by_tree)
                self._attach(channel, planner)
        if compression is not None and is_waiting:
            self._method = named(compression) if isinstance(compression, str) else compression
        elif compression is not None:
            self._use_compression(compression)

    def _compare(self, channel: Channel, compression: object) -> None:
        """Raise LayoutMismatchError on every rank if the ranks wrap different modules, or wrap them differently."""
        settings = {
            "bucket sizes": dataclasses.astuple(self._limits),
            "broadcast_buffers": self.forward_sync_buffers,
            "ignored names": sorted(self.parameters_to_ignore),
            "compression": compression,
            "deterministic": self._deterministic,
            "measure": self._replanning is not None,
            "weight_checksum": self._weight_checksum,
        }
        entries = describe(settings, self._named_parameters(), self._named_buffers())
        with channel.report.waiting("comparison of the modules"):
            check_same_layout(channel.control, entries)

    def _equalise(self, channel: Channel, root: int, *, with_buffers: bool) -> None:
        """Copy the values of rank `root` of the group to this rank."""
        named = [*self._named_parameters(), *(self._named_buffers() if with_buffers else ())]
        with channel.report.waiting(f"broadcast of rank {root}'s parameters"):
            broadcast_tensors(channel.group, [tensor for _, tensor in named], root)

    def _new_channel(self) -> Channel:
        return Channel.open(self.process_group, self.device, self._number, stall_timeout_s=self._stall_timeout_s)

    def _attach(self, channel: Channel, planner: BucketPlanner | None = None) -> None:
        """Register hooks on the parameters and get ready to communicate."""
        named = self._named_parameters()
        reducer = Reducer(
            channel,
            named,
            ModuleWatch(self.module, self.parameters_to_ignore),
            self._limits,
            sparse=sparse_names(self.module),
            as_views=self.gradient_as_bucket_view,
            by_tree=self._deterministic if isinstance(self._deterministic, bool) else None,
            planner=planner,
        )
        sync = None
        if self.forward_sync_buffers:
            sync = BufferSync(channel.group, self.module, self.parameters_to_ignore, channel.report.wait)
        self._forward_buffers = ForwardBuffers(channel.report, sync, self._buffer_hook)
        self._policy = ForwardPolicy(
            channel,
            reducer.members,
            StepWatch(reducer.module_watch.parameters, reducer.before_step),
            self._forward_buffers,
            checksum=WeightChecksum(named) if self._weight_checksum else None,
        )
        reducer.policy = self._policy
        self._reducer = reducer
        # The hooks keep the reducer alive as long as the parameters live, which may outlive this wrapper.
        end = weakref.finalize(self, reducer.close)
        end.atexit = False
        self._end = end
        before_leaving(self, DistributedDataParallel._let_go)

    def _release(self) -> None:
        """Stop communicating and become a plain wrapper."""
        if self._end is not None:
            self._end()
        if self.compression is not None:
            self.compression.close()
        self._reducer = self._end = None
        vars(self).pop("_policy", None)  # they refer to the group
        vars(self).pop("_forward_buffers", None)

    def _let_go(self) -> None:
        """Drop the process group and everything that communicates; the module itself stays usable. May be repeated."""
        self._release()
        self.compression = None
        vars(self).pop("process_group", None)

    def _check_not_left_behind(self) -> None:
        """Raise ReplacementError if the group was rebuilt without this model, which would train alone."""
        group = vars(self).get("process_group")
        if (group is None or is_pending(group)) and dist.is_initialized() and not is_pending(checked_group(None, None)):
            raise ReplacementError(
                "this model does not average gradients any more, since the ranks met again after a failure: give it to "
                "ddp.State(model=...), or wrap it inside of the function of @ddp.resilient"
            )

    @not_traced  # see skip_package in ddp.torch_internals
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module. Every rank must call it equally often: the first after a reduction copies buffers."""
        micro_batch = current.micro_batch if torch.is_grad_enabled() else None
        if micro_batch is not None:
            current.is_used = True
            self._take_micro_batches()
        reducer = self._reducer
        if reducer is None:
            self._check_not_left_behind()
            Join.notify_join_context(self)
            if torch.is_grad_enabled():
                timeline.forward()
            inputs, kwargs = self._on_device(inputs, kwargs)
            output = self.module(*inputs, **kwargs)
            self._has_synced_forward = self.require_backward_grad_sync
            timeline.follow(tensors_in(output))
            if self._has_synced_forward:
                count_step_after(tensors_in(output))
            return output
        if reducer.is_inside_backward():
            inputs, kwargs = self._on_device(inputs, kwargs)
            return self.module(*inputs, **kwargs)  # activation checkpointing
        report, policy = reducer.report, self._policy
        report.check_in_step()  # else the end of this pass would write into buckets in transit
        if torch.is_grad_enabled():
            timeline.forward()
        is_syncing = torch.is_grad_enabled() and self.require_backward_grad_sync
        Join.notify_join_context(self)  # where it raises, it does so on every rank
        active = swap_active_ddp_module(self)
        try:
            # Collectives first: if one rank alone raises afterwards, all have made the same calls.
            report.begin("start of a forward pass")
            reducer.settle()
            root = 0
            if is_in_join(self):
                _, root = share_iteration(reducer.channel, syncs=is_syncing, has_buffers=True)
            hooked = self._share_buffers(root)
            if micro_batch is not None:
                self._forward_buffers.enter(micro_batch, self._named_buffers)
            report.counted()
            with hooked:
                inputs, kwargs = self._on_device(inputs, kwargs)
                reducer.enter_forward(self.module)
                policy.enter_forward(reducer.module_watch.parameters, steps_alone=self.steps_alone)
                output = self.module(*inputs, **kwargs)
            if is_syncing:
                announce(reducer, policy, output, is_training=self.training)
            elif torch.is_grad_enabled():
                policy.announce_local()
                timeline.follow(tensors_in(output))
        except BaseException as error:
            if is_syncing:
                reducer.fail(describe_failure("its forward pass", error))
            raise
        finally:
            swap_active_ddp_module(active)
        return output

    def _take_micro_batches(self) -> None:
        """Sum by micro-batches from now on, also in a world of one. Raises UnsupportedError if that is not possible."""
        if self.device.type != "cpu" or self.is_multi_device_module:
            raise UnsupportedError(f"ddp.StepLoader with a model on {self.device}: it is for models on the CPU")
        if self.compression is not None or (self._reducer is not None and self._reducer.has_hook):
            raise UnsupportedError("ddp.StepLoader with compression or a communication hook, which round on each rank")
        if self.steps_alone:
            raise UnsupportedError("ddp.StepLoader with LocalSGD: ranks that step alone have no step in common")
        group = vars(self).get("process_group")
        if self._reducer is None and group is not None and not is_pending(group):
            self._least_ranks = 1
            self._attach(self._new_channel())

    def take_part(self, micro_batch: MicroBatch) -> None:
        """Take part in the reduction of a step in which this rank has no micro-batch. Blocks; for `ddp.StepLoader`."""
        self._take_micro_batches()
        reducer = self._reducer
        assert reducer is not None
        reducer.settle()
        with self._share_buffers(0):
            reducer.drop_gradients()
        self._policy.take_part(micro_batch)
        reducer.reduce_now()

    def _on_device(self, inputs: Any, kwargs: Any) -> Any:
        """Move tensors among the inputs to the device of `device_ids`, if that was given."""
        if not self.device_ids:
            return inputs, kwargs
        device = torch.device(self.device.type, self.device_ids[0])
        return tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), (inputs, kwargs))

    def backward(self, loss: torch.Tensor, *, weight: float | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Run `loss.backward(**kwargs)`, with `weight` for an average of shares of different size.

        `loss` is the mean over this rank's share, and `weight` the size of the share: tokens, samples. The gradient is
        the sum of w*g over the sum of w, over all ranks and, with `no_sync`, over all passes since the last reduction:
        that of the mean over everything. A rank whose weight is 0 contributes nothing, even if its loss is not finite;
        it must still make the forward pass. Either every rank gives weights in a step or none does (BackwardError). In
        a step of `ddp.StepLoader`, `loss` is the mean over a micro-batch, and `weight` its size; each must have one.
        Gradients must be None or 0 before the first pass of a step. For a `weight` on a device, the host waits. With
        error-feedback compression (int8, powersgd), keep the sum of the weights about equal in all steps: the error
        that is carried over is in the weights of its own step.
        """
        if weight is None:
            loss.backward(**kwargs)
            return
        if self.steps_alone:
            raise UnsupportedError(
                "weight= while each rank steps by itself (LocalSGD): leave it out until gradients are averaged again"
            )
        amount = float(weight)
        reducer = self._reducer
        if not 0 <= amount < float("inf"):
            if reducer is not None and self._policy.is_announced:
                reducer.fail(f"its weight is {amount}")
            raise ArgumentError(f"weight is {amount}; it must be a number of at least 0")
        if reducer is not None:
            reducer.add_weight(amount)
        if amount:
            # The gradients of a micro-batch are divided as if it counted by its samples.
            scale = amount if current.micro_batch is None else amount * current.micro_batch.divisor
            loss.backward(gradient=torch.full_like(loss, scale), **kwargs)
        elif reducer is not None and self._policy.is_announced:
            self._policy.close_last_forward()
            reducer.pass_without_backward()
        if reducer is None:
            self._weigh_alone(amount)

    def _weigh_alone(self, amount: float) -> None:
        """Apply weights in a world of one, as the reducer does."""
        self._weight += amount
        if not self._has_synced_forward:
            return
        total, self._weight = self._weight, 0.0
        if not total:
            raise BackwardError("the weights of this step add up to 0, so there is no average")
        gradients = [parameter.grad for _, parameter in self._named_parameters() if parameter.grad is not None]
        if gradients and total != 1:
            foreach_divide(gradients, total)

    @property
    def measurement(self) -> Measurement | None:
        """Results of the first steps and the resulting decision; None before that, and if nothing is measured."""
        planner = None if self._reducer is None else self._reducer.planner
        return None if planner is None else planner.measurement

    def explain(self) -> StepReport:
        """Report where the time of a step goes, and what other buckets, compression or LocalSGD would change.

        Print the result: one screen; `as_dict()` has the same for programs. Call it after about 10 steps, on any rank:
        it does not communicate. It reads what the ranks agreed on in their first steps and this rank's last 200 steps,
        and compresses a few MB to time that, which takes about 0.1 s; on a device compression is not compared.
        Everything not marked as measured is simulated: within 15 % if the link limits the step.

        Raises DdpError before enough steps, UnsupportedError if nothing is measured (see `measure`, and in a world of
        one), for a communication hook that is not ours and for compression on a device.
        """
        if self._reducer is None:
            raise UnsupportedError("explain() in a world of one: nothing is sent; train with two ranks to measure")
        compressed = bucket_limits(None, None, self.device, is_compressed=True)
        reducer = self._reducer
        group, members = reducer.channel.group, reducer.members
        return explain(reducer.sums, reducer.planner, group, members, self._method, compressed)

    def _use_hook(self, hook: CommHook) -> None:
        self._hook_name = getattr(hook.call, "__qualname__", repr(hook.call))
        if self._reducer is None:  # a world of one: the hook may still change gradients
            self._attach(self._new_channel())
        assert self._reducer is not None
        self._reducer.use_hook(hook)

    def _use_compression(self, compression: str | Half | Int8 | PowerSGD) -> None:
        compressor, hook = make_compression(compression, self.process_group, parameters=dict(self._named_parameters()))
        self.compression = compressor
        self._method = named(compression) if isinstance(compression, str) else compression
        weakref.finalize(self, compressor.close).atexit = False
        is_chained = isinstance(compressor, PowerSGDCompressor)
        self._use_hook(CommHook(hook, compressor, is_chained, takes_own=True))

    def reduction_state(self) -> dict[str, Any] | None:
        """Return the state to resume compression from a checkpoint: its residual errors and the matching bucket plan.

        None without compression. Every rank must call it, between two steps; blocks. `ddp.Checkpoint` does.
        """
        if self.compression is None or self._reducer is None:
            return None
        return {"plan": self._reducer.sums.plan_state(), "compression": self.compression.state_dict()}

    def load_reduction_state(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of `reduction_state`, in a world of any size. Every rank must call it.

        Raises CheckpointError if it does not fit the module. Without compression, it only warns that the residual
        errors are lost.
        """
        if self.compression is None or self._reducer is None:
            warnings.warn(
                "the checkpoint holds what gradient compression still owed, which is lost: this model has none",
                stacklevel=2,
            )
            return
        self._reducer.load_plan_state(state["plan"])
        self.compression.load_state_dict(state["compression"])

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Average over another group from now on. Every rank of it must call it; nothing is compared.

        The residual errors of compression are dropped.
        """
        super()._update_process_group(new_process_group)
        if self._method is not None:
            self.compression = None
            self._use_compression(self._method)

    def average_over(self, group: dist.ProcessGroup) -> None:
        """Average over the ranks of `group` from now on, like `_update_process_group`; for other modules of ddp."""
        self._update_process_group(group)

    @property
    def gradient_reducer(self) -> Reducer | None:
        """The reducer of this model's gradients, for other modules of ddp; None if nothing is averaged."""
        return self._reducer

    def _join_group(self, group: dist.ProcessGroup | None) -> None:
        self.process_group = checked_group(group, None)
        _made[self.process_group] = max(_made.get(self.process_group, 0), self._number + 1)
        self._replanning = None
        if self.process_group.size() >= self._least_ranks:
            self._attach(self._new_channel())
