"""Copy a state so that it can be written while training changes the original: to host memory, or to the memory in which
the launcher keeps a copy of the newest checkpoint (kept_copy.py).

Called by `ddp.checkpoint.writer`. One process of a host owns the launcher's memory at a time, until it ends.
"""

from __future__ import annotations

import copy
import mmap
import os
import sys
import time
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from ddp.checkpoint import kept_copy
from ddp.checkpoint.atomic_file import leave_to_parent
from ddp.checkpoint.kept_copy import Note
from ddp.comm.pinned_buffer import has_stream, recorded_event
from ddp.environment import run_of

_WAIT_S, _PAUSE_S = 60.0, 0.02  # for the file of a process that is gone
_SPARE = 0.1  # of the available memory is left
_ROUNDING_BYTES = 1 << 20
_LARGE_BYTES = 64 << 10  # from here on torch copies with several threads
_ALIGNMENT = 64  # bytes

_Copied = dict[tuple[torch.device, int, int], torch.Tensor]  # by device, address and size of the memory


class HostCopy:
    """Copies values that a checkpoint may hold (`check_plain`); the tensors of the copy are in host memory.

    `of` does not wait for a device: it copies in the order of the current stream, and `wait`, in any thread, returns
    when all copies are complete. Copies from devices use `memory`, which no earlier copy may use any more. With
    `device_types`, tensors on other devices are not copied, but returned as they are.
    """

    def __init__(self, memory: HostMemory | None = None, *, device_types: Collection[str] | None = None) -> None:
        self._memory = memory or HostMemory()
        self._memory.free()
        self._device_types = device_types
        self._events: list[torch.Event] = []

    def of(self, value: Any) -> Any:
        """Return a copy of `value`, of the same types. Tensors that share memory do so in the copy as well."""
        copied = self._from_devices(value)
        self._events += [recorded_event(device) for device in {device for device, *_ in copied}]
        return self._copy(value, copied)

    def wait(self) -> None:
        """Block until devices have finished the copies."""
        for event in self._events:
            event.synchronize()

    def _from_devices(self, value: Any) -> _Copied:
        """Start copying the memory of tensors on devices with streams; return the copies, which an event completes."""
        storages = {}
        for tensor in tensors_in(value):
            if has_stream(tensor.device) and _is_plain(tensor) and self._takes(tensor):
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    storages[_key(storage)] = storage
        taken = self._memory.take([storage.nbytes() for storage in storages.values()])
        for memory, storage in zip(taken, storages.values(), strict=True):
            memory.copy_(_bytes_of(storage), non_blocking=memory.is_pinned())
        # torch.save writes the whole memory of a tensor, which must not be that of all others.
        alone = [from_dlpack(to_dlpack(memory)) for memory in taken]
        return dict(zip(storages, alone, strict=True))

    def _takes(self, tensor: torch.Tensor) -> bool:
        return self._device_types is None or tensor.device.type in self._device_types

    def _copy(self, value: Any, copied: _Copied) -> Any:
        if isinstance(value, torch.Tensor):
            if not self._takes(value):
                return value
            result = _copied_tensor(value, copied).requires_grad_(value.requires_grad)
            return nn.Parameter(result, value.requires_grad) if isinstance(value, nn.Parameter) else result
        if isinstance(value, Mapping):
            items: Any = copy.copy(value)  # with its attributes, as the versions of modules beside a state_dict
            for key in value:
                items[key] = self._copy(value[key], copied)
            return items
        if isinstance(value, list | tuple | set) and not isinstance(value, torch.Size):
            return type(value)([self._copy(item, copied) for item in value])
        return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors of a value that a checkpoint may hold."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple | set):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _key(storage: torch.UntypedStorage) -> tuple[torch.device, int, int]:
    return storage.device, storage.data_ptr(), storage.nbytes()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copied_tensor(tensor: torch.Tensor, copied: _Copied) -> torch.Tensor:
    tensor = tensor.detach()
    if not _is_plain(tensor) or not (tensor.device.type == "cpu" or has_stream(tensor.device)):
        return tensor.to("cpu", copy=True)
    # The whole memory, once: torch.save writes it like that, and tied parameters stay tied.
    storage = tensor.untyped_storage()
    flat = copied.get(_key(storage))
    if flat is None:
        flat = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu").copy_(_bytes_of(storage))
        if storage.nbytes():
            copied[_key(storage)] = flat
    result = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return result.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class HostMemory:
    """Pinned memory for copies from devices, in few blocks that are kept for the next copy.

    The sizes of blocks are powers of two. torch's allocator rounds each request for pinned memory up to a power of two,
    and keeps freed memory: with a request for each tensor, GPT-2 (124M) with AdamW would take 1.66 times its bytes;
    with blocks it takes 1.01 times. A single tensor, or a few large ones, may still take up to twice their bytes.
    """

    def __init__(self) -> None:
        self._blocks: list[_Block] = []

    def free(self) -> None:
        """Use all memory again: earlier tensors of `take` must not be used any more."""
        for block in self._blocks:
            block.used = 0

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return pinned memory of these sizes in bytes, each (size,); ordinary memory if the system pins no more.

        The largest are placed first, each in the first block with room for it. A new block has the largest power of two
        that the rest fills.
        """
        taken = [torch.empty(0, dtype=torch.uint8, device="cpu")] * len(sizes)
        needs = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        rest, may_pin = sum(needs), True
        for at in sorted(range(len(sizes)), key=lambda at: -needs[at]):
            need = needs[at]
            block = next((block for block in self._blocks if block.used + need <= len(block.memory)), None)
            if block is None and may_pin and need:
                try:
                    block = _Block(_pinned(max(1 << (need - 1).bit_length(), 1 << (rest.bit_length() - 1))))
                    self._blocks.append(block)
                except RuntimeError:
                    may_pin = False
            if block is None:
                taken[at] = torch.empty(sizes[at], dtype=torch.uint8, device="cpu")
            else:
                taken[at] = block.memory[block.used : block.used + sizes[at]]
                block.used += need
            rest -= need
        return taken


@dataclass
class _Block:
    memory: torch.Tensor  # (bytes,)
    used: int = 0


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


class CopyMemory:
    """The launcher's memory, which holds one copy: `keep` replaces the previous one, whose file must be durable."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = 0  # of the mapped part
        self._memory = memoryview(b"")
        self._is_short = False

    @classmethod
    def of_host(cls) -> CopyMemory | None:
        """Return this process's; None if the launcher has none, or another process uses it.

        May block for 60 s, once, while the file of a process that has ended is still being written.
        """
        global _memory
        path = kept_copy.copy_path()
        if _memory is None and path is not None:
            _memory = _claimed(path)
        return _memory

    @classmethod
    def with_room(cls, content: Mapping[str, Any]) -> CopyMemory | None:
        """Return this process's if `content` fits, else None."""
        memory = cls.of_host()
        return memory if memory is not None and memory._has_room(_needed_bytes(content)) else None

    def _has_room(self, size: int) -> bool:
        """Return whether `size` bytes fit without taking nearly all available memory. If not, print that once."""
        more = size - os.fstat(self._descriptor).st_size
        available = _available_bytes()
        if more <= 0 or more <= (1 - _SPARE) * available:
            return True
        if not self._is_short:
            self._is_short = True
            print(
                f"ddp: no copy of a checkpoint outlives this process: {more / 2**30:.1f} GiB of memory more are needed "
                f"for it, and {available / 2**30:.1f} GiB are available",
                file=sys.stderr,
                flush=True,
            )
        return False

    def keep(self, step: int, path: Path, content: Mapping[str, Any]) -> Note:
        """Copy `content`, for the file at `path`, and return its note. Raises OSError if there is no memory."""
        kept_copy.note_path().unlink(missing_ok=True)
        counting = _Sink(None)
        _save(content, counting)  # reads no tensor
        self._fit(counting.length)
        _save(content, _Sink(self._memory))
        note = Note.new(path, step, run_of(os.environ)[1])
        note.put(kept_copy.note_path())
        return note

    def write_file(self, note: Note) -> None:
        """Write the copy to its file; any thread may call it. Raises OSError."""
        kept_copy.write_file(self._descriptor, note)
        note.done().put(kept_copy.note_path())

    def _fit(self, length: int) -> None:
        """Resize the memory, all of it backed by pages."""
        if length > self._size:
            self._memory, self._size = memoryview(b""), 0
            size = length + _ROUNDING_BYTES  # for longer numbers in the next copy
            os.posix_fallocate(self._descriptor, 0, size)
            self._memory = memoryview(mmap.mmap(self._descriptor, size))
            self._size = size
        else:
            os.posix_fallocate(self._descriptor, 0, length)
        os.ftruncate(self._descriptor, length)  # torch looks for the list of an archive at the end of its file


