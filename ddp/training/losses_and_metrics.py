"""A trainer's view of a batch: its parts, and losses and metrics as sums and counts that add up exactly.

Called by `ddp.training.trainer`, which adds up the totals of several replicas, unless they are `StepTotals`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.comm.objects import gather_values
from ddp.errors import ArgumentError
from ddp.torch_internals import tree_leaves, tree_map_only, version_of

Metric = Callable[[Any, Any], Any]

_PARTS = {1: "(inputs,)", 2: "(inputs, targets)", 3: "(inputs, targets, sample weights)"}


@dataclass(frozen=True)
class Share:
    """This replica's samples of a global batch.

    `count` is their number. It is 0 if the batch has fewer samples than there are replicas: then `inputs` and `targets`
    are a stand-in, because many models cannot run on an empty batch, and results on it do not count.
    """

    inputs: Any
    targets: Any
    weights: Tensor | None  # (count,)
    count: int

    @property
    def labels(self) -> Any:
        """The targets without the stand-in."""
        return self.targets[: self.count] if isinstance(self.targets, Tensor) else self.targets


@dataclass(frozen=True)
class PartOfStep:
    """A batch, and its part of an optimizer step."""

    batch: Any
    size: int  # of the global batch
    weight: float  # its share of the samples of the step
    ends_step: bool = True


def parts_of_steps(loader: Any, accumulate: int) -> Iterator[PartOfStep]:
    """Yield the rest of the loader's epoch, `accumulate` batches per step, fewer in the last step."""
    state, size = loader.state_dict(), loader.global_batch_size
    place, done, total = state["position"], 0, 0
    for batch in loader:
        before, place = place, loader.state_dict()["position"]
        left = state["length"] - place  # samples after this batch
        left -= left % size if loader.drop_last else 0
        own = min(size, place - before)
        if done == 0:
            total = own + min(left, (accumulate - 1) * size)
        done += 1
        ends_step = done == accumulate or left <= 0
        yield PartOfStep(batch, own, own / total, ends_step)
        done = 0 if ends_step else done


def read_share(batch: Any, device: torch.device, stand_in: Callable[[], Any] | None) -> Share:
    """Split a batch into its parts: a tensor, (x,), (x, y), (x, y, weights), or a dict, both inputs and targets.

    Raises ArgumentError for anything else, and for a batch without samples if there is no `stand_in`.
    """
    count = _count(batch)
    if not count:
        if stand_in is None:
            raise ArgumentError("a micro-batch has no samples: let collate_fn keep one at least")
        batch = stand_in()
    inputs, targets, weights = _parts(on_device(batch, device))
    return Share(inputs, targets, None if weights is None else weights[:count], count)


def targets_of(batch: Any) -> Any:
    """Return the targets of a batch, on its device. Raises ArgumentError as `read_share` does."""
    return _parts(batch)[1]


def _parts(batch: Any) -> tuple[Any, Any, Any]:
    """Return inputs, targets and weights."""
    if isinstance(batch, Mapping):
        return batch, batch, batch.get("sample_weight")
    if isinstance(batch, Tensor):
        return batch, None, None
    if isinstance(batch, list | tuple) and len(batch) in _PARTS:
        inputs, targets, weights = (*batch, None, None)[:3]
        return inputs, targets, weights
    what = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, list | tuple) else type(batch).__name__
    raise ArgumentError(
        f"a batch is a {what}: fit() accepts {', '.join(_PARTS.values())} and dicts; let the data set return one of "
        "them, or write a train_step() of your own"
    )


def _count(batch: Any) -> int:
    for leaf in batch if type(batch) is list and isinstance(batch[0], Tensor) else tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    raise ArgumentError(f"a batch without tensors of samples: {type(batch).__name__}")


def called(model: nn.Module, inputs: Any, names: Iterable[str]) -> Any:
    """Run a model on a list of inputs as arguments, or on the entries of a dict in `names` (the dict if none are)."""
    if isinstance(inputs, Mapping):
        known = {name: inputs[name] for name in names if name in inputs}
        return model(**known) if known else model(inputs)
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)


