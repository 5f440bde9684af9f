"""Read and write the folders of torch.distributed.checkpoint (DCP), without unpickling anything that could run code.

torch's own reader unpickles whatever a folder holds. This one accepts only DCP's classes in the description
(`.metadata`), and only values that `torch.load(weights_only=True)` accepts. Called by `ddp.checkpoint.convert`.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ddp.errors import CheckpointError
from ddp.torch_internals import DCP_CLASSES

_METADATA = ".metadata"


@dataclass(frozen=True)
class Refused:
    """Replaces a value that would have to be unpickled."""

    reason: str


def write_folder(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `state`, nested dicts and lists, as this process alone. Raises CheckpointError if the folder has files."""
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty: choose another folder")
    try:
        with _alone():
            save(dict(state), storage_writer=FileSystemWriter(folder), no_dist=True)
    except (CheckpointException, ValueError, OSError) as error:
        raise CheckpointError(f"could not write {folder}: {error}") from error


def read_folder(folder: Path) -> dict[tuple[str | int, ...], Any]:
    """Return all values by their path in the nested dicts and lists that were saved, whole tensors in host memory.

    Values that cannot be read safely are `Refused`. Raises CheckpointError if the folder cannot be read.
    """
    metadata = _read_metadata(folder)
    try:
        values: dict[str, Any] = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            if isinstance(entry, TensorStorageMetadata)
            else None
            for key, entry in metadata.state_dict_metadata.items()
        }
        with _alone():
            load(values, storage_reader=_Reader(folder, metadata), planner=_Planner(), no_dist=True)
        paths = metadata.planner_data or {}
        return {tuple(paths.get(key, (key,))): value for key, value in values.items()}
    except (Exception, CheckpointException) as error:  # its fields may have any type and value
        raise CheckpointError(f"could not read {folder}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Suppress torch's warning that there is only this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _read_metadata(folder: Path) -> Metadata:
    try:
        with open(folder / _METADATA, "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise CheckpointError("it does not describe a checkpoint of torch.distributed.checkpoint")
        for place in metadata.storage_data.values():
            if PurePath(place.relative_path).is_absolute() or ".." in PurePath(place.relative_path).parts:
                raise CheckpointError(f"it names {place.relative_path}, which is outside of the folder")
    except Exception as error:  # a changed pickle may raise anything
        raise CheckpointError(f"{folder / _METADATA}: {error}") from error
    return metadata


class _Unpickler(pickle.Unpickler):
    """Makes objects of the classes of DCP's description, dtypes, sizes and paths only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in DCP_CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module.partition(".")[0] == "pathlib":
            return PurePath
        raise pickle.UnpicklingError(f"it has a {module}.{name}, which is no part of DCP's format")


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            loaded = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            loaded = Refused(str(error).strip().splitlines()[0])
        self.state_dict[read_item.dest_index.fqn] = loaded
