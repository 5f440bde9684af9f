"""Averages gradients over the ranks while backward still runs: the core of DistributedDataParallel and hvd's optimizer.

The reducer follows one backward pass at a time, as a state machine: `Phase` has its states. A hook on each parameter
tells `GradientSums` that its gradient is ready, and that starts the sum of a bucket when all of its gradients are. A
callback at the end of backward starts the remaining ones, waits, and puts the averages into place. A `PassPolicy`
decides which backward passes are reduced, and what else the ranks must agree on.

The last bucket carries the step status, every rank's report of this pass: which parameters had gradients, whether it
failed. The host waits for the other ranks' statuses, and never for a device. A parameter without a gradient on this
rank contributes zeros; one that no rank used keeps the gradient it had, or None. A rank whose pass ends with an
exception sends zeros for the rest and reports the failure; then every rank raises in the same iteration, and all are
in step again in the next one.
"""

from __future__ import annotations

import enum
import math
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from itertools import chain
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from ddp.comm.channel import Channel
from ddp.comm.failures import changing_together, describe_failure, failing_together, peers_failed
from ddp.data.micro_batch import MicroBatch, current
from ddp.data_parallel.backward_pass import (
    Action,
    EndOfBackward,
    GradientHooks,
    GraphKeeper,
    Pass,
    PassPolicy,
    accumulates,
)
from ddp.data_parallel.buckets.bucket_plan import BucketLimits, Member
from ddp.data_parallel.buckets.comm_hook import CommHook
from ddp.data_parallel.buckets.gradient_sums import GradientSums
from ddp.data_parallel.buckets.step_status import RankStatus, StatusSum
from ddp.data_parallel.buckets.unbucketed import average_unfrozen, divided
from ddp.data_parallel.module_watch import ModuleWatch
from ddp.data_parallel.planning.bucket_planner import BucketPlanner
from ddp.data_parallel.planning.step_timer import Moment
from ddp.data_parallel.status_errors import NonFinite, numbers_differ, stepped_inside, weights_differ
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
# Reducers whose passes end with one backward pass, by autograd's number of that.
_ending_together: dict[int, list[Reducer]] = {}


class Phase(enum.Enum):
    """States of a reducer, and what ends each."""

    IDLE = enum.auto()  # until a gradient or an output of a backward pass to hold or to reduce, or `reduce_now`
    HOLDING = enum.auto()  # until the end of a backward pass whose gradients wait for a later one
    REDUCING = enum.auto()  # until the averages of a pass are in place, or every rank raises the same error
    FAILED = enum.auto()  # until `settle`: this rank alone failed, and the collectives of its pass still run