def on_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply `function` to each tensor in `value`; with a fast path for a single tensor and plain lists."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(on_tensors(function, item) for item in value)
    return tree_map_only(Tensor, function, value)


def on_device(value: Any, device: torch.device) -> Any:
    return on_tensors(lambda tensor: tensor.to(device, non_blocking=True), value)


class Loss:
    """A user's loss function, per sample or the mean, as losses that can be added up.

    `function(outputs, targets)` returns (samples, ...) or one number, which counts as the mean over the samples. The
    mean of torch's CrossEntropyLoss and NLLLoss over class numbers is different: over the labels that are not
    `ignore_index`, by their class weights. Their losses are returned as a sum, and `weight` returns its divisor. Raises
    ArgumentError for reduction="sum".
    """

    def __init__(self, function: Callable[[Any, Any], Tensor]) -> None:
        if not callable(function):
            raise ArgumentError(f"loss={function!r}: it must be a function of (outputs, targets), or a torch.nn loss")
        if getattr(function, "reduction", None) == "sum":
            raise ArgumentError(f'{function}: reduction="sum" depends on the size of the batch; use "mean" or "none"')
        self._function = function
        self._summed: Any = None
        if _is_over_labels(function):
            self._summed = copy.copy(function)
            self._summed.reduction = "sum"
        self._class_weights: dict[torch.device, tuple[Tensor, int, Tensor]] = {}

    @property
    def has_class_weights(self) -> bool:
        return self._summed is not None and self._summed.weight is not None

    def weight(self, targets: Any) -> Tensor | None:
        """Return () float64, the sum of the weights of the labels that count, or None for a mean over the samples.

        `targets` are class numbers (samples, ...), perhaps of 0 samples; the sum is computed on their device.
        """
        if not self._is_sum(targets):
            return None
        counts: Tensor = targets.long() != self._summed.ignore_index  # -100 is 156 in uint8
        if not self.has_class_weights:
            return counts.sum().double()
        weights = self._class_weights_on(targets.device).take(torch.where(counts, targets, 0).long())
        return torch.where(counts, weights, 0.0).sum()

    def _is_sum(self, targets: Any) -> bool:
        """Return whether the losses of these targets are a sum: for class numbers, not for probabilities."""
        return self._summed is not None and isinstance(targets, Tensor) and not targets.is_floating_point()

    def _class_weights_on(self, device: torch.device) -> Tensor:
        """Return the class weights (classes,) in float64, copied to the device once, since the copy synchronises."""
        own: Tensor = self._summed.weight
        given, version, found = self._class_weights.get(device, (own, -1, own))
        if given is not own or version != version_of(own):
            found = own.detach().to(device, torch.float64)
            self._class_weights[device] = own, version_of(own), found
        return found

    def __call__(self, outputs: Any, share: Share) -> Tensor:
        """Return (count,) losses, or their sum () if `weight` is its divisor.

        For a share without samples, they are empty or 0, and still part of the graph of the outputs.
        """
        is_sum = self._is_sum(share.targets)
        value = (self._summed if is_sum else self._function)(outputs, share.targets)
        if not isinstance(value, Tensor):
            raise ArgumentError(f"the loss is a {type(value).__name__}; it must be a tensor")
        count = share.count or _count(share.inputs)
        if value.dim() == 0:
            if share.weights is not None:
                raise ArgumentError(
                    "the batches have sample weights, but the loss is a single number: let it return a loss for each "
                    'sample (reduction="none" in torch.nn)'
                )
            value = value.expand(count)
        if len(value) != count:
            raise ArgumentError(f"the loss has shape {tuple(value.shape)} for {count} samples: it must begin with them")
        losses = value.flatten(1).mean(1) if value.dim() > 1 else value
        losses = wide(losses)[: share.count]
        return losses[:1].sum() if is_sum else losses