_memory: CopyMemory | None = None
_wait_s = _WAIT_S


def _needed_bytes(content: Any) -> int:
    """Return about how many bytes a copy takes."""
    tensors = [tensor for tensor in tensors_in(content) if tensor.layout is torch.strided]
    has_storage = [tensor.is_cpu or has_stream(tensor.device) for tensor in tensors]  # torch_xla's have none
    storages = [tensor.untyped_storage() for tensor, has in zip(tensors, has_storage, strict=True) if has]
    others = sum(tensor.nbytes for tensor, has in zip(tensors, has_storage, strict=True) if not has)
    return others + sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def is_on_host(content: Any) -> bool:
    """Return whether all tensors are in host memory."""
    return all(tensor.device.type == "cpu" for tensor in tensors_in(content))


def _claimed(path: Path) -> CopyMemory | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # the launcher's process has ended, or is in another container
        return None
    global _wait_s
    until = time.monotonic() + _wait_s
    while not kept_copy.lock(descriptor):
        if time.monotonic() > until:
            _wait_s = 0.0  # no later save waits again
        if not _wait_s or not kept_copy.writes_for_dead(kept_copy.find()):
            os.close(descriptor)
            return None
        time.sleep(_PAUSE_S)
    leave_to_parent(descriptor)
    return CopyMemory(descriptor)


