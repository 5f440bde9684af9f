"""Makes callers' tensors flat and contiguous for the algorithms, and copies results back where that needed a copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp.comm.shm.collectives import Steps
from ddp.errors import ArgumentError


class Flats:
    """Flattens the tensors of one operation, and copies results back if they were written to copies.

    `in_inference` is whether torch's operations on them need inference mode, in any thread.
    """

    def __init__(self) -> None:
        self.in_inference = False
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` as (n,), contiguous, in the same memory where possible. Hidden from autograd."""
        if tensor.dim() == 1 and tensor.is_contiguous() and not _is_special(tensor):
            return tensor
        return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)

    def write(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = self.read(tensor)
        self.in_inference |= flat.is_inference()
        if flat is not tensor and flat.data_ptr() != tensor.data_ptr():
            self._copied.append((tensor.detach(), flat))
        return flat

    def write_parts(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        return _parts(self.write(tensor), sizes)

    def read_parts(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        return _parts(self.read(tensor), sizes)

    def then_back(self, steps: Steps) -> Steps:
        """Return `steps`, followed by the copies."""
        return self._then_back(steps) if self._copied else steps

    def _then_back(self, steps: Steps) -> Steps:
        yield from steps
        self.bring_back()

    def bring_back(self) -> None:
        with torch.inference_mode(self.in_inference):
            for tensor, flat in self._copied:
                tensor.copy_(flat.view(tensor.shape))


def _is_special(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad or tensor.is_conj() or tensor.is_neg()


def _parts(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    if sum(sizes) != flat.numel():
        raise ArgumentError(f"parts of {', '.join(map(str, sizes))} elements do not make a tensor of {flat.numel()}")
    return [*torch.split(flat, [*sizes])]
