"""Convert checkpoints of `ddp.Checkpoint` to folders of torch.distributed.checkpoint (DCP), and back.

    python -m ddp.checkpoint.convert runs/first/checkpoints/step-0000000100.pt dcp/100
    python -m ddp.checkpoint.convert dcp/100 runs/second/checkpoints
    python -m ddp.checkpoint.convert fsdp/100 runs/third/checkpoints --step 100 --part model=app.model

One process converts, with the whole state in its memory. It unpickles only what `weights_only` allows.
"""

from __future__ import annotations

import argparse
import copy
import io
import sys
import warnings
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp.checkpoint import file as checkpoint_file
from ddp.checkpoint.dcp import Refused, read_folder, write_folder
from ddp.checkpoint.state import PARTS, check_plain
from ddp.errors import ArgumentError, CheckpointError, DdpError

__all__ = ["from_dcp", "to_dcp"]

_FORM = "ddp_checkpoint"  # key of what DCP does not keep: types of keys and containers, and empty ones

KeyPath = tuple[str | int, ...]


def to_dcp(path: str | PathLike[str], folder: str | PathLike[str]) -> None:
    """Write the checkpoint file at `path` as a DCP folder, which must be empty or missing.

    Its keys are those of the file: `dcp.load({"model": model.state_dict()}, checkpoint_id=folder)` reads the model,
    into shards as well, and "optimizer" is the `optimizer.state_dict()`, with parameters by number. Tensors that share
    memory are written one by one. Raises CheckpointError if the file is not complete, or the folder cannot be written.
    """
    try:
        with open(path, "rb") as file:
            checkpoint_file.verify(file)
            content = checkpoint_file.read(file)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{Path(path).absolute()}: {error}") from error
    form = io.BytesIO()
    torch.save(_map_tensors(content, lambda _, tensor: _without_values(tensor)), form)
    write_folder(Path(folder), {**content, _FORM: form.getvalue()})


def from_dcp(
    folder: str | PathLike[str],
    checkpoints: str | PathLike[str],
    *,
    step: int | None = None,
    parts: Mapping[str, str] | None = None,
) -> Path:
    """Write a DCP folder as a file in the folder `checkpoints`, for `ddp.Checkpoint.load`; return its path.

    A folder of `to_dcp` becomes the same file again, or that of another `step`. For another program's folder, `parts`
    gives the key of each of "model", "optimizer", "scheduler", "scaler" and "sampler": "app.model" for a nested one, ""
    for everything; by default their own names, and "optim" for the optimizer. An optimizer's state by parameter names
    (`get_optimizer_state_dict`) becomes one by numbers. All else becomes values of the checkpoint, and `load` leaves
    the random number generators unchanged. `step` is required if the folder has none.

    Raises CheckpointError if the folder cannot be read without unpickling, or lacks a part; ArgumentError for unknown
    `parts`, and for an invalid step.
    """
    if step is not None and not _is_step(step):
        raise ArgumentError(f"step is {step!r}; it must be an int, 0 or more")
    found = read_folder(Path(folder))
    form = found.pop((_FORM,), None)
    if isinstance(form, bytes) and parts is None:
        content = _ours(found, form, folder)
        content["step"] = content.get("step") if step is None else step
    else:
        try:
            content = _foreign(found, step, parts)
        except (DdpError, Warning):
            raise
        except Exception as error:  # another program may have written anything
            raise CheckpointError(
                f"{folder} holds what cannot be converted: {type(error).__name__}: {error}"
            ) from error
    if not _is_step(content["step"]):
        raise CheckpointError(f"{folder} says that its step is {content['step']!r}: give step=, an int, 0 or more")
    check_plain(content)
    try:
        return checkpoint_file.write(Path(checkpoints), content["step"], content)
    except OSError as error:
        raise CheckpointError(f"could not write step {content['step']} to {checkpoints}: {error}") from error


def _is_step(step: object) -> bool:
    return type(step) is int and 0 <= step < 1 << 64  # as the file holds it


# Folders of to_dcp


def _ours(found: Mapping[KeyPath, Any], form: bytes, folder: str | PathLike[str]) -> dict[str, Any]:
    def as_before(path: KeyPath, tensor: torch.Tensor) -> torch.Tensor:
        if path not in found:
            raise CheckpointError(f"{folder} has no {'.'.join(map(str, path))} any more")
        return _as_before(found[path], tensor)

    try:
        return dict(_map_tensors(torch.load(io.BytesIO(form), weights_only=True), as_before))
    except DdpError:
        raise
    except Exception as error:  # changed bytes may raise anything
        raise CheckpointError(f"{folder} is damaged: {type(error).__name__}: {error}") from error


