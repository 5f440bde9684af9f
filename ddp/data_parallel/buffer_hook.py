"""A user's function that synchronises buffers, as `_register_buffer_comm_hook` of torch's class takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["BufferHook"]


class BufferHook:
    """Runs the function in the place of the broadcast from rank 0.

    `call(state, buffers by name)` runs before or after forward. The futures that it returns are waited for at the end
    of backward, or before it runs again.
    """

    def __init__(self, state: object, call: Callable[..., Any], location: object) -> None:
        self._state = state
        self._call = call
        # torch's enum is private, so it is known by its name; its default is after forward.
        self.is_before = getattr(location, "name", None) == "PRE_FORWARD"
        self._futures: list[torch.futures.Future[Any]] = []

    def run(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.wait()
        with torch.no_grad():
            returned = self._call(self._state, dict(named))
        if returned is not None:
            self._futures += returned if isinstance(returned, list | tuple) else [returned]

    def wait(self) -> None:
        """Wait for what the hook returned."""
        while self._futures:
            self._futures.pop().wait()
