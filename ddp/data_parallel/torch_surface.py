"""The interface of torch's DistributedDataParallel beyond training: attributes that scripts read, libraries' calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ddp.comm.channel import Channel
from ddp.comm.sums.small_sum import reduce_options
from ddp.data_parallel.buckets.bucket_plan import BucketLimits
from ddp.data_parallel.buckets.comm_hook import CommHook, builtin_hook, checked_hook
from ddp.data_parallel.forward_buffers import BufferHook, ForwardBuffers
from ddp.data_parallel.forward_policy import ForwardPolicy, tensors_in
from ddp.data_parallel.reducer import Reducer
from ddp.errors import DdpError, UnsupportedError
from ddp.monitoring.stall_report import finish
from ddp.torch_internals import BoundedJoin, check_join, is_in_join

_NO_RANK = -1


class TorchSurface(TorchDistributedDataParallel):
    """Base of ddp's class, which sets the attributes that are only declared here."""

    process_group: dist.ProcessGroup
    device: torch.device
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    broadcast_bucket_size = 250 << 20
    mixed_precision = None
    logger = None
    require_backward_grad_sync = True
    require_forward_param_sync = True
    _reducer: Reducer | None = None
    _policy: ForwardPolicy
    _forward_buffers: ForwardBuffers
    _limits: BucketLimits
    _hook_name = ""
    _buffer_hook: BufferHook | None = None

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.module.named_parameters() if n not in self.parameters_to_ignore]

    def _named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return [(n, b) for n, b in self.module.named_buffers() if n not in self.parameters_to_ignore]

    def _syncs_buffers(self) -> bool:
        return self._reducer is not None and self.require_forward_param_sync and self._forward_buffers.are_stale

    def _share_buffers(self, root: int) -> AbstractContextManager[None]:
        """Copy the buffers of `root` to every rank if due; return the buffer hook's context around forward."""
        return self._forward_buffers.share(root, self._named_buffers) if self._syncs_buffers() else nullcontext()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients on this rank in backward passes of forwards made inside.

        The first backward pass of a forward made outside reduces the accumulated sum. The forward decides: around
        backward alone, it has no effect, as in torch. Every rank must use it in the same steps.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Allow ranks to run out of inputs at different times inside this context. All must enter it; its end blocks.

        A rank that has no more inputs takes part in the others' reductions with zeros. With
        `divide_by_initial_world_size`, averages are still over all ranks, else over those that have inputs. At the
        end, all ranks get parameters and buffers of one that joined last.
        """
        options = {"divide_by_initial_world_size": divide_by_initial_world_size}
        if self._reducer is None:
            return Join([self], enable, throw_on_early_termination, **options)
        return BoundedJoin(self, self._reducer.report.wait, enable, throw_on_early_termination, **options)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that `torch.distributed.algorithms.Join` runs on a rank that has joined."""
        if self._reducer is None:
            return JoinHook()
        check_join(self)
        self._policy.divides_by_active = not kwargs.get("divide_by_initial_world_size", True)
        equalise = partial(self._equalise, self._reducer.channel, with_buffers=self.forward_sync_buffers)
        return JoinedRankHook(self._reducer, self._policy, self._share_buffers, equalise)

    @property  # type: ignore[misc]  # settable in torch, which makes no sense after construction
    def broadcast_buffers(self) -> bool:
        """Whether forward passes begin with rank 0's buffers."""
        return self.forward_sync_buffers

    @property
    def reducer(self) -> Any:  # type: ignore[override]  # ours
        """The reducer, for libraries that drive torch's."""
        return _NoReducer() if self._reducer is None else TorchReducer(self._reducer, self._policy)

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:  # type: ignore[override]  # looked up when needed
        return dict(self._named_buffers())

    @property
    def modules_buffers(self) -> list[torch.Tensor]:  # type: ignore[override]  # as above
        return list(self.named_module_buffers.values())

    def _assign_modules_buffers(self) -> None:
        """Do nothing: buffers are looked up when needed."""

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next forward pass would begin with rank 0's buffers."""
        return self._syncs_buffers() and bool(self.named_module_buffers)

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether backward returns before averages are in place (torch 2.15). Setting it raises UnsupportedError."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self.finalize_backward()

    should_finalize_after_backward = False

    def finalize_backward(self) -> None:
        raise UnsupportedError(
            "manual finalization of backward is not supported: averages are in place when backward returns, so leave "
            "require_manual_backward_finalization and finalize_backward() out"
        )

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: outputs are returned as they are."""

    def _set_static_graph(self) -> None:
        """Do nothing, but raise DdpError after training has started, as torch's class does."""
        if not self.static_graph and self._reducer is not None and self._reducer.report.step > 0:
            raise DdpError(
                "_set_static_graph() after the first step: call it before, or leave it out, since it is not needed here"
            )
        self.static_graph = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return the data that torch's class logs, as far as it exists here."""
        steps = 0 if self._reducer is None else self._reducer.report.step
        return {
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "module_name": type(self.module).__name__,
            "forward_sync_buffers": self.forward_sync_buffers,
            "bucket_cap_bytes": self._limits.cap_bytes,
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "comm_hook": self._hook_name or None,
            "join_uneven_inputs": is_in_join(self),
            "has_rebuilt_buckets": int(steps > 0),
            "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for _, p in self._named_parameters()})),
            "num_parameter_tensors": len(self._named_parameters()),
            "total_parameter_size_bytes": sum(p.nbytes for _, p in self._named_parameters()),
            "iteration": steps,
        }

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Do nothing: there is no sampling."""

    def _remove_autograd_hooks(self) -> None:
        if self._reducer is not None:
            self._reducer.hooks.remove()

    def _check_reducer_finalized(self) -> None:
        """Do nothing: backward returns when everything is reduced."""

    def _register_fused_optim(self, *_: object, **__: object) -> None:
        raise UnsupportedError(
            "_register_fused_optim() is not supported: torch.distributed.optim._apply_optimizer_in_backward() is"
        )

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], torch.futures.Future[torch.Tensor]]) -> None:
        """Let `hook(state, bucket)` reduce each bucket of gradients, as torch's class does. Once, before backward.

        `bucket` has the interface of `torch.distributed.GradBucket`, its gradients are not divided, and the future
        returned by the hook holds the result, one tensor of the bucket's size. Sparse gradients do not go through it.
        """
        self._use_hook(checked_hook(state, hook))

    @property
    def has_comm_hook(self) -> bool:
        """Whether a communication hook, or compression, reduces the gradients."""
        return self._reducer is not None and self._reducer.has_hook

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        self._use_hook(builtin_hook(comm_hook_type, self.process_group))
        self._hook_name = str(comm_hook_type)

    def _register_buffer_comm_hook(
        self, state: object, hook: Callable[..., Any], comm_hook_location: object = None
    ) -> None:
        """Let `hook(state, buffers_by_name)` synchronise buffers, instead of the broadcast from rank 0."""
        self._buffer_hook = BufferHook(state, hook, comm_hook_location)
        if self._reducer is not None:
            self._forward_buffers.hook = self._buffer_hook

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy, without communication. Only with the default group, as in torch."""
        if getattr(self, "process_group", None) is not dist.group.WORLD:
            raise DdpError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: copy or "
                "save its .module, and wrap that again"
            )
        if self.has_comm_hook:
            warnings.warn("the copy has no communication hook or compression: register it again", stacklevel=2)
        left_out = ("process_group", "_reducer", "_policy", "_forward_buffers", "_end", "_buffer_hook")
        state = {name: value for name, value in self.__dict__.items() if name not in left_out}
        return {**state, "compression": None, "device_mesh": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Attach to the default group, without communication; train alone if there is none."""
        nn.Module.__setstate__(self, state)
        if dist.is_initialized():
            self._join_group(None)

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Average over another group from now on. Every rank of it must call it; nothing is compared."""
        self._release()
        self._join_group(new_process_group)

    # Implemented by ddp's class

    def _use_hook(self, hook: CommHook) -> None:
        """Let `hook` reduce the gradients from now on."""
        raise NotImplementedError

    def _equalise(self, channel: Channel, root: int, *, with_buffers: bool) -> None:
        """Copy the values of rank `root` of the group to this rank."""
        raise NotImplementedError

    def _release(self) -> None:
        """Stop communicating and become a plain wrapper."""
        raise NotImplementedError

    def _join_group(self, group: dist.ProcessGroup | None) -> None:
        """Average over `group` from now on (None: the default group), if it has several ranks."""
        raise NotImplementedError

    @property
    def join_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.process_group


def announce(reducer: Reducer, policy: ForwardPolicy, output: Any, *, is_training: bool) -> None:
    """Announce that the gradients of the forward pass with this output will be reduced.

    A backward through any tensor in `output` takes part in a reduction even if it reaches no parameter on this rank.
    """
    forward = policy.announce(is_training=is_training)

    def on_grad(_: torch.Tensor) -> None:
        forward.is_open = False
        reducer.reach()

    reducer.announced()
    for tensor in tensors_in(output):
        forward.is_opaque = False
        if tensor.grad_fn is not None:  # a hook on a leaf would outlive the graph
            tensor.register_hook(on_grad)


class _NoReducer:
    """That of a world of one, in which nothing is reduced."""

    def _rebuild_buckets(self) -> bool:
        """Do nothing."""
        return False

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Do nothing."""


class TorchReducer:
    """The methods of torch's reducer that Lightning and torch's tests call."""

    def __init__(self, reducer: Reducer, policy: ForwardPolicy) -> None:
        self._reducer = reducer
        self._policy = policy

    def _get_local_used_map(self) -> torch.Tensor:
        """Return how many ranks had a gradient in the last pass, for each parameter."""
        return self._reducer.sums.used_map()

    def _rebuild_buckets(self) -> bool:
        """Do nothing."""
        return False

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Announce that the next backward pass is reduced."""
        announce(self._reducer, self._policy, outputs, is_training=False)


def share_iteration(channel: Channel, *, syncs: bool, has_buffers: bool) -> tuple[bool, int]:
    """Return whether any rank reduces gradients, and the last rank that `has_buffers`. Collective; blocks."""
    largest = torch.tensor([int(syncs), channel.report.rank if has_buffers else _NO_RANK], device="cpu")
    with channel.report.waiting("agreement on an iteration with uneven inputs"):
        finish(channel.control.allreduce([largest], reduce_options(dist.ReduceOp.MAX)), device=largest.device)
    any_syncs, root = largest.tolist()
    return bool(any_syncs), root


class JoinedRankHook(JoinHook):
    """Takes part in one wrapper's collectives on a rank that has joined, then copies the last joiner's values to all.

    In each iteration, the ranks that still have inputs announce it (Join itself does), agree on whether gradients will
    be reduced and whose buffers count, and continue. Ranks that have joined take part with nothing.
    """

    def __init__(
        self,
        reducer: Reducer,
        policy: ForwardPolicy,
        sync_buffers: Callable[[int], AbstractContextManager[None]],
        equalise: Callable[[int], None],
    ) -> None:
        self._reducer = reducer
        self._policy = policy
        self._sync_buffers = sync_buffers
        self._equalise = equalise

    def main_hook(self) -> None:
        """Take part in one iteration of the other ranks."""
        syncs, root = share_iteration(self._reducer.channel, syncs=False, has_buffers=False)
        with self._sync_buffers(root):
            pass
        if syncs:
            self._reducer.reduce_as_joined()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the parameters and buffers of a rank that joined last to every rank."""
        _, root = share_iteration(self._reducer.channel, syncs=False, has_buffers=is_last_joiner)
        self._policy.divides_by_active = False
        self._equalise(root)
        self._policy.replicas_equalised()
        if not is_last_joiner:
            self._reducer.drop_gradients()  # they are of passes in which this rank had no inputs
