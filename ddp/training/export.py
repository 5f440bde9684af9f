"""Write a model to files that do not need this package: its weights, or a program that runs without its class.

Called by `ddp.training.trainer` on the replica that writes. Every file is written completely or not at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp.checkpoint.atomic_file import replacing
from ddp.errors import ArgumentError, CheckpointError
from ddp.torch_internals import tree_leaves, tree_map_only


def weights_of(module: nn.Module) -> dict[str, Any]:
    """Return a copy of the state on the CPU, each tensor with memory of its own."""
    state = module.state_dict()
    return {
        name: each.detach().to("cpu", copy=True).contiguous() if isinstance(each, Tensor) else each
        for name, each in state.items()
    }


def write_weights(module: nn.Module, path: Path) -> None:
    weights = weights_of(module)
    _write(path, lambda file: torch.save(weights, file))


def read_weights(module: nn.Module, path: Path) -> Mapping[str, Any]:
    """Return the weights in a file. Raises CheckpointError if it cannot be read or does not fit the module."""
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a foreign file
        raise CheckpointError(f"{path.absolute()} cannot be read as weights: {error}") from error
    own = module.state_dict()
    if not isinstance(weights, Mapping) or set(weights) != set(own):
        differing = sorted(set(own) ^ set(weights)) if isinstance(weights, Mapping) else []
        hint = "it is a checkpoint: pass its ['model']" if "model" in weights else f"they differ in {differing[:3]}"
        raise CheckpointError(f"{path.absolute()} has other entries than the model: {hint}")
    for name, each in own.items():
        if isinstance(each, Tensor) and each.shape != weights[name].shape:
            shapes = f"{tuple(weights[name].shape)}, in the model {tuple(each.shape)}"
            raise CheckpointError(f"{path.absolute()}: {name} has shape {shapes}")
    return weights


def check_format(path: Path, given: str | None) -> None:
    """Raise ArgumentError unless the format, by default from the file's suffix, is that of `torch.export`."""
    if given != "export" and (given is not None or path.suffix != ".pt2"):
        raise ArgumentError(
            f"export({str(path)!r}, format={given!r}): the only format is that of torch.export; name the file .pt2, "
            "or give format='export'"
        )


def export(module: nn.Module, path: Path, example_inputs: Any) -> None:
    """Write the module in eval mode, on the CPU. The first dimension of inputs is dynamic if possible."""
    model = copy.deepcopy(module).to("cpu").eval()
    inputs: Any = example_inputs if isinstance(example_inputs, list | tuple | Mapping) else (example_inputs,)
    inputs = dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)
    inputs = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), inputs)
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if tensors and all(tensor.dim() and len(tensor) == 1 for tensor in tensors):
        # A batch of one sample would become a constant of the program.
        inputs = tree_map_only(Tensor, lambda tensor: torch.cat([tensor, tensor]), inputs)
    arguments, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    shapes = tree_map_only(Tensor, lambda tensor: {0: torch.export.Dim.AUTO} if tensor.dim() else None, inputs)
    program = torch.export.export(model, arguments, named or None, dynamic_shapes=shapes)
    _write(path, lambda file: torch.export.save(program, file))


def _write(path: Path, write: Callable[[Any], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as file:
            write(file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # a full disk: torch's C++ writer then raises another error
            raise error.__context__ from None
        raise
