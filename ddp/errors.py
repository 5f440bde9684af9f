"""Every error that `ddp` raises on purpose.

```
DdpError(RuntimeError)
├── LaunchEnvironmentError   the environment of this process does not describe a world
├── RendezvousError          the ranks could not meet
├── NotInitializedError      something needs the process group before `ddp.init()`
├── ArgumentError            a wrong argument (also a ValueError)
├── UnsupportedError         torch's DDP can do it, this module cannot (also a NotImplementedError)
│   └── MissingNameError     Horovod has this name, ddp.horovod has not (also an AttributeError)
├── LayoutMismatchError      the ranks wrap different modules
├── BackwardError            a backward pass that cannot be reduced exactly
├── PeerFailedError          another rank's forward, backward or callback raised an exception in this step
├── DriftError               the replicas' weights are no longer equal
├── NonFiniteError           an optimizer was about to step with gradients that are infinite or no numbers
├── ReplacementError         a replaced rank, or those that it left behind, cannot go on where it was
├── CheckpointError          a checkpoint could not be written, found whole, or fitted to what is restored from it
├── ParameterServerError     a parameter server is gone, too slow, or cannot serve this process
│   ├── KeyRefusedError      the two ends do not share the run's key
│   └── VersionMismatchError the two ends run different versions of this package
└── CollectiveError          a collective failed: a rank is gone, or too slow
```

The root is a RuntimeError because that is what torch raises in these places, so that handlers written for
torch still work.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BackwardError",
    "CheckpointError",
    "CollectiveError",
    "DdpError",
    "DriftError",
    "KeyRefusedError",
    "LaunchEnvironmentError",
    "LayoutMismatchError",
    "MissingNameError",
    "NonFiniteError",
    "NotInitializedError",
    "ParameterServerError",
    "PeerFailedError",
    "RendezvousError",
    "ReplacementError",
    "UnsupportedError",
    "VersionMismatchError",
]


class DdpError(RuntimeError):
    """Any error that `ddp` raises on purpose.

    `failed_ranks` is None for what went wrong on this rank. Else this error is no more than the consequence of what
    happened on others: these ranks of the world, none where that is not known.
    """

    failed_ranks: tuple[int, ...] | None = None


class LaunchEnvironmentError(DdpError):
    """Variables such as RANK and WORLD_SIZE are missing, malformed or contradict each other."""


class RendezvousError(DdpError):
    """The ranks could not meet at the store, or the backend could not connect them."""


class NotInitializedError(DdpError):
    """There is no process group yet: `ddp.init()` comes first."""


class ArgumentError(DdpError, ValueError):
    """An argument has a value that cannot be meant."""


class UnsupportedError(DdpError, NotImplementedError):
    """A feature of torch's DDP that this version does not have; nothing was done silently instead."""


class MissingNameError(UnsupportedError, AttributeError):
    """A name of Horovod's module that `ddp.horovod` does not have; the message says what to use instead."""


class LayoutMismatchError(DdpError):
    """The ranks hold different parameters, buffers or settings.

    `rank` is the first rank of the group that differs from rank 0, and `entry` names what differs first.
    """

    def __init__(self, message: str, *, rank: int, entry: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.entry = entry


class BackwardError(DdpError):
    """A backward pass that cannot be reduced exactly, with the name of the parameter where there is one."""

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class PeerFailedError(DdpError):
    """Other ranks failed in this step, so nothing was averaged: `failures` has what each said, by rank of the group."""

    def __init__(self, message: str, *, failures: dict[int, str], failed_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures
        self.failed_ranks = failed_ranks


class DriftError(DdpError):
    """The replicas differ: `parameter` is the first that does, before `step`, and `ranks` hold another value.

    `step` is 0 where no backward pass found it.
    """

    def __init__(self, message: str, *, parameter: str, step: int, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.step = step
        self.ranks = ranks


class NonFiniteError(DdpError):
    """An optimizer was about to step with gradients that are not finite; `ranks` of the group had them, in `step`.

    Raised on every rank, before the weights change, under `dtrain run --on-nonfinite stop`.
    """

    def __init__(
        self, message: str, *, step: int, ranks: tuple[int, ...], failed_ranks: tuple[int, ...] | None
    ) -> None:
        super().__init__(message)
        self.step = step
        self.ranks = ranks
        self.failed_ranks = failed_ranks


class ReplacementError(DdpError):
    """What `ddp.resilient` cannot do for a rank that was replaced, or for the others: all have to start again."""


class CheckpointError(DdpError):
    """A checkpoint could not be written, is not whole, or does not fit what should be restored from it."""


class ParameterServerError(DdpError):
    """A parameter server is gone, too slow, or cannot serve this process."""


class KeyRefusedError(ParameterServerError):
    """The two ends do not share the key that the launcher made for the run."""


class VersionMismatchError(ParameterServerError):
    """The two ends run different versions of this package, so what one says may mean something else to the other."""


class CollectiveError(DdpError):
    """A collective failed. `rank` is the rank that saw it, `what` the collective that failed."""

    def __init__(self, message: str, *, rank: int, what: str, failed_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.what = what
        self.failed_ranks = failed_ranks
