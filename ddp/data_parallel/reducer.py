"""Averages gradients over the ranks while backward still runs: the core of DistributedDataParallel and hvd's optimizer.

A hook on each parameter runs when its gradient is ready. When all gradients of a bucket are ready, its reduction
starts, always in the order of the plan, so that every rank starts the same collectives in the same order. A callback
at the end of backward starts the remaining ones, waits, and puts the averages into place.

The last transfer carries the step status, every rank's report of this pass: which parameters had gradients, whether
it failed. The host waits for the other ranks' statuses, and never for a device. A parameter without a gradient on
this rank contributes zeros; one that no rank used keeps the gradient it had, or None. A rank whose pass ends with an
exception sends zeros for the rest and reports the failure; then every rank raises in the same iteration, and all are
in step again in the next one.

The plan of buckets is the same on every rank, and so are the bits of sums that depend on it. It follows the order of
gradients in the first pass that succeeds; a later failure does not change it.

A `PassPolicy` decides which backward passes are reduced, and what else the ranks must agree on.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from ddp.comm.broadcast import broadcast_tensors
from ddp.comm.channel import Channel
from ddp.comm.failures import changing_together, describe_failure, failing_together, peers_failed
from ddp.compression.compressors import Half, Int8, PowerSGD
from ddp.data_parallel.backward_pass import EndOfBackward, GradientHooks, GraphKeeper, Pass, PassPolicy, accumulates
from ddp.data_parallel.buckets.bucket_plan import BucketLimits, Member
from ddp.data_parallel.buckets.bucket_schedule import BucketSchedule
from ddp.data_parallel.buckets.comm_hook import CommHook
from ddp.data_parallel.buckets.step_status import RankStatus, StatusSum
from ddp.data_parallel.buckets.transfers import ready_twice
from ddp.data_parallel.buckets.unbucketed import average_unfrozen
from ddp.data_parallel.module_watch import ModuleWatch
from ddp.data_parallel.planning.bucket_planner import BucketPlanner
from ddp.data_parallel.planning.step_report import StepReport, explain
from ddp.data_parallel.planning.step_timer import Moment
from ddp.data_parallel.status_errors import NonFinite, numbers_differ, weights_differ
from ddp.errors import BackwardError, UnsupportedError
from ddp.monitoring import timeline
from ddp.monitoring.progress import count_step
from ddp.monitoring.time_warning import time_warning
from ddp.torch_internals import (
    call_after_backward,
    check_engine,
    current_backward,
    in_compiled_autograd,
)
from ddp.world import break_connections

_Named = tuple[str, torch.nn.Parameter]


class Reducer:
    """Owns the buckets of one module, the hooks on its parameters and the running pass.

    `named` are the module's parameters in the order of registration, which all ranks share; those that do not require
    a gradient now are only watched. `sparse` names those with sparse gradients. With `as_views`, gradients in flat
    buckets stay views of them. `planner` observes the first steps and may change the buckets. The owner sets `policy`
    before the first gradient.
    Backward passes of one module must not run in two threads at once. If it is on several devices, the hooks in
    autograd's threads run one at a time, and all buckets are sent at the end of backward.
    """

    policy: PassPolicy

    def __init__(
        self,
        channel: Channel,
        named: Sequence[_Named],
        module_watch: ModuleWatch,
        limits: BucketLimits,
        *,
        sparse: frozenset[str],
        as_views: bool,
        planner: BucketPlanner | None = None,
    ) -> None:
        check_engine()
        self.channel = channel
        self.report = channel.report
        self.module_watch = module_watch
        self.planner = planner
        self._comm_hook: CommHook | None = None
        self.is_closed = False
        self._has_all_ranks = dist.is_initialized() and channel.group.size() == dist.get_world_size()
        self.current: Pass | None = None
        self.before_last_bucket: Callable[[], None] | None = None  # called when all of its gradients are ready
        self.last_failed = False  # the last pass, on this rank
        self._unsettled = False  # whether collectives of a failed pass are still running
        # Since the last reduction, over all backward passes: in order of arrival, and None without weights.
        self.touched: dict[int, None] = {}
        self._weight: float | None = None
        # Held while a pass is failed from outside its backward, perhaps by an engine thread that frees a graph; also in
        # hooks if there are several devices, since each has an engine thread.
        self.lock = threading.RLock()
        self._has_several_devices = len({parameter.device for _, parameter in named}) > 1
        self.is_planned = False  # by the order in which gradients arrive; the same on every rank
        # No bucket is sent early in this rank's next pass, which shows which gradients become ready more than once.
        # Also set after a failure, since such a gradient may have caused it.
        self._watches = True
        self._repeated: set[int] = set()
        self._last_absent: frozenset[int] = frozenset()
        self.nonfinite = NonFinite(channel)
        self._warned: set[str] = set()
        self._named = list(named)
        self.hooks = GradientHooks()
        self._new_schedule = partial(BucketSchedule, channel, limits=limits, as_views=as_views)
        self._divide({name for name, parameter in named if parameter.requires_grad}, sparse)

    def _divide(self, trained: Collection[str], sparse: Collection[str]) -> None:
        """Reduce the parameters of these names from now on, and only watch the others."""
        self.sparse = frozenset(sparse)
        self._frozen = [(name, parameter) for name, parameter in self._named if name not in trained]
        pairs = [(name, parameter) for name, parameter in self._named if name in trained]
        self.members = [Member(index, name, parameter) for index, (name, parameter) in enumerate(pairs)]
        self._schedule = self._new_schedule(
            self.members,
            [member.index for member in self.members if member.name in sparse],
            own_status=self._own_status,
        )
        if self._comm_hook is not None:
            self._schedule.use_hook(self._comm_hook)
        self.hooks.remove()
        self.hooks = GradientHooks()
        for member in self.members:
            self._watch(member)

    def close(self) -> None:
        """Remove the hooks. Called when the owner is gone or leaves the group."""
        self.is_closed = True
        self.hooks.remove()
        self.report.close()

    def use_hook(self, hook: CommHook) -> None:
        """Let `hook` reduce the buckets, from the next pass on. Raises BackwardError if there is one already."""
        if self.has_hook:
            raise BackwardError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. compression= registers one "
                "too; wrap the module again for another hook"
            )
        self._comm_hook = hook
        self._schedule.use_hook(hook)

    @property
    def has_hook(self) -> bool:
        return self._comm_hook is not None

    @property
    def has_users_hook(self) -> bool:
        return self._comm_hook is not None and not self._comm_hook.takes_own

    def plan_state(self) -> dict[str, Any]:
        """Return the plan of the next pass in names, to keep the same buckets after a restart. Do not modify it."""
        return {**self._schedule.state, "is_planned": self.is_planned}

    def resume_plan(self, state: Mapping[str, Any]) -> None:
        """Load a plan, and reduce exactly the parameters that it names, regardless of which require a gradient now.

        Every rank must call it, between passes. Communicates nothing.
        """
        names = self._schedule.state
        if any({*state[kind]} != {*names[kind]} for kind in ("order", "sparse")):
            self._divide({*state["order"], *state["sparse"]}, state["sparse"])
        self.load_plan_state(state)

    def load_plan_state(self, state: Mapping[str, Any]) -> None:
        """Load a plan. Every rank must call it, between passes. Raises CheckpointError for other names."""
        self._schedule.check_plan_state(state)
        self.settle()
        self.is_planned = state["is_planned"]
        self._schedule.end()
        self._schedule.load_plan_state(state, self._repeated)
        if self.planner is not None:
            self.planner.keep_buckets()

    def explain(self, compression: Half | Int8 | PowerSGD | None, compressed_limits: BucketLimits) -> StepReport:
        """Explain the model's steps. Raises DdpError if too little is known."""
        return explain(self._schedule, self.planner, self.channel.group, self.members, compression, compressed_limits)

    def used_map(self) -> torch.Tensor:
        """Return how many ranks had a gradient in the last pass, by index."""
        return self._schedule.used_map()

    def _watch(self, member: Member) -> None:
        hook = self._hook(member)
        self.hooks.add(member.parameter, self._locked(hook) if self._has_several_devices else hook)

    def is_inside_backward(self) -> bool:
        """Return whether a pass to reduce runs in this thread's backward: a forward now is a checkpoint's."""
        return self.current is not None and current_backward() != -1

    def settle(self) -> None:
        """Wait for the collectives that a failed pass of this rank started; every rank's next pass follows them."""
        with self.lock:
            if self.current is not None and current_backward() == -1:
                self.fail("its backward pass was interrupted")
        if self._unsettled:
            self.report.begin("rest of a backward pass that failed")
            self._note_status(self._schedule.wait())
            self._schedule.end()
            self.report.step += 1
            self._note_failure()
            self._unsettled = False
            time_warning.unsettled.discard(self)
            self.report.counted()

    def _note_failure(self) -> None:
        if self.planner is not None:
            self.planner.timer.restart()

    def add_weight(self, weight: float) -> None:
        """Add `weight` for the gradients that the next backward pass adds to this rank's."""
        self._weight = (self._weight or 0.0) + weight

    def reduce_now(self, *, joined: bool = False) -> None:
        """Take part in a reduction without a backward pass of this rank, with its present gradients. Blocks."""
        self.policy.end(self._start(joined=joined))

    def warn(self, text: str) -> None:
        """Issue a warning once."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)

    def _hook(self, member: Member) -> Callable[[torch.Tensor], None]:
        """Return the hook of one parameter: the only Python code that runs per parameter, so every lookup counts."""
        index, touched, transfer_of = member.index, self.touched, self._schedule.transfer_of
        now = perf_counter if self.planner is None else self.planner.timer.clock.now

        def on_grad(_: torch.Tensor) -> None:
            touched[index] = None
            current = self.current
            if current is None:
                if not self.policy.may_begin():
                    return
                current = self.current
                assert current is not None
            if current.holds:
                if index in current.arrived:
                    self._repeated.add(index)  # a parameter in several reentrant checkpoints
                current.arrived[index] = now()
                return
            transfer = transfer_of[index]
            if index in transfer.taken_early:
                transfer.take_early(index)
            transfer.missing.discard(index)
            if not transfer.missing:
                if transfer.work is not None:
                    raise ready_twice(member)
                self._schedule.send_complete(touched)

        return on_grad

    def _locked(self, hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        @wraps(hook)
        def on_grad(grad: torch.Tensor) -> None:
            with self.lock:
                hook(grad)

        return on_grad

    def reach(self) -> None:
        """Let a backward pass that has reached a forward's output take part, even if it reaches no parameter."""
        if self.is_closed:
            raise BackwardError(
                "the DistributedDataParallel that made this output was deleted before backward, so gradients would "
                "not be averaged: keep it as long as you train"
            )
        with self.lock if self._has_several_devices else nullcontext():
            if self.current is None and accumulates(self.hooks.nodes, self.warn):
                self.policy.begin()

    def begin(self) -> None:
        """Start a pass that ends with the running backward pass."""
        if in_compiled_autograd():
            raise UnsupportedError(
                "compiled autograd is not supported, gradients would not be averaged: turn "
                "torch._dynamo.config.compiled_autograd off; torch.compile itself may stay"
            )
        pass_ = self._start(graphs=GraphKeeper() if torch.is_grad_enabled() else None)  # backward(create_graph=True)
        call_after_backward(EndOfBackward(partial(self.policy.end, pass_), partial(self.abandon, pass_)))
        if self._last_absent:
            self._expect_absent()

    def _start(self, *, graphs: GraphKeeper | None = None, joined: bool = False) -> Pass:
        problem = self.module_watch.problem()
        if problem is not None:
            self.report.tell_failure(self.report.step, str(problem))
        self.policy.starting()
        self._schedule.begin()
        # The streams of several devices are synchronised with each other only at the end of backward.
        holds = self._watches or graphs is not None or problem is not None or self._has_several_devices
        holds = holds or (self.planner is not None and self.planner.holds)
        self.current = pass_ = Pass(problem, graphs, self._unfrozen(), holds, has_joined=joined)
        self.report.at("in backward", self._schedule.not_ready)
        self.mark("backward")
        timeline.backward()
        return pass_

    def mark(self, moment: Moment) -> None:
        """Record that the step has reached `moment`."""
        if self.planner is not None:
            self.planner.timer.mark(moment)

    def _unfrozen(self) -> list[_Named]:
        return [(name, parameter) for name, parameter in self._frozen if parameter.requires_grad]

    def _expect_absent(self) -> None:
        """Do not let buckets wait for parameters that this pass will not reach, if they were absent last time too.

        Buckets do wait for a parameter that had a gradient last time, since a reentrant checkpoint may reach it.
        """
        unreached = self.hooks.unreached()
        if unreached <= self._last_absent:
            for index in unreached:
                self._schedule.transfer_of[index].missing.discard(index)

    def abandon(self, pass_: Pass) -> None:
        """Fail a pass whose backward the engine has dropped, unless it is over already."""
        with self.lock:
            if self.current is pass_:
                self.fail(f"its backward pass raised an exception ({self._schedule.not_ready()})")

    def fail(self, why: str) -> None:
        """End this rank's part in the running or announced pass: the others raise PeerFailedError in theirs.

        Does not wait for other ranks and never raises, since a destructor calls it. Callers outside the pass must hold
        `lock`.
        """
        self.current = None  # else a graph freed meanwhile could end it a second time
        self.report.tell_failure(self.report.step, why)
        self._watches = True
        self.drop_gradients()
        try:
            if self.report.is_in_step:  # else it is unknown which collectives of this pass were started
                self._schedule.send_nothing(RankStatus(failed=True))
                self._unsettled = True
                time_warning.unsettled.add(self)
        except Exception:  # the hook raised again, or the group is broken: the others notice while they wait
            self._schedule.end()
        self._break_off()
        self._forget(has_failed=True)

    def _break_off(self) -> None:
        """If this rank is out of step, make the others fail too: they would wait for collectives it does not start."""
        if not self.report.is_in_step:
            break_connections()

    def send_rest(self, pass_: Pass) -> None:
        """Start the remaining transfers before `finish`, if nothing else must come first."""
        if pass_.problem is None and pass_.graphs is None:
            with torch.no_grad():
                self._schedule.send_rest(self.touched)

    @torch.no_grad()
    def finish(self, pass_: Pass) -> None:
        """Start the remaining transfers, wait, and put the averages into place, or raise the ranks' error. Blocks."""
        self.mark("backward ended")
        self.last_failed = True
        if self.before_last_bucket is not None:
            self.before_last_bucket()
        try:
            if pass_.graphs is not None:
                pass_.graphs.set_aside(self.members[index] for index in self.touched)
            if pass_.problem is None:
                self._schedule.send_rest(self.touched)
            else:
                self._schedule.send_nothing(self._own_status())
        except BaseException as error:
            self.fail(describe_failure("the end of its backward pass", error))
            raise
        self.mark("sent")
        try:
            self._conclude(pass_, self._schedule.wait())
        except BaseException:
            self.drop_gradients()
            self._note_failure()
            self._break_off()
            raise
        finally:
            self.report.step += 1
            self._schedule.end()
            self._forget(has_failed=False)
        self.last_failed = False
        count_step()

    def _own_status(self) -> RankStatus:
        pass_ = self.current
        assert pass_ is not None
        if pass_.problem is None:
            self._note_taken_gradients(pass_)
        pass_.has_sent_status = True
        return self.policy.fill(
            failed=pass_.problem is not None,
            joined=pass_.has_joined,
            weight=self._weight,
            unfrozen=len(pass_.unfrozen),
            number=self.channel.number,
            nonfinite=not self._schedule.is_finite,
            warned=time_warning.is_news,
        )

    def _note_status(self, statuses: StatusSum) -> None:
        """Note the part of the statuses that counts even if the pass has failed."""
        if self._has_all_ranks:
            time_warning.note(statuses.warned)

    def _note_taken_gradients(self, pass_: Pass) -> None:
        """Refuse the pass if a user's hook removed a gradient after its arrival."""
        for index in self._schedule.absent():
            member = self.members[index]
            if index not in self.touched or member.parameter.grad is not None:
                continue
            if not self.hooks.has_others(index):
                continue  # autograd calls the hook also for a gradient that a custom function left undefined
            if index in pass_.arrived if pass_.holds else index not in self._schedule.transfer_of[index].missing:
                pass_.problem = BackwardError(
                    f"the gradient of {member.name!r} was taken away before it was averaged, in a hook that sets .grad "
                    "to None: for an optimizer that steps in backward use "
                    "torch.distributed.optim._apply_optimizer_in_backward, which is supported",
                    parameter=member.name,
                )
                self.report.tell_failure(self.report.step, str(pass_.problem))
                return

    def _conclude(self, pass_: Pass, statuses: StatusSum) -> None:
        """Act on the ranks' statuses: every rank does the same."""
        self.mark("arrived")
        self._note_status(statuses)
        if pass_.problem is not None:
            raise pass_.problem
        if statuses.failed:
            raise peers_failed(self.report, statuses.failed)
        group = self.channel.group
        if not statuses.same_number:
            raise numbers_differ(self.channel, self.channel.number)
        if (error := self.policy.disagreement(statuses)) is not None:
            raise error
        self.nonfinite.note(statuses.nonfinite, is_here=not self._schedule.is_finite)
        if statuses.weighted not in (0, statuses.active) or (statuses.weighted and not statuses.weight > 0):
            raise weights_differ(self.channel, self._weight)
        if self.planner is not None:
            self.planner.count_step()
        factor = group.size() / (statuses.weight if statuses.weighted else self.policy.rank_count(statuses))
        is_first = not self.is_planned
        meets = is_first or statuses.unfrozen or (self.planner is not None and self.planner.decides)
        with failing_together(self.channel, "its backward pass") if meets else nullcontext():
            self._schedule.deliver(factor)
        self._watches = False
        self._last_absent = frozenset(self._schedule.absent())
        if is_first:
            self._follow_first_pass()
        elif self._repeated != self._schedule.repeated:
            self._plan(self._schedule.order)
        if statuses.unfrozen:
            with self.report.waiting("all-reduce of unfrozen parameters"):
                unfrozen = average_unfrozen(group, pass_.unfrozen, factor)
            with changing_together(self.channel):
                self._add_members(unfrozen)
        if pass_.graphs is not None:
            pass_.graphs.restore(lambda _: self.reach())
        if self.planner is not None:
            if is_first or statuses.unfrozen:
                self.planner.restart()
            else:
                self.planner.step_ended(self._schedule, pass_.arrived, has_joined=pass_.has_joined)
        self.policy.delivered(is_first=is_first)

    def refuse(self, pass_: Pass, problem: BackwardError) -> None:
        """Make the running pass fail at its end, on every rank."""
        if pass_.problem is None:
            pass_.problem = problem
            self.report.tell_failure(self.report.step, str(problem))

    def first_used(self) -> torch.nn.Parameter:
        """Return the first parameter for which any rank had a gradient in the last pass, else the first of all."""
        index = int(torch.argmax((self.used_map() > 0).to(torch.uint8))) if self._last_absent else 0
        return self.members[index].parameter

    def drop_gradients(self) -> None:
        """Set every `.grad` to None: the present values are neither this rank's gradients nor averages."""
        for parameter in self.parameters():
            parameter.grad = None

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters that are trained now."""
        return [*(member.parameter for member in self.members), *dict(self._unfrozen()).values()]

    def leave_out(self) -> None:
        """Exclude this rank's gradients since the last reduction from the next one."""
        self.drop_gradients()
        self.touched.clear()
        self._weight = None if self._weight is None else 0.0

    def _forget(self, *, has_failed: bool) -> None:
        self.current = self._weight = None
        self.touched.clear()
        self.policy.ended(has_failed=has_failed)
        timeline.backward_ended()
        self.report.at("outside forward and backward")

    def _follow_first_pass(self) -> None:
        """Plan again in the order in which the gradients arrived on rank 0."""
        before = self._schedule.order
        known = frozenset(before)
        arrived = [index for index in self.touched if index in known]
        order = torch.tensor([*arrived, *(index for index in before if index not in self.touched)], device="cpu")
        with self.report.waiting("broadcast of the order of gradients"):
            broadcast_tensors(self.channel.control, [order])
        with changing_together(self.channel):
            if order.tolist() != before or self._repeated:
                self._plan(order.tolist())
        self.is_planned = True

    def _plan(self, order: Sequence[int]) -> None:
        self._schedule.end()
        self._schedule.plan(order, repeated=self._repeated)

    def _add_members(self, unfrozen: Sequence[_Named]) -> None:
        """Reduce these parameters like all others from now on."""
        taken = {id(parameter) for _, parameter in unfrozen}
        self._frozen = [(name, parameter) for name, parameter in self._frozen if id(parameter) not in taken]
        new = [Member(len(self.members) + at, name, parameter) for at, (name, parameter) in enumerate(unfrozen)]
        self.members += new
        for member in new:
            self._watch(member)
        self._plan([*self._schedule.order, *(member.index for member in new)])