def _is_over_labels(function: Any) -> bool:
    """Return whether it is one of torch's means over labels, itself: a subclass may compute anything."""
    if not isinstance(function, nn.NLLLoss | nn.CrossEntropyLoss) or function.reduction != "mean":
        return False
    return type(function).forward in (nn.NLLLoss.forward, nn.CrossEntropyLoss.forward)


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor, with half precision converted to single."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _alike(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in one shape: a last dimension of 1 that only one of them has is removed.

    Raises ArgumentError for other shapes that differ, which would be broadcast.
    """
    one, other = outputs, targets
    if one.dim() == other.dim() + 1 and one.shape[-1] == 1:
        one = one.squeeze(-1)
    elif other.dim() == one.dim() + 1 and other.shape[-1] == 1:
        other = other.squeeze(-1)
    if one.shape != other.shape:
        raise ArgumentError(
            f"a metric compares values of shape {tuple(outputs.shape)} from the outputs with targets of shape "
            f"{tuple(targets.shape)}: give a function of (outputs, targets) instead of its name"
        )
    return one, other


def _accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compare classes in dimension 1 with class numbers or one-hot rows; without classes, binary logits."""
    if outputs.dim() == 1 or outputs.shape[1] == 1:
        found, expected = _alike((outputs > 0).flatten(), (targets > 0.5).flatten())
    else:
        found, expected = _alike(outputs.argmax(1), _numbers(outputs, targets))
    return found == expected


def _top5(outputs: Tensor, targets: Tensor) -> Tensor:
    best = outputs.topk(5, dim=1).indices
    first, expected = _alike(best[:, 0], _numbers(outputs, targets))
    return (best.reshape(len(best), 5, *first.shape[1:]) == expected.unsqueeze(1)).any(1)


