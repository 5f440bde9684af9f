"""Finds by experiment why training alone and distributed differ: repeat with a treatment, and see what is left.

Called by `verify`, on every rank with the same experiment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddp.torch_internals import AnyBatchNorm
from ddp.verification.experiment import Comparison, Experiment, RunResult, Treatment, drops

__all__ = ["find_reasons"]

_NAMED = 3


def find_reasons(experiment: Experiment, first: Comparison) -> tuple[str, ...]:
    """Say why the runs of `first` differ, with evidence. Every rank must call it; blocks."""
    plain = Treatment()
    alone = experiment.alone(plain)
    if noise := experiment.error_between(alone, experiment.alone(plain)):
        return (
            f"the model or the loss is not deterministic: two runs alone with the same seeds differ by {_e(noise)}, so "
            f"nothing else can be found (alone and distributed differ by {_e(first.largest_error)}); draw from "
            "generators that torch.manual_seed() seeds, and see torch.use_deterministic_algorithms()",
        )
    if reason := _by_rank(experiment, alone):
        return (reason,)
    if not first.differences:
        return (
            "only the loss differs, the gradients agree: a part of it that has no gradient is not the mean of what the "
            "ranks have",
        )
    steps = _applicable(experiment)
    full = Treatment()
    for _, step in steps:
        full = replace(full, **step)
    left = experiment.compare(full)
    if left.differences:
        return _unexplained(experiment, full, steps, left)
    needed: list[str] = []
    for name, step in steps:
        without = replace(full, **{key: getattr(plain, key) for key in step})
        change = experiment.compare(without)
        if change.differences:
            evidence = f"largest relative error {_e(change.largest_error)}, so treated {_e(left.largest_error)}"
            needed.append(f"{_text(experiment, name, full)} [{evidence}]")
        else:
            full = without
    return tuple(needed)


def _by_rank(experiment: Experiment, alone: RunResult) -> str | None:
    losses = experiment.gather(alone.loss)
    for rank, loss in enumerate(losses):
        if not abs(loss - losses[0]) <= experiment.tolerance * max(abs(loss), abs(losses[0])):
            return (
                f"the model or the loss depends on the rank: with the same weights, batch and seeds, the loss is "
                f"{loss:.6g} on rank {rank} and {losses[0]:.6g} on rank 0, each of the whole batch, alone"
            )
    return None


def _applicable(experiment: Experiment) -> list[tuple[str, dict[str, Any]]]:
    """The treatments that this model gives reason to try, by name."""
    modules = list(experiment.model.modules())
    steps: list[tuple[str, dict[str, Any]]] = []
    if any(drops(module) and module.training for module in modules):
        steps.append(("dropout", {"without_dropout": True}))
    if any(isinstance(module, AnyBatchNorm) and (module.training or module.running_mean is None) for module in modules):
        steps.append(("batch norm", {"norms_in_eval": True}))
    so_far = Treatment(without_dropout=True, norms_in_eval=True)
    if experiment.error_between(experiment.alone(so_far), experiment.alone(so_far, other_seed=True)):
        steps.append(("random numbers", {"others_in_eval": True}))
        so_far = replace(so_far, others_in_eval=True)
    weights = experiment.fitting_weights(so_far)
    equal = 1 / experiment.world_size
    if weights is not None and any(abs(w - equal) > _slack(experiment) for w in weights):
        steps.append(("weights", {"weights": weights}))
    return steps


def _slack(experiment: Experiment) -> float:
    """How far a fitted weight may be from the number that is meant."""
    return min(0.05, 1e3 * experiment.tolerance) / experiment.world_size


def _text(experiment: Experiment, name: str, treatment: Treatment) -> str:
    modules = list(experiment.model.named_modules())
    if name == "dropout":
        found = _names([n for n, m in modules if drops(m) and m.training])
        return (
            f"dropout ({found}): every process draws other elements to drop; with p=0 the difference is gone. This is "
            "meant so; only make sure that ranks do not all draw the same (another seed on each rank)"
        )
    if name == "batch norm":
        found = _names([n for n, m in modules if isinstance(m, AnyBatchNorm)])
        return (
            f"batch norm ({found}): it normalises with the statistics of a rank's own shard; with fixed statistics the "
            "difference is gone. Accept it if shards are large enough, or use nn.SyncBatchNorm.convert_sync_batchnorm "
            "(on GPUs), or a norm that does not look at other samples (GroupNorm, LayerNorm)"
        )
    if name == "random numbers":
        return (
            "random numbers that are drawn while the model trains, outside of dropout modules: another seed changes "
            "the result alone, and in eval mode the difference is gone. This is meant so if they regularise"
        )
    assert treatment.weights is not None
    return _text_of_weights(experiment, treatment.weights)


def _text_of_weights(experiment: Experiment, weights: Sequence[float]) -> str:
    world, slack = experiment.world_size, _slack(experiment)
    if all(abs(w - weights[0]) <= slack for w in weights):
        if abs(weights[0] - 1) <= slack * world:
            return (
                f"the loss is a sum over the samples: the distributed gradient, an average over ranks, is 1/{world} of "
                f"that alone in every parameter. Use a mean, or multiply the loss by {world} on every rank (or the "
                "learning rate, with plain SGD)"
            )
        return (
            f"a constant factor: the distributed gradient is {1 / (world * weights[0]):.6g} times that alone in every "
            "parameter, so the loss is no mean over the samples; multiply it by "
            f"{world * weights[0]:.6g} on every rank"
        )
    factors = ", ".join(f"{world * w:.4g}" for w in weights[:8]) + (", ..." if world > 8 else "")
    if abs(sum(weights) - 1) <= slack * world:
        shares = ", ".join(f"{w:.4g}" for w in weights[:8]) + (", ..." if world > 8 else "")
        return (
            "the loss is a mean over something of which ranks have different numbers (tokens that are not masked?): "
            f"their shares are {shares}, but each rank counts the same. Multiply each rank's loss by its number over "
            f"the average number of a rank (here {factors})"
        )
    return (
        f"the ranks' losses must be multiplied by {factors} for their average to be the loss alone: it is neither a "
        "mean nor a sum over the samples"
    )


def _unexplained(
    experiment: Experiment, full: Treatment, steps: Sequence[tuple[str, Mapping[str, Any]]], left: Comparison
) -> tuple[str, ...]:
    """Explain a difference that treatments leave: does it matter which samples a batch has, and where?"""
    model_only = replace(full, weights=None)
    alone = experiment.alone(model_only)
    tried = f" (with {', '.join(name for name, _ in steps)} treated)" if steps else ""
    if error := experiment.error_between(alone, experiment.alone(model_only, other_seed=True)):
        return (
            f"random numbers are drawn, in eval mode too: alone, another seed changes the gradient by {_e(error)}"
            f"{tried}; alone and distributed differ by {_e(left.largest_error)}",
        )
    if error := experiment.error_between(alone, experiment.alone(model_only, permuted=True)):
        return (
            "data order: the loss depends on the place of a sample in its batch, and a shard has other places than the "
            f"whole batch: alone, the batch in reverse order changes the gradient by {_e(error)}{tried}",
        )
    interleaved = experiment.distributed(replace(model_only, interleaved=True))
    if error := experiment.error_between(experiment.distributed(model_only), interleaved):
        return (
            "data order: the loss of a sample depends on the others in its batch (in-batch negatives, statistics of "
            "the batch), and a shard has fewer of them: alone the order of the samples does not matter, but "
            f"distributed, dealing them out in turn instead of in blocks changes the gradient by {_e(error)}{tried}",
        )
    reasons = []
    if odd := sorted(set(left.unused_alone) ^ set(left.unused_distributed)):
        reasons.append(
            f"parameters are used in one case only ({_names(odd)}): what the model does depends on the batch's size"
        )
    reasons.append(
        f"no treatment explains it: the largest relative error is {_e(left.largest_error)}{tried}. The model is "
        "deterministic, and neither the order of the samples nor a weight of each rank accounts for it; something "
        "that depends on the batch's size is a candidate (a sum beside a mean or a penalty, pieces of the batch)"
    )
    return tuple(reasons)


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMED])
    more = len(names) - _NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def _e(error: float) -> str:
    return f"{error:.1e}" if error else "0"