def _map_tensors(value: Any, change: Callable[[KeyPath, torch.Tensor], Any], path: KeyPath = ()) -> Any:
    """Return `value` with changed tensors, as far as DCP keeps them one by one: in dicts and lists.

    Paths are those of DCP, with strings as keys.
    """
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, dict):
        changed = copy.copy(value)  # with its attributes
        for key, item in value.items():
            changed[key] = _map_tensors(item, change, (*path, str(key)))
        return changed
    if isinstance(value, list):
        return [_map_tensors(item, change, (*path, index)) for index, item in enumerate(value)]
    return value


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return _as_before(torch.empty_like(tensor, device="meta"), tensor)


def _as_before(values: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    if isinstance(before, nn.Parameter):
        return nn.Parameter(values, before.requires_grad)
    return values.requires_grad_(before.requires_grad)


# Folders of other programs


def _foreign(found: Mapping[KeyPath, Any], step: int | None, parts: Mapping[str, str] | None) -> dict[str, Any]:
    if parts is None:
        names = {path[0] for path in found}
        places = {name: name for name in PARTS if name in names}
        if "optimizer" not in names and "optim" in names:
            places["optimizer"] = "optim"
    else:
        places = dict(parts)
    if wrong := [name for name in places if name not in PARTS]:
        raise ArgumentError(f"there is no part {wrong[0]!r}: parts are {', '.join(PARTS)}")
    content: dict[str, Any] = {}
    rest = dict(found)
    for name, place in sorted(places.items(), key=lambda item: -len(item[1])):  # "" takes what the others leave
        prefix = tuple(place.split(".")) if place else ()
        mine = {path[len(prefix) :]: path for path in rest if path[: len(prefix)] == prefix and len(path) > len(prefix)}
        if not mine:
            raise CheckpointError(f"there is no {place or name!r}, but {_names(found)}")
        content[name] = _nested({short: _safe(path, rest.pop(path)) for short, path in mine.items()})
    if not content:
        raise CheckpointError(f"none of its keys is a part; say which with parts=: there are {_names(found)}")
    if "optimizer" in content:
        content["optimizer"] = _by_number(content["optimizer"])
    its_step = rest.pop(("step",), None)
    if step is None:
        if its_step is None:
            raise CheckpointError("it does not say which step it is from: give step=")
        step = int(its_step)
    for path in [path for path, value in rest.items() if isinstance(value, Refused)]:
        warnings.warn(f"{'.'.join(map(str, path))} is left out: {rest.pop(path).reason}", stacklevel=3)
    in_order = {name: content[name] for name in PARTS if name in content}
    return {"step": step, "world_size": 0, **in_order, "random": [], "values": _nested(rest)}


def _safe(path: KeyPath, value: Any) -> Any:
    if isinstance(value, Refused):
        raise CheckpointError(f"{'.'.join(map(str, path))} would have to be unpickled: {value.reason}")
    return value


def _names(found: Mapping[KeyPath, Any]) -> str:
    return ", ".join(sorted({str(path[0]) for path in found})) or "nothing"


def _nested(items: Mapping[KeyPath, Any]) -> Any:
    tree: dict[Any, Any] = {}
    for path, value in items.items():
        at = tree
        for name in path[:-1]:
            at = at.setdefault(name, {})
        at[path[-1]] = value
    return _with_lists(tree)


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    whole = {name: _with_lists(item) for name, item in tree.items()}
    return [whole[at] for at in sorted(whole)] if whole and all(isinstance(name, int) for name in whole) else whole


def _by_number(state: Any) -> dict[str, Any]:
    """Return an optimizer's state with parameters by number; they may have numbers or names."""
    if not isinstance(state, dict) or not isinstance(state.get("param_groups"), list):
        raise CheckpointError("the optimizer's state has no list param_groups")
    numbers = {
        str(name): at for at, name in enumerate(name for group in state["param_groups"] for name in group["params"])
    }
    by_name = state.get("state", {})
    if unknown := [name for name in by_name if str(name) not in numbers]:
        raise CheckpointError(f"the optimizer's state has {unknown[0]!r}, which is in none of its param_groups")
    groups = [{**group, "params": [numbers[str(name)] for name in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {numbers[str(name)]: each for name, each in by_name.items()}, "param_groups": groups}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ddp.checkpoint.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="a checkpoint file of ddp.Checkpoint, or a DCP folder")
    parser.add_argument("target", type=Path, help="the DCP folder to make, or a folder of checkpoints")
    parser.add_argument("--step", type=int, help="of a DCP folder that has none")
    parser.add_argument(
        "--part", action="append", metavar="NAME=KEY", help="where in a DCP folder the model, optimizer and so on are"
    )
    given = parser.parse_args(arguments)
    try:
        if given.source.is_dir():
            for part in given.part or ():
                if "=" not in part:
                    raise ArgumentError(f"--part {part}: write NAME=KEY, as model=app.model; {part}= is all there is")
            parts = None if given.part is None else dict(part.partition("=")[::2] for part in given.part)
            print(from_dcp(given.source, given.target, step=given.step, parts=parts))
        else:
            to_dcp(given.source, given.target)
            print(given.target)
    except DdpError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
