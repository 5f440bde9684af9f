"""A training loop for any strategy: fit, evaluate, predict, save.

    trainer = ddp.Trainer(model, optimizer, nn.CrossEntropyLoss(), metrics=["accuracy"], callbacks=[...])
    history = trainer.fit(train, epochs=12, validation=test, global_batch_size=64)

`fit`, `_fit_epoch`, `_train` and `train_step` are the whole loop, top down. It only uses the public interface of
`ddp.strategy`, so you can switch to a loop of your own: the model, the optimizer and the files stay the same.
Computations on a batch are in `losses_and_metrics`, everything else in `callbacks`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddp import rng
from ddp.callbacks.callback import Callback, CallbackList, Training
from ddp.callbacks.reports import History
from ddp.data.metrics import gather_samples
from ddp.errors import ArgumentError, DdpError
from ddp.monitoring import timeline
from ddp.monitoring.interrupts import is_interrupt
from ddp.monitoring.progress import EVALUATION, SAVE, phase
from ddp.resilience.loop import is_replacement, resilient
from ddp.resilience.state import State
from ddp.strategies.strategy import Strategy
from ddp.strategies.strategy import strategy as make_strategy
from ddp.torch_internals import tree_map
from ddp.training import export as files
from ddp.training.fit_state import state_of
from ddp.training.loader_steps import LoaderSteps, steps_of
from ddp.training.losses_and_metrics import (
    Loss,
    Metric,
    PartOfStep,
    Share,
    Totals,
    called,
    means,
    metrics_of,
    on_device,
    on_tensors,
    read_share,
    wide,
)
from ddp.training.optimizer_step import average_gradients, needs_average, scaled_rates
from ddp.training.weighted_means import WeightedMeans

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Trainer(Training):
    """Train `model` with `optimizer` on `loss`, under a strategy or its name (default: `ddp.strategy()`).

    Every process must create it with equal arguments; it blocks until all have (`strategy.prepare`). `model` is the
    user's module, still available as `trainer.module`; the loop uses `trainer.model` and `trainer.optimizer`.

    - A batch is `(x, y)`, `(x, y, sample weights)`, `(x,)`, or a dict. `x` may be a list of inputs. From a dict, the
      model gets the entries that match argument names of its `forward`, or the whole dict if none do; `loss` and
      metrics get the model's outputs and the dict, whose "sample_weight" counts as weights.
    - `loss(outputs, targets)` returns the losses of the samples, or their mean, as torch's losses do. Gradients are
      those of the mean over the global batch, however unequal the replicas' shares are. Weights multiply the losses,
      and do not change the divisor. torch's CrossEntropyLoss and NLLLoss for class numbers are means over the labels
      that are not `ignore_index`, by class weight; so are the gradients of a step, and the loss of an evaluation. (The
      mean is over one replica's labels if it steps by itself: "local_sgd", and parameter servers that do not wait for
      all. Those that do refuse such labels, in the worker that has some.) Any other function that returns one number
      counts as a mean over the samples.
    - `metrics`: names ("accuracy", ...), functions (outputs, targets), or a dict of them, that return values of the
      samples (averaged by weight), (sum, count), or their mean. Sums over all replicas are exact.
    - `precision` "bfloat16" or "float16": forward and loss under autocast; the latter with a GradScaler.
    - `accumulate`: batches per step of the optimizer; the gradient is that of the mean over all of their samples. For a
      `ddp.StepLoader`: micro-batches of a step, if it has no `micro_batch_size`.
    - `max_grad_norm`: clip the averaged gradients to this norm.
    - `log_every`: steps between two exchanges of the logs of steps. Replicas without a process group do not exchange
      them, and have their own.
    - `seed`: of the order of the data, and, if given, of each replica's random numbers (dropout) in `fit`.
    - `resilient`: the first `fit` of a script continues after one of its processes has failed, as described in
      `ddp.resilient`: under `dtrain run`, on the CPU, with "all_reduce". Elsewhere, and with anything that
      `ddp.resilient` refuses, a failure ends the attempt; so does a lost host, and with `--grow` a new one, since the
      rest of an epoch can only be dealt to as many ranks as before. `ddp.callbacks.Callback` describes the effect on
      callbacks.

    Override `train_step` for a loss that needs more than outputs and targets. It may call the inherited one, once per
    batch, and add a term to the result.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any], Tensor],
        *,
        strategy: Strategy | str | None = None,
        metrics: Iterable[str | Metric] | Mapping[str, str | Metric] = (),
        callbacks: Sequence[Callback] = (),
        precision: Literal["float32", "bfloat16", "float16"] = "float32",
        accumulate: int = 1,
        max_grad_norm: float | None = None,
        log_every: int = 10,
        seed: int | None = None,
        resilient: bool = True,
    ) -> None:
        if precision not in _DTYPES:
            raise ArgumentError(f"precision={precision!r}; it must be one of {', '.join(map(repr, _DTYPES))}")
        if accumulate < 1 or log_every < 1:
            raise ArgumentError(f"accumulate={accumulate}, log_every={log_every}; both must be 1 or more")
        self.loss, self.metrics = Loss(loss), metrics_of(metrics)
        self.strategy = strategy if isinstance(strategy, Strategy) else make_strategy(strategy)
        self.accumulate, self.max_grad_norm, self.log_every, self.seed = accumulate, max_grad_norm, log_every, seed
        self.module, self.device = model, self.strategy.world.device
        self._averages_first = needs_average(self.strategy, precision, max_grad_norm)
        self.weighted = WeightedMeans(self.strategy, self.loss)
        self.model, self.optimizer = self.strategy.prepare(model, optimizer)
        if isinstance(loss, nn.Module):
            loss.to(self.device)
        self._names = list(inspect.signature(model.forward).parameters)
        self._dtype = _DTYPES[precision]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "float16")
        self.history = History()
        self.callbacks = CallbackList([self.history, *callbacks], self)
        self.learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.logs = {}
        self.totals = Totals(["loss", *self.metrics])
        self.asks_to_stop = self.is_stopped = False  # this replica; all of them
        self._resilient = resilient
        self._state: State | None = None  # in a fit that survives failures
        self._train_steps: LoaderSteps  # of the present fit, or the last one
        self.is_ending_step = False  # the optimizer has stepped, and callbacks have not seen it
        self._joins = False  # this fit begins amid those of the others, whose next exchange is that of an epoch's end

    def fit(
        self,
        train: Any,
        *,
        epochs: int,
        validation: Any = None,
        global_batch_size: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> History:
        """Train until `epochs` epochs are done, counted from the start of the training; return their logs.

        `train` and `validation` are map-style data sets, read in global batches of `global_batch_size` (default 32),
        `train` in a new order each epoch; or loaders of the strategy. With "all_reduce" on the CPU, they may be
        `ddp.StepLoader`s: weights, logs and evaluations then have the same bits on any number of replicas, and a data
        set in `validation` is read in micro-batches of the size of those of `train`.

        A second call, or a run that a ModelCheckpoint resumes, trains the remaining epochs. `steps_per_epoch` ends
        epochs earlier. Every replica must call it; blocks. An evaluator evaluates `validation` until the training ends.

        Raises what the model, the data or the loss raise; DdpError on all replicas if a callback raises.
        """
        if self.strategy.role == "evaluator":
            return self._follow(validation, global_batch_size)
        steps = self._steps_of(train, global_batch_size, shuffle=True)
        loader = steps.loader
        if global_batch_size not in (None, loader.global_batch_size):
            raise ArgumentError(
                f"global_batch_size={global_batch_size}, but the loader has {loader.global_batch_size}: leave it out"
            )
        held_out = None if validation is None else self._steps_of(validation, global_batch_size, like=steps).loader
        self._train_steps, self.train_loader = steps, loader
        self.epochs, self.steps_per_epoch = epochs, steps_per_epoch
        if type(self.totals) is not steps.totals:
            self.totals = self._new_totals(steps)
        if self.seed is not None and not self.step:
            rng.seed_torch(self.seed + steps.random_stream)
        self.asks_to_stop = self.is_stopped = self.is_ending_step = False
        self._state = state_of(self, loader) if self._resilient else None
        with self.callbacks.closing() as closes:
            if self._state is None or not is_replacement():
                self.callbacks.call("on_restore")
            if self.strategy.goes_on:
                epoch, epoch_step = steps.catch_up(self.steps)
                self.epoch = max(self.epoch, epoch)
                if not self.step:  # else this is another fit of the same process
                    self.step, self.epoch_step = self.strategy.joined_at, epoch_step
                    self._joins = True
            closes.pop_all()  # by what follows

        def run(_: State | None) -> None:
            self.epochs, self.steps_per_epoch = epochs, steps_per_epoch
            self._fit(steps, held_out)

        if self._state is None:
            run(None)
        else:
            resilient(run)(self._state)
            self._state = None
        return self.history

    def _fit(self, steps: LoaderSteps, validation: Any) -> None:
        with self.callbacks.closing():
            self.callbacks.call("on_fit_begin")
            if not self._joins:
                self._exchange()
            self._joins = False
            while self.epoch < self.epochs and not self.is_stopped:
                self._fit_epoch(steps, validation)
            self.callbacks.call("on_fit_end")
            self._exchange()

    def _fit_epoch(self, steps: LoaderSteps, validation: Any) -> None:
        epoch = self.epoch
        self.callbacks.call("on_epoch_begin", epoch)
        if self.is_ending_step:
            self._end_step()
        if not (self.epoch_step and steps.loader.epoch > epoch):  # else its last step was made before a restart
            steps.loader.set_epoch(epoch)
            self._train(steps)
        logs = {**self._exchange(), "learning_rate": self.learning_rate}
        self.strategy.sync()
        if validation is not None:
            logs |= {f"val_{name}": value for name, value in self.evaluate(validation).items()}
        self.epoch, self.epoch_step, self.logs = epoch + 1, 0, {}
        self.totals = self._new_totals(steps)
        self.callbacks.call("on_epoch_end", epoch, logs)
        if self._state is not None:
            self._state.commits.sending()
        self._exchange()
        if self._state is not None:
            self._state.commit()

    def _follow(self, validation: Any, global_batch_size: int | None) -> History:
        """Evaluate each new state of the parameters until the training ends. Only called on an evaluator."""
        if validation is None:
            raise ArgumentError("this process is an evaluator, but fit() has no validation data for it to evaluate")
        held_out = self._steps_of(validation, global_batch_size).loader
        with self.callbacks.closing():
            self.callbacks.call("on_fit_begin")
            for step in self.strategy.evaluations():
                self.step = step
                self.evaluate(held_out)
            self.callbacks.call("on_fit_end")
        return self.history

    def _train(self, steps: LoaderSteps) -> None:
        self.model.train()
        if self._is_over():
            return
        for step in steps.rest_of_epoch(self.totals):
            self.weighted.begin_step(steps.loader.global_batch_size / steps.shares)
            self.callbacks.call("on_step_begin", self.step)
            for part in step:
                self._backward(part)
            self._step_optimizer()
            if self._is_over():
                return

    def _step_optimizer(self) -> None:
        self._optimize()
        self.step, self.epoch_step = self.step + 1, self.epoch_step + 1
        self.is_ending_step = True
        if self._state is not None:
            self._state.commit()
        self._end_step()

    def _end_step(self) -> None:
        if self.epoch_step == 1 or self.step % self.log_every == 0:
            self.logs = self._exchange(together=self.strategy.collective)
        self.callbacks.call("on_step_end", self.step, self.logs)
        self.is_ending_step = False

    def train_step(self, batch: Any) -> Tensor:
        """Return this replica's part of the loss of a global batch, for backward, as `strategy.mean` does.

        Called under autocast, with this replica's part of the batch from the loader, perhaps empty, on its device. An
        override may also `record` metrics. If the loss is a mean over labels, this method returns the mean over this
        replica's labels, and records their number.
        """
        share, outputs = self._forward(batch, self._train_steps)
        losses = self.loss(outputs, share)
        self.totals.add_metrics(self.metrics, on_tensors(Tensor.detach, outputs), share)
        return self.weighted.mean(losses, share, batch)

    def _backward(self, part: PartOfStep) -> None:
        # Gradients are reduced with the last batch of a step.
        no_sync = contextlib.nullcontext if part.ends_step else getattr(self.model, "no_sync", contextlib.nullcontext)
        timeline.forward()
        with no_sync():
            batch = on_device(part.batch, self.device)
            self.weighted.begin_batch(part.batch, batch)
            with self._autocast(), self.weighted.followed():
                loss = self.train_step(batch)
            if loss.numel() != 1:
                raise ArgumentError(
                    f"train_step() returned a loss of shape {tuple(loss.shape)}: return strategy.mean() of it, or one "
                    "number"
                )
            if self.model is self.module:
                timeline.follow((loss,))
            weight = self.weighted.of_batch
            if weight is None:
                gradient = self.scaler.scale(torch.full_like(loss, part.weight))
                loss.backward(gradient)
                size = self.totals.share(part.size, self.strategy.replicas)
                self.record("loss", self.weighted.whole(loss, gradient) * size, size)
            else:
                self.record("loss", loss.detach().double() * weight, weight)
                self.weighted.backward(self.model, self.scaler.scale(loss), ends_step=part.ends_step)

    def _optimize(self) -> None:
        if self._averages_first:
            average_gradients(self.strategy, self.module)
        if self.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.module.parameters(), self.max_grad_norm)
        with scaled_rates(self.optimizer, self.rate_factor):
            self.learning_rate = float(self.optimizer.param_groups[0]["lr"])
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def record(self, name: str, total: Any, count: Any) -> None:
        """Add to a mean in the logs of this epoch. Every replica must use the same names."""
        self.totals.add(name, total, count)

    def stop(self) -> None:
        """End the training on all replicas, at the end of this epoch or at the next exchange of logs."""
        self.asks_to_stop = True

    @property
    def steps(self) -> int:
        """Number of steps of a whole epoch."""
        steps = max(1, len(self._train_steps))
        return min(steps, self.steps_per_epoch or steps)

    @property
    def shares(self) -> int:
        """Number of parts of a step that have a mean loss each: replicas, or micro-batches of a `ddp.StepLoader`."""
        return self._train_steps.shares

    @phase(EVALUATION)
    @torch.no_grad()
    def evaluate(self, data: Any, *, global_batch_size: int | None = None) -> dict[str, float]:
        """Return the loss and the metrics over all samples, each counted once; the same on every replica.

        `data` is a map-style data set or a loader. Every replica must call it; blocks.
        """
        steps = self._steps_of(data, global_batch_size)
        if steps.loader.drop_last:
            raise ArgumentError("evaluate() counts every sample, but this loader leaves some out: drop_last=False")
        self.strategy.sync()
        self.callbacks.call("on_evaluate_begin")
        totals = self._new_totals(steps)
        with self._evaluating():
            for batch in steps.evaluation(totals):
                with self._autocast():
                    share, outputs = self._forward(batch, steps)
                    losses, weight = self.loss(outputs, share), self.loss.weight(share.labels)
                weighted = losses if share.weights is None else losses * share.weights
                totals.add("loss", weighted.double().sum(), share.count if weight is None else weight)
                totals.add_metrics(self.metrics, outputs, share)
        logs = means(self.strategy.reduce("sum", totals.to_add_up(self.strategy.replica)))
        self.callbacks.call("on_evaluate_end", logs)
        self._exchange()
        return logs

    @phase(EVALUATION)
    @torch.no_grad()
    def predict(self, data: Any, *, global_batch_size: int | None = None) -> Any:
        """Return the outputs for all samples on the CPU, in the order of the data set, on every replica.

        Tensors (samples, ...), in the same tuples or dicts as the model's output. Targets in a batch are not used.
        Every replica must call it; blocks.
        """
        steps = self._steps_of(data, global_batch_size)
        batches = steps.in_order()
        self.strategy.sync()
        parts = []
        with self._evaluating():
            for part in batches:
                with self._autocast():
                    share, outputs = self._forward(part.batch, steps)
                gather = functools.partial(self._gather, count=share.count, size=part.size)
                parts.append(on_tensors(gather, outputs))
        if not parts:
            raise ArgumentError("predict() got no samples")
        return tree_map(lambda *rows: torch.cat(rows), *parts)

    def _gather(self, rows: Tensor, *, count: int, size: int) -> Tensor:
        """Gather the rows of all replicas for one global batch, in its order. This replica has the first `count`."""
        rows = rows[:count]
        if self.strategy.replicas == 1:  # also of several processes
            return rows.cpu()
        if self.strategy.collective:
            return gather_samples(rows).cpu()
        whole = torch.zeros(size, *rows.shape[1:], dtype=rows.dtype, device="cpu")
        whole[self.strategy.replica :: self.strategy.replicas] = rows.cpu()
        gathered: Tensor = self.strategy.reduce("sum", whole)
        return gathered

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the model's state on the CPU. Call `strategy.sync()` on every replica before."""
        return files.weights_of(self.module)

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Load weights into the model. Every replica must call it, with the same weights."""
        self.module.load_state_dict(weights)
        self.strategy.publish()

    @phase(SAVE)
    def save(self, path: str | PathLike[str]) -> None:
        """Write the model's `state_dict`, readable by plain PyTorch, from the main replica, completely or not at all.

        Every replica must call it; blocks until the file is there. Raises DdpError on all if it cannot be written.
        """
        self.strategy.sync()
        self._on_main(f"save {path}", lambda: files.write_weights(self.module, Path(path)))

    def load(self, path: str | PathLike[str]) -> None:
        """Load a file of `save`, or a `state_dict` of plain PyTorch, into the model. Every replica must call it.

        Raises CheckpointError if the file cannot be read or is of another model.
        """
        self.load_weights(files.read_weights(self.module, Path(path)))

    def export(
        self, path: str | PathLike[str], example_inputs: Any, *, format: Literal["export"] | None = None
    ) -> None:
        """Write the model as a program of `torch.export` (.pt2), which runs without its class.

        `example_inputs` is a tensor (samples, ...), a tuple of them, or a dict by argument. The size of batches may
        differ later. The model is exported in eval mode, on the CPU, from the main replica. Every replica must call it;
        blocks. Raises DdpError on all if it fails.
        """
        files.check_format(Path(path), format)
        self.strategy.sync()
        self._on_main(f"export {path}", lambda: files.export(self.module, Path(path), example_inputs))

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the training and the callbacks' states, in numbers, tensors, lists and dicts.

        Every replica must call it at the same step, if they have a process group.
        """
        together = self.strategy.collective
        totals = self.totals.spread(*((self.strategy.replica, self.strategy.replicas) if together else (0, 1)))
        return {
            "epoch": self.epoch,
            "step": self.step,
            "epoch_step": self.epoch_step,
            "learning_rate": self.learning_rate,
            "stopping": self.asks_to_stop or self.is_stopped,
            "logs": dict(self.logs),
            "totals": self.strategy.reduce("sum", totals) if together else totals,
            "weight_unit": self.weighted.unit,
            "callbacks": self.callbacks.states(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the point of `state_dict`, in a world of any size. Every replica must call it."""
        self.epoch, self.step, self.epoch_step = state["epoch"], state["step"], state["epoch_step"]
        self.learning_rate = state["learning_rate"]
        self.asks_to_stop, self.logs = state["stopping"], dict(state["logs"])
        self.totals.load(state["totals"], self.strategy.replica, self.strategy.replicas)
        self.weighted.load(state.get("weight_unit", 0.0))  # older files have none
        self.callbacks.load_states(state["callbacks"])

    def _exchange(self, *, together: bool = True) -> dict[str, float]:
        """Return the means so far, agree on stopping, and raise what a callback of any replica raised.

        Every replica must call it, unless not `together`.
        """
        mine = {
            "totals": self.totals.to_add_up(self.strategy.replica),
            "asks_to_stop": self.asks_to_stop,
            "weight": self.weighted.of_step,
            "failed": self.callbacks.has_failed,
        }
        totals: Any = self.strategy.reduce("sum", mine) if together else mine
        if together:
            self.is_stopped = bool(totals["asks_to_stop"])
            if totals["weight"]:
                self.weighted.settle(totals["weight"] / self.shares)
        if totals["failed"]:
            self.callbacks.raise_failure(together=together)
        return means(totals["totals"])

    def _on_main(self, what: str, action: Callable[[], None]) -> None:
        """Run `action` on the main replica; raise DdpError on all if it fails."""
        problem: Exception | None = None
        if self.strategy.is_main:
            try:
                action()
            except Exception as error:  # torch may raise anything, and the other replicas must not wait
                if is_interrupt(error):
                    raise
                problem = error
        failed = problem is not None
        if self.strategy.collective:
            failed = bool(self.strategy.reduce("max", failed))
        if failed:
            reason = "see the output of replica 0" if problem is None else f"{type(problem).__name__}: {problem}"
            together = DdpError(f"could not {what}: {reason}")
            if problem is None:
                together.failed_ranks = ()
            raise together from problem

    def _new_totals(self, steps: LoaderSteps) -> Totals:
        return steps.totals(["loss", *self.metrics])

    def _steps_of(self, data: Any, global_batch_size: int | None, **kind: Any) -> LoaderSteps:
        return steps_of(data, self.strategy, self.accumulate, global_batch_size, seed=self.seed or 0, **kind)

    def _forward(self, batch: Any, steps: LoaderSteps) -> tuple[Share, Any]:
        """Return this replica's share of a batch, and the model's outputs for it, in single precision at least."""
        share = read_share(batch, self.device, steps.stand_in)
        return share, on_tensors(wide, called(self.model, share.inputs, self._names))

    def _autocast(self) -> torch.autocast:
        is_on = self._dtype is not torch.float32
        return torch.autocast(self.device.type, dtype=self._dtype if is_on else None, enabled=is_on)

    def _is_over(self) -> bool:
        """Return whether this epoch must end before its data does."""
        return self.is_stopped or (self.steps_per_epoch is not None and self.epoch_step >= self.steps_per_epoch)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.module.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)
