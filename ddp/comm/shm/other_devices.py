"""Backends for tensors that a group of `shm` does not support: those on other devices, and sparse ones.

torch treats a group that is written in Python as the whole group, and makes no backend for its other devices. This
module makes them, at the first tensor of such a device, from the backend of the whole group ("cpu:shm,cuda:nccl").
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from ddp.monitoring.interrupts import is_interrupt
from ddp.torch_internals import destroy_device_group, device_group, host_group


class OtherDevices:
    """torch's own groups of the same ranks. `options` and `backend_options` are those that torch makes groups with."""

    def __init__(self, options: Any, backend_options: Any) -> None:
        self._options, self._backend_options = options, backend_options
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._types: list[torch.device] = []

    def backends(self, group: dist.ProcessGroup) -> dict[str, str]:
        """Return the backends of a group's other devices, by type; all possible ones while torch makes the group."""
        known = _backends_of(group)
        if known is None:
            known = dict(dist.Backend.default_device_backend_map)
        known.pop("cpu", None)
        return known

    def device_types(self, group: dist.ProcessGroup) -> list[torch.device]:
        """Return the device types that a group supports, the host's first; empty while torch still makes the group.

        torch 2.15 asks then: it attaches a recorder, which needs torch's own backends, unless this is empty. Once known
        they stay, also after torch has removed the group: its operations then fail with its own errors.
        """
        if not self._types and _backends_of(group) is not None:
            self._types = [*map(torch.device, ("cpu", *self.backends(group)))]
        return self._types

    def group_for(self, group: dist.ProcessGroup, device: str) -> dist.ProcessGroup:
        """Return the group for a type of device; raises RuntimeError if `group` has no backend for it."""
        if device not in self._groups:
            backend = self.backends(group).get(device)
            if backend is None:
                raise RuntimeError(
                    f"the group moves tensors in host memory (shm), but none on {device}: make it with "
                    f'"cpu:shm,{device}:BACKEND"'
                )
            self._groups[device] = device_group(self._options, device, backend, self._backend_options)
        return self._groups[device]

    def for_sparse(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return a gloo group. All ranks must call it the first time."""
        if "sparse" not in self._groups:
            store = PrefixStore("sparse", self._options.store)
            self._groups["sparse"] = host_group(group, store, self._options.timeout)
        return self._groups["sparse"]

    def close(self) -> None:
        groups, self._groups = self._groups, {}
        for made in groups.values():
            destroy_device_group(made)


def _backends_of(group: dist.ProcessGroup) -> dict[str, str] | None:
    """Return the backends with which a group was made, by type of device; None while torch still makes it."""
    try:
        config = dist.get_backend_config(group)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:  # by version of torch
        if is_interrupt(error):
            raise
        return None
    return dict(pair.split(":") for pair in config.split(","))