def _numbers(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the class numbers of one-hot rows; other targets as they are."""
    return targets.argmax(1) if targets.shape == outputs.shape else targets


def _difference(outputs: Tensor, targets: Tensor) -> Tensor:
    found, expected = _alike(outputs, targets)
    return found - expected


_NAMED: dict[str, Metric] = {
    "accuracy": _accuracy,
    "top5_accuracy": _top5,
    "mean_absolute_error": lambda outputs, targets: _difference(outputs, targets).abs(),
    "mean_squared_error": lambda outputs, targets: _difference(outputs, targets).square(),
}


def metrics_of(given: Iterable[str | Metric] | Mapping[str, str | Metric]) -> dict[str, Metric]:
    """Return metrics by name. Raises ArgumentError for one that does not exist or has no name."""
    if isinstance(given, str):
        raise ArgumentError(f"metrics={given!r}: give a list of them, [{given!r}]")
    pairs = given.items() if isinstance(given, Mapping) else ((None, metric) for metric in given)
    found: dict[str, Metric] = {}
    for name, metric in pairs:
        if isinstance(metric, str) and metric not in _NAMED:
            raise ArgumentError(
                f"there is no metric {metric!r}; there are {', '.join(map(repr, _NAMED))}, or a function"
            )
        function = _NAMED[metric] if isinstance(metric, str) else metric
        own = metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)
        name = name or own
        if not callable(function) or name == "<lambda>" or name == "loss" or name in found:
            raise ArgumentError(
                f"metrics: {name!r} is not a function, has no name, or occurs twice: give a dict of names "
                "and functions of (outputs, targets)"
            )
        found[name] = function
    return found


def _sums(name: str, metric: Metric, outputs: Any, share: Share) -> tuple[Any, Any]:
    """Return (sum, count) of a metric on a share: its own pair, or computed from values (samples, ...) or a mean."""
    value = metric(outputs, share.targets)
    if isinstance(value, tuple):
        return value
    if not isinstance(value, Tensor) or value.dim() == 0:
        if share.weights is not None:
            raise ArgumentError(f"metric {name!r} gives one number, but batches have weights: give one for each sample")
        return value * share.count, share.count
    if len(value) != share.count:
        raise ArgumentError(f"metric {name!r} has shape {tuple(value.shape)} for {share.count} samples")
    values = value.double().flatten(1).mean(1) if value.dim() > 1 else value.double()
    if share.weights is None:
        return values.sum(), share.count
    weights = share.weights.double()
    return (values * weights).sum(), weights.sum()


class Totals:
    """Sums and counts by name, in float64, on the device of the computation: reading them waits for it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._of: dict[str, list[Any]] = {name: [0.0, 0.0] for name in names}

    def add(self, name: str, total: Any, count: Any) -> None:
        for place, amount in enumerate((total, count)):
            if isinstance(amount, Tensor):
                amount = amount.detach().double()
            self._of.setdefault(name, [0.0, 0.0])[place] += amount

    def add_metrics(self, metrics: Mapping[str, Metric], outputs: Any, share: Share) -> None:
        if share.count:
            for name, metric in metrics.items():
                self.add(name, *_sums(name, metric, outputs, share))

    def numbers(self) -> dict[str, list[float]]:
        return {name: [float(total), float(count)] for name, (total, count) in self._of.items()}

    def set(self, numbers: Mapping[str, list[float]]) -> None:
        self._of = {name: list(pair) for name, pair in numbers.items()}

    def share(self, count: float, replicas: int) -> float:
        """Return what each replica adds of a count that all replicas have in common."""
        return count / replicas

    def to_add_up(self, replica: int) -> dict[str, list[float]]:
        """Return the numbers whose sum over the replicas is that of all."""
        return self.numbers()

    def spread(self, place: int, count: int) -> dict[str, list[list[float]]]:
        """Return the numbers in lists of `count`, at index `place`: their sum over replicas has each one's numbers."""
        return {
            name: [[number if each == place else 0.0 for each in range(count)] for number in pair]
            for name, pair in self.numbers().items()
        }

    def load(self, spread: Mapping[str, Any], place: int, count: int) -> None:
        """Load this replica's numbers; if the number of replicas was different, all of them on the first."""

        def own(numbers: list[float]) -> float:
            if len(numbers) == count:
                return numbers[place]
            return math.fsum(numbers) if place == 0 else 0.0

        self._of = {name: [own(numbers) for numbers in pair] for name, pair in spread.items()}


class StepTotals(Totals):
    """The totals of all replicas, with the same bits on any number of them: for steps of `ddp.StepLoader`.

    Those of each micro-batch are kept apart, until `end_step` adds them to the epoch's.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self._parts: list[Totals] = []

    def share(self, count: float, replicas: int) -> float:
        return count

    def to_add_up(self, replica: int) -> dict[str, list[float]]:
        return self.numbers() if replica == 0 else {name: [0.0, 0.0] for name in self._of}

    def set(self, numbers: Mapping[str, list[float]]) -> None:
        super().set(numbers)
        self._parts = []  # of a step that failed

    def spread(self, place: int, count: int) -> dict[str, list[list[float]]]:
        return {name: [[number] for number in pair] for name, pair in self.to_add_up(place).items()}

    def load(self, spread: Mapping[str, Any], place: int, count: int) -> None:
        super().load(spread, 0, 1)

    def begin_micro_batch(self) -> None:
        self._parts.append(Totals(self._of))

    def add(self, name: str, total: Any, count: Any) -> None:
        (self._parts[-1].add if self._parts else super().add)(name, total, count)

    def end_step(self) -> None:
        """Add the exact totals of the step, rounded once. Every replica must call it; blocks."""
        mine = [part.numbers() for part in self._parts]
        self._parts = []
        every = gather_values(mine) if dist.is_available() and dist.is_initialized() else [mine]
        of_step = [part for parts in every for part in parts]
        for name in {name: None for part in of_step for name in part}:
            pairs = [part[name] for part in of_step if name in part]
            self.add(name, math.fsum(total for total, _ in pairs), math.fsum(count for _, count in pairs))


def means(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {name: total / count if count else float("nan") for name, (total, count) in numbers.items()}