class Reducer:
    """Owns the sums of one module's gradients, the hooks on its parameters and the running pass.

    `named` are the module's parameters in the order of registration, which all ranks share; those that do not require
    a gradient now are only watched. `sparse` names those with sparse gradients. With `as_views`, gradients in flat
    buckets stay views of them. `by_tree`: whether sums are those of `ddp.comm.sums.tree_sum`; None: if the group
    prefers that. `planner` observes the first steps and may change the buckets. The owner sets `policy` before the
    first gradient. Backward passes of one module must not run in two threads at once. If it is on several devices, the
    hooks in autograd's threads run one at a time, and all buckets are sent at the end of backward.
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
        by_tree: bool | None = None,
        planner: BucketPlanner | None = None,
    ) -> None:
        check_engine()
        self.channel = channel
        self.report = channel.report
        self.module_watch = module_watch
        self.planner = planner
        self.phase = Phase.IDLE
        self.current: Pass | None = None  # while it is HOLDING or REDUCING
        self.members: list[Member] = []
        self._comm_hook: CommHook | None = None
        self.is_closed = False
        self._has_all_ranks = dist.is_initialized() and channel.group.size() == dist.get_world_size()
        self.before_last_bucket: Callable[[], None] | None = None  # called when all of its gradients are ready
        self.last_failed = False  # the last pass, on this rank
        self._weights: list[float] = []  # given since the last reduction
        self._held: dict[str, list[torch.Tensor | None]] = {}  # gradients of unfrozen parameters by micro-batch
        # Held while a pass is failed from outside its backward, perhaps by an engine thread that frees a graph; also in
        # hooks if there are several devices, since each has an engine thread.
        self.lock = threading.RLock()
        self._has_several_devices = len({parameter.device for _, parameter in named}) > 1
        # No bucket is sent early in this rank's next pass, which shows which gradients become ready more than once.
        # Also set after a failure, since such a gradient may have caused it.
        self._watches = True
        self.nonfinite = NonFinite(channel)
        self._has_foreign_leaf = False  # instead of a parameter, in the last forward pass
        self._warned: set[str] = set()
        self._named = list(named)
        self.hooks = GradientHooks()
        self._new_sums = partial(GradientSums, channel, self.members, limits=limits, as_views=as_views, by_tree=by_tree)
        self._by_tree = by_tree
        self._divide({name for name, parameter in named if parameter.requires_grad}, sparse)

    def _divide(self, trained: Collection[str], sparse: Collection[str]) -> None:
        """Reduce the parameters of these names from now on, and only watch the others."""
        self.sparse = frozenset(sparse)
        self._frozen = [(name, parameter) for name, parameter in self._named if name not in trained]
        pairs = [(name, parameter) for name, parameter in self._named if name in trained]
        self.members[:] = [Member(index, name, parameter) for index, (name, parameter) in enumerate(pairs)]
        self.sums = self._new_sums(
            [member.index for member in self.members if member.name in sparse],
            own_status=self._own_status,
        )
        if self._comm_hook is not None:
            self.sums.use_hook(self._comm_hook)
        self.hooks.remove()
        self.hooks = GradientHooks()
        for member in self.members:
            self._watch(member)

    def _watch(self, member: Member) -> None:
        now = perf_counter if self.planner is None else self.planner.timer.clock.now
        hook = self.sums.hook(member, self._opens, now)
        self.hooks.add(member.parameter, self._locked(hook) if self._has_several_devices else hook)

    def _locked(self, hook: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        @wraps(hook)
        def on_grad(grad: torch.Tensor) -> None:
            with self.lock:
                hook(grad)

        return on_grad

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
        if self._by_tree:
            raise UnsupportedError(
                "deterministic=True and a communication hook or compression, which sum in another way: leave one out"
            )
        self._comm_hook = hook
        self.sums.use_hook(hook)

    @property
    def has_hook(self) -> bool:
        return self._comm_hook is not None

    @property
    def has_users_hook(self) -> bool:
        return self._comm_hook is not None and not self._comm_hook.takes_own

    def resume_plan(self, state: Mapping[str, Any]) -> None:
        """Load a plan, and reduce exactly the parameters that it names, regardless of which require a gradient now.

        Every rank must call it, between passes. Communicates nothing.
        """
        if not self.sums.has_members_of(state):
            self._divide({*state["order"], *state["sparse"]}, state["sparse"])
        self.load_plan_state(state)

    def load_plan_state(self, state: Mapping[str, Any]) -> None:
        """Load a plan. Every rank must call it, between passes. Raises CheckpointError for other names."""
        self.settle()
        self.sums.load_plan_state(state)
        if self.planner is not None:
            self.planner.keep_buckets()

    def add_weight(self, weight: float) -> None:
        """Add `weight` for the gradients that the next backward pass adds to this rank's."""
        self._weights.append(weight)

    def warn(self, text: str) -> None:
        """Issue a warning once."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)

    def mark(self, moment: Moment) -> None:
        """Record that the step has reached `moment`."""
        if self.planner is not None:
            self.planner.timer.mark(moment)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters that are trained now."""
        return [*(member.parameter for member in self.members), *dict(self._unfrozen()).values()]

    def _unfrozen(self) -> list[_Named]:
        return [(name, parameter) for name, parameter in self._frozen if parameter.requires_grad]

    def drop_gradients(self) -> None:
        """Set every `.grad` to None: the present values are neither this rank's gradients nor averages."""
        for parameter in self.parameters():
            parameter.grad = None

    def before_step(self, optimizer: Any) -> bool:
        """Return whether a step of an optimizer of these parameters counts. Refuse one before averages are in place."""
        pass_ = self.current
        if pass_ is None or self.phase is not Phase.REDUCING:
            self.nonfinite.before_step(optimizer)
            return True
        if not (pass_.has_sent_status or self.has_users_hook or pass_.problem is not None):
            pass_.problem = stepped_inside(optimizer, self.members)
            self.report.tell_failure(self.report.step, str(pass_.problem))
        self.nonfinite.before_step()
        return False

    # Events: each is a transition of the state machine

    def _enter(self, phase: Phase, pass_: Pass | None = None) -> None:
        if Phase.FAILED in (phase, self.phase):
            (time_warning.unsettled.add if phase is Phase.FAILED else time_warning.unsettled.discard)(self)
        self.phase, self.current = phase, pass_
        self.sums.is_open = phase is Phase.REDUCING

    def _opens(self) -> bool:
        """Handle a gradient while nothing is reduced; return whether its backward pass is reduced from now on."""
        return self.phase is not Phase.HOLDING and self._begin(by_output=False) is Action.REDUCE

    def reach(self) -> None:
        """Let a backward pass that has reached a forward's output take part, even if it reaches no parameter."""
        if self.is_closed:
            raise BackwardError(
                "the DistributedDataParallel that made this output was deleted before backward, so gradients would "
                "not be averaged: keep it as long as you train"
            )
        with self.lock if self._has_several_devices else nullcontext():
            if self.current is None and accumulates(self.hooks.nodes, self.warn):
                self._begin(by_output=True)

    def enter_forward(self, module: torch.nn.Module) -> None:
        """Begin a forward pass of `module`. Raises BackwardError if it has other parameters."""
        micro_batch = current.micro_batch
        if micro_batch is not None and micro_batch.is_first and micro_batch is not self.policy.micro_batch:
            self.sums.end()  # of a step that was abandoned
            self._forget()
        self.module_watch = self.module_watch.follow(module)
        self.report.at("in forward")
        self.mark("forward")

    def announced(self) -> None:
        """Get ready for the backward pass of a forward pass that has just ended."""
        self.hooks.be_last()
        self._has_foreign_leaf = self.module_watch.has_foreign_leaf()
        self.report.at("between forward and backward")

    def is_inside_backward(self) -> bool:
        """Return whether a pass runs in this thread's backward: a forward now is a checkpoint's."""
        return self.current is not None and current_backward() != -1

    def _choose(self, *, by_output: bool) -> Action:
        try:
            self.sums.check_older(added=0 if by_output else 1)
            return self.policy.choose(by_output=by_output)
        except BackwardError as error:
            self.fail(str(error))
            raise

    def _begin(self, *, by_output: bool) -> Action:
        """Start a pass for the running backward pass, as the policy decides."""
        action = self._choose(by_output=by_output)
        if action is Action.STRAY:
            self.warn(
                "gradients came from a backward pass that did not go through the forward of DistributedDataParallel "
                "(model.module(x) instead of model(x)?): they stay on this rank until the next pass that does"
            )
        if action in (Action.LEAVE, Action.STRAY):
            return action
        if in_compiled_autograd():
            raise UnsupportedError(
                "compiled autograd is not supported, gradients would not be averaged: turn "
                "torch._dynamo.config.compiled_autograd off; torch.compile itself may stay"
            )
        self.report.check_in_step()
        self.settle()
        pass_ = Pass(action, current_backward(), micro_batch=self.policy.micro_batch)
        if action is Action.REDUCE:
            pass_.graphs = GraphKeeper() if torch.is_grad_enabled() else None  # backward(create_graph=True)
            self._start(pass_)
            _ending_together.setdefault(pass_.task, []).append(self)
        else:
            self._enter(Phase.HOLDING, pass_)
        call_after_backward(EndOfBackward(partial(self._backward_ended, pass_), partial(self._abandon, pass_)))
        if action is Action.REDUCE:
            self.sums.expect_absent(self.hooks.unreached)
        return action

    def _start(self, pass_: Pass) -> None:
        """Start to reduce gradients in `pass_`."""
        pass_.problem = self.module_watch.problem()
        if pass_.problem is not None:
            self.report.tell_failure(self.report.step, str(pass_.problem))
        elif self._has_foreign_leaf:
            self.warn(
                "a forward pass used other tensors instead of the parameters (torch.func.functional_call?): their "
                "gradients stay on this rank"
            )
        try:
            self.policy.starting()
        except BackwardError as error:
            self.fail(str(error))
            raise
        pass_.unfrozen = self._unfrozen()
        # The streams of several devices are synchronised with each other only at the end of backward.
        holds = self._watches or self._has_several_devices or pass_.graphs is not None or pass_.problem is not None
        holds = holds or (self.planner is not None and self.planner.holds)
        self.sums.open(
            holds=holds,
            is_first_new=self.policy.is_cleared,
            micro_batch=pass_.micro_batch,
            shared=self.hooks.shared(),
        )
        self._enter(Phase.REDUCING, pass_)
        self.report.at("in backward", self.sums.not_ready)
        self.mark("backward")
        timeline.backward()

    def reduce_now(self, *, joined: bool = False) -> None:
        """Take part in a reduction without a backward pass of this rank, with its present gradients. Blocks."""
        pass_ = Pass(Action.REDUCE, has_joined=joined, micro_batch=self.policy.micro_batch)
        self._start(pass_)
        _finish_together([(self, pass_)])

    def reduce_as_joined(self) -> None:
        """Take part in a reduction without gradients: this rank has no more inputs (Join).

        It receives the averages too: an optimizer that is sharded over the ranks steps here with them.
        """
        self.settle()
        self.drop_gradients()
        self.reduce_now(joined=True)

    def pass_without_backward(self) -> None:
        """Handle an announced backward pass that this rank leaves out, since its loss has no weight. May block."""
        if self.current is not None:
            return
        action = self._choose(by_output=False)
        if action is Action.REDUCE:
            self.reduce_now()
        elif action is Action.HOLD:
            self._end_held(Pass(action, micro_batch=self.policy.micro_batch))

    def _backward_ended(self, pass_: Pass) -> None:
        """End a pass, together with those of other reducers that end with the same backward pass.

        Autograd calls each of them, in the order of their first gradients, which may differ between ranks.
        """
        if self.current is not pass_:
            return  # it has failed, or has ended with another reducer's pass
        if self.phase is Phase.HOLDING:
            self._end_held(pass_)
            return
        reducers = sorted(_ending_together.pop(pass_.task, [self]), key=lambda reducer: reducer.channel.number)
        _finish_together([(reducer, reducer.current) for reducer in reducers if reducer.current is not None])

    def _end_held(self, pass_: Pass) -> None:
        self._enter(Phase.IDLE)
        if pass_.micro_batch is not None:
            self.sums.keep(pass_.micro_batch)
            for name, parameter in self._unfrozen():
                self._held.setdefault(name, []).append(divided(parameter.grad, pass_.micro_batch.divisor))
                parameter.grad = None
        self.report.at("between two backward passes of a step")
        self.policy.held()

    def _abandon(self, pass_: Pass) -> None:
        """Fail a pass whose backward the engine has dropped, unless it is over already."""
        with self.lock:
            if self.current is pass_:
                self.fail(f"its backward pass raised an exception ({self.sums.not_ready()})")

    def fail(self, why: str) -> None:
        """End this rank's part in the running or announced pass: the others raise PeerFailedError in theirs.

        Does not wait for other ranks and never raises, since a destructor calls it. Callers outside the pass must hold
        `lock`.
        """
        pass_ = self.current
        self._enter(Phase.IDLE)  # else a graph freed meanwhile could end it a second time
        if pass_ is not None:
            _ending_together.pop(pass_.task, None)  # it fails for all of them
        self.report.tell_failure(self.report.step, why)
        self._watches = True
        self.drop_gradients()
        try:
            if self.report.is_in_step:  # else it is unknown which collectives of this pass were started
                self.sums.send_nothing(RankStatus(failed=True), self.policy.micro_batch)
                self._enter(Phase.FAILED)
        except Exception:  # the hook raised again, or the group is broken: the others notice while they wait
            self.sums.end()
        self._break_off()
        self._reset()

    def settle(self) -> None:
        """Wait for the collectives that a failed pass of this rank started; every rank's next pass follows them."""
        with self.lock:
            if self.current is not None and current_backward() == -1:
                self.fail("its backward pass was interrupted")
        if self.phase is Phase.FAILED:
            self.report.begin("rest of a backward pass that failed")
            self._note_status(self.sums.wait())
            self.sums.end()
            self.report.step += 1
            self._note_failure()
            self._enter(Phase.IDLE)
            self.report.counted()

    # The end of a pass

    @torch.no_grad()
    def _send(self, pass_: Pass) -> None:
        """Start the transfers that backward has not started."""
        self.last_failed = True
        self.mark("backward ended")
        try:
            unplanned = () if self.sums.is_planned else [self.members[index] for index in self.sums.order]
            self.policy.backward_ended(pass_, unplanned)
            if self.before_last_bucket is not None:
                self.before_last_bucket()
            if pass_.graphs is not None:
                pass_.graphs.set_aside(self.members[index] for index in self.sums.touched)
            if pass_.problem is None:
                self.sums.send_rest()
            else:
                self.sums.send_nothing(self._own_status(), pass_.micro_batch)
        except BaseException as error:
            self.fail(describe_failure("the end of its backward pass", error))
            raise
        self.mark("sent")

    def _finish(self, pass_: Pass) -> None:
        """Wait for the transfers, and put the averages into place, or raise the ranks' error. Blocks."""
        try:
            with torch.no_grad():
                self._conclude(pass_, self.sums.wait())
        except BaseException:
            self.drop_gradients()
            self._note_failure()
            self._break_off()
            raise
        finally:
            self.report.step += 1
            self.sums.end()
            self._enter(Phase.IDLE)
            self._reset()
        self.last_failed = False
        count_step()
        self.policy.finished()

    def _own_status(self) -> RankStatus:
        pass_ = self.current
        assert pass_ is not None
        if pass_.problem is None:
            self._note_taken_gradients(pass_)
        pass_.has_sent_status = True
        return self.policy.status(
            failed=pass_.problem is not None,
            joined=pass_.has_joined,
            weight=sum(self._weights) if self._weights else None,
            unfrozen=len(pass_.unfrozen),
            number=self.channel.number,
            nonfinite=not self.sums.is_finite,
            warned=time_warning.is_news,
        )

    def _note_taken_gradients(self, pass_: Pass) -> None:
        """Refuse the pass if a user's hook removed a gradient after its arrival."""
        for member in self.sums.taken_away():
            # Autograd calls our hook also for a gradient that a custom function left undefined.
            if self.hooks.has_others(member.index):
                pass_.problem = BackwardError(
                    f"the gradient of {member.name!r} was taken away before it was averaged, in a hook that sets .grad "
                    "to None: for an optimizer that steps in backward use "
                    "torch.distributed.optim._apply_optimizer_in_backward, which is supported",
                    parameter=member.name,
                )
                self.report.tell_failure(self.report.step, str(pass_.problem))
                return

    def _note_status(self, statuses: StatusSum) -> None:
        """Note the part of the statuses that counts even if the pass has failed."""
        if self._has_all_ranks:
            time_warning.note(statuses.warned)

    def _note_failure(self) -> None:
        if self.planner is not None:
            self.planner.timer.restart()

    def _break_off(self) -> None:
        """If this rank is out of step, make the others fail too: they would wait for collectives it does not start."""
        if not self.report.is_in_step:
            break_connections()

    def _reset(self) -> None:
        self._forget()
        self.policy.ended()
        timeline.backward_ended()
        if not self.report.has_failed:  # else the others would take this rank for one that has never come
            self.report.at("outside forward and backward")

    def _forget(self) -> None:
        """Drop what backward passes have left for a later one."""
        self.sums.touched.clear()
        self._weights, self._held = [], {}

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
        if (error := self.policy.disagreement(statuses, pass_)) is not None:
            raise error
        step = None if pass_.micro_batch is None else pass_.micro_batch.step
        is_here, spoilt_by = not self.sums.is_finite, self.sums.spoilt_by
        self.nonfinite.note(statuses.nonfinite, is_here=is_here, spoilt_by=spoilt_by, step=step)
        factor = self._factor(statuses, pass_.micro_batch)
        if self.planner is not None:
            self.planner.count_step()
        is_first = not self.sums.is_planned
        meets = is_first or statuses.unfrozen or (self.planner is not None and self.planner.decides)
        with failing_together(self.channel, "its backward pass") if meets else nullcontext():
            self.sums.deliver(factor)
        self._watches = False
        self.sums.follow_order()
        if statuses.unfrozen:
            with self.report.waiting("all-reduce of unfrozen parameters"):
                unfrozen = average_unfrozen(group, pass_.unfrozen, factor, self._held, pass_.micro_batch)
            with changing_together(self.channel):
                self._add_members(unfrozen)
        if pass_.graphs is not None:
            pass_.graphs.restore(lambda _: self.reach())
        if self.planner is not None:
            if is_first or statuses.unfrozen:
                self.planner.restart()
            else:
                self.planner.step_ended(self.sums, has_joined=pass_.has_joined)
        self.policy.delivered(self.sums.first_used(), is_first=is_first)

    def _factor(self, statuses: StatusSum, micro_batch: MicroBatch | None) -> float:
        """Return the factor from sums to averages. Raises BackwardError on every rank if a weight is missing."""
        size, counts = self.channel.group.size(), None if micro_batch is None else micro_batch.shares.counts
        if not statuses.weighted:
            return size / self.policy.rank_count(statuses)
        if counts is None and statuses.weighted == statuses.active and statuses.weight > 0:
            return size / statuses.weight
        every = self.channel.gather(self._weights, "exchange of the weights of a step")
        if counts is not None and [*map(len, every)] == [*counts]:
            total = math.fsum(chain(*every))  # exact, so that the order does not matter
            if total > 0:
                return 1 / total
        raise weights_differ(every, counts)

    def _add_members(self, unfrozen: Sequence[_Named]) -> None:
        """Reduce these parameters like all others from now on."""
        taken = {id(parameter) for _, parameter in unfrozen}
        self._frozen = [(name, parameter) for name, parameter in self._frozen if id(parameter) not in taken]
        new = [Member(len(self.members) + at, name, parameter) for at, (name, parameter) in enumerate(unfrozen)]
        self.members += new
        for member in new:
            self._watch(member)
        self.sums.add(new)


def _finish_together(passes: Sequence[tuple[Reducer, Pass]]) -> None:
    """Finish passes that end with the same backward pass, in the same order on every rank.

    Start all transfers before the first wait. Raise the first error when all have ended.
    """
    errors: list[BaseException] = []  # Ctrl-C too
    sent = []
    for reducer, pass_ in passes:
        try:
            reducer._send(pass_)
            sent.append((reducer, pass_))
        except BaseException as error:
            errors.append(error)
    for reducer, pass_ in sent:
        try:
            reducer._finish(pass_)
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]