class _Sink:
    """The memory as a file for torch's zip writer; without memory, it only counts the bytes."""

    def __init__(self, memory: memoryview | None) -> None:
        self._memory = memory
        self.length = 0

    def write(self, data: Any) -> int:
        whole = memoryview(data).cast("B")
        begin, end = self.length, self.length + len(whole)
        if self._memory is not None:
            if len(whole) < _LARGE_BYTES:
                self._memory[begin:end] = whole
            else:
                _tensor_of(self._memory[begin:end]).copy_(_tensor_of(whole))
        self.length = end
        return len(whole)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


def _tensor_of(data: memoryview) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a buffer that is not writable, which is only read
        return torch.frombuffer(data, dtype=torch.uint8)


def _save(content: Mapping[str, Any], sink: _Sink) -> None:
    """Call torch.save without checksums; `kept_copy.write_file` computes them while training continues."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(dict(content), cast("IO[bytes]", sink))
    finally:
        torch.serialization.set_crc32_options(before)


def _available_bytes() -> int:
    """Return how much memory this process can still get from the machine and its control groups."""
    found = [_fields("/proc/meminfo").get("MemAvailable", 0) << 10]
    for folder in _groups():
        for limit, usage, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            numbers = [_text(f"{folder}/{name}").strip() for name in (limit, usage)]
            if all(map(str.isdecimal, numbers)):
                found.append(int(numbers[0]) - int(numbers[1]) + _fields(f"{folder}/memory.stat").get(cache, 0))
    return max(0, min(found))


def _groups() -> Iterator[str]:
    """Yield the folders of this process's control group and of those above it, as far as they are visible here."""
    for line in _text("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names in ("", "memory"):
            root = Path(f"/sys/fs/cgroup/{names}")
            own = root / path.lstrip("/")
            yield from (str(folder) for folder in (own, *own.parents) if folder.is_relative_to(root))


def _fields(path: str) -> dict[str, int]:
    """Return the numbers of a file with a name and a number on each line."""
    lines = [line.replace(":", " ").split() for line in _text(path).splitlines()]
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdecimal()}


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:  # not there
        return ""


def _forget() -> None:
    """Leave the memory to the parent, in a forked process."""
    global _memory
    _memory = None


os.register_at_fork(after_in_child=_forget)
