"""Where training stands in a data set: what a sampler and a loader save, for any number of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ddp.errors import ArgumentError

__all__ = ["Position"]


@dataclass(frozen=True)
class Position:
    """`position` samples of an epoch are done, in the order that the other fields decide."""

    epoch: int
    position: int
    length: int
    shuffle: bool
    seed: int
    order: str  # the algorithm of the permutation

    def state_dict(self) -> dict[str, int | bool | str]:
        """Return plain values for a checkpoint."""
        return asdict(self)

    def going_on(self, state: Mapping[str, int | bool | str], what: str) -> tuple[int, int]:
        """Return the epoch and the position of a saved state, at most `length`.

        Raises ArgumentError, which names `what` was saved, if its samples stand in another order than here.
        """
        for name in ("length", "shuffle", "seed", "order"):
            saved, mine = state.get(name, "torch"), getattr(self, name)  # older states had torch's order, unsaid
            if saved != mine:
                raise ArgumentError(
                    f"the {what} was saved with {name} {saved} and now has {mine}: "
                    f"sample {state['position']} of epoch {state['epoch']} is another one here"
                )
        return int(state["epoch"]), min(int(state["position"]), self.length)
