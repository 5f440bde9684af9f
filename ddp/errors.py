"""Every error that `ddp` raises on purpose.

```
DdpError(RuntimeError)
├── LaunchEnvironmentError   the environment of this process does not describe a world
├── RendezvousError          the ranks could not meet
├── NotInitializedError      a call needs the process group, before `ddp.init()`
├── ArgumentError            a wrong argument (also a ValueError)
├── UnsupportedError         torch's DDP can do it, this module cannot (also a NotImplementedError)
│   └── MissingNameError     Horovod has this name, ddp.horovod does not (also an AttributeError)
├── LayoutMismatchError      the ranks wrap different modules
├── BackwardError            a backward pass that cannot be reduced exactly
├── PeerFailedError          another rank's forward, backward or callback raised an exception in this step
├── DriftError               the replicas' weights are no longer equal
├── NonFiniteError           an optimizer was about to step with gradients that are infinite or NaN
├── ReplacementError         a replaced rank, or the others, cannot continue where it was
├── CheckpointError          a checkpoint could not be written, is not whole, or does not fit
├── ParameterServerError     a parameter server is gone, too slow, or cannot serve this process
│   ├── KeyRefusedError      the two ends do not share the run's key
│   └── VersionMismatchError the two ends run different versions of this package
└── CollectiveError          a collective failed: a rank is gone, or too slow
```

The root is a RuntimeError because torch raises that in these places, so handlers written for torch still work.
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

    `failed_ranks` is None if the cause is on this rank. Else this error is only a consequence of failures on these
    ranks of the world; empty if they are unknown.
    """

    failed_ranks: tuple[int, ...] | None = None


class LaunchEnvironmentError(DdpError):
    """Variables such as RANK and WORLD_SIZE are missing, malformed or contradict each other."""


class RendezvousError(DdpError):
    """The ranks could not meet at the store, or the backend could not connect them."""


class NotInitializedError(DdpError):
    """There is no process group yet: `ddp.init()` comes first."""


class ArgumentError(DdpError, ValueError):
    """An argument has an invalid value."""


class UnsupportedError(DdpError, NotImplementedError):
    """This version lacks a feature of torch's DDP; nothing was done silently instead."""


class MissingNameError(UnsupportedError, AttributeError):
    """A name of Horovod's module is missing in `ddp.horovod`; the message says what to use instead."""


class LayoutMismatchError(DdpError):
    """The ranks hold different parameters, buffers or settings.

    `rank` is the first rank of the group that differs from rank 0, and `entry` names what differs first.
    """

    def __init__(self, message: str, *, rank: int, entry: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.entry = entry


class BackwardError(DdpError):
    """A backward pass cannot be reduced exactly; `parameter` is the parameter's name if there is one."""

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class PeerFailedError(DdpError):
    """Other ranks failed in this step, so nothing was averaged: `failures` has their messages, by rank of the group."""

    def __init__(self, message: str, *, failures: dict[int, str], failed_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures
        self.failed_ranks = failed_ranks


class DriftError(DdpError):
    """The replicas differ: `parameter` is the first that does, before `step`, and `ranks` hold another value.

    `step` is 0 if it was not found by a backward pass.
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
    """A replaced rank, or the others, cannot continue in `ddp.resilient`: all ranks must start again."""


class CheckpointError(DdpError):
    """A checkpoint could not be written, is not whole, or does not fit the objects to restore."""


class ParameterServerError(DdpError):
    """A parameter server is gone, too slow, or cannot serve this process."""


class KeyRefusedError(ParameterServerError):
    """The two ends do not share the key that the launcher made for the run."""


class VersionMismatchError(ParameterServerError):
    """The two ends run different versions of this package, so messages may differ in meaning."""


class CollectiveError(DdpError):
    """A collective failed. `rank` is the rank that saw it, `what` the collective that failed."""

    def __init__(self, message: str, *, rank: int, what: str, failed_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.what = what
        self.failed_ranks = failed_ranks
