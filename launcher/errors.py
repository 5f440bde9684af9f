"""The launcher's errors. Only cli/main.py prints them and exits.

DtrainError                 exit code 1
├── UsageError              the command or configuration is invalid: exit code 2
│   ├── PlacementError      the workers do not fit on the hosts
│   ├── HostListError       a list of hosts is wrong, at one column (hosts/ranges.py)
│   └── NodeZeroTakenError     another command of the same run is node 0
├── HostError               one host cannot be used: name, reason, the next step
│   └── StartError          some hosts could not be made ready, all of them named (hosts/folding.py)
├── StreamError             the stream to a host broke, on any transport
├── SocketError             a folder of sockets is not private to this user, or the process of one is not usable
│   └── WarmError           a process that is kept warm cannot be used, or none can be kept
├── LaunchError             a run of launcher.launch() failed, or was stopped: its report
│   └── WorkerError         one of its workers failed: host, rank, traceback
├── RunError                a run given by its id cannot be found, or does not answer (runs/)
├── StoreError              the rendezvous store could not be opened, or was lost
├── JoinError               this node, started by hand, could not take part in the run (transport/tcp/dial.py)
└── ProtocolError           the bytes of a stream do not follow this version's protocol
    └── HandshakeError      nodes could not prove that they belong to the same run (transport/tcp/handshake.py)
"""

from __future__ import annotations

__all__ = [
    "DtrainError",
    "HostError",
    "LaunchError",
    "NodeZeroTakenError",
    "PlacementError",
    "ProtocolError",
    "RunError",
    "SocketError",
    "StoreError",
    "StreamError",
    "UsageError",
    "WarmError",
    "WorkerError",
]


class DtrainError(Exception):
    """Root of the launcher's errors; `exit_code` is the exit code of the command."""

    exit_code = 1


class UsageError(DtrainError):
    exit_code = 2


class PlacementError(UsageError):
    pass


class NodeZeroTakenError(UsageError):
    pass


class HostError(DtrainError):
    """A host cannot be used. `reason` ends with the next step if there is one."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host}: {reason}")
        self.host = host
        self.reason = reason


class StreamError(DtrainError):
    pass


class SocketError(DtrainError):
    pass


class WarmError(SocketError):
    pass


class LaunchError(DtrainError):
    """A run that a Python program had started failed, or was stopped. The message is the run's report.

    `exit_code` is that of the corresponding `dtrain run`.
    """

    def __init__(self, report: str, *, exit_code: int) -> None:
        super().__init__(report)
        self.exit_code = exit_code


class WorkerError(LaunchError):
    """A worker failed. Its own exception is `__cause__`, if it could be pickled.

    `type` is the name of its class, and `traceback` the whole text that Python printed; both are empty if the process
    was killed or ended with an exit code.
    """

    def __init__(
        self, report: str, *, exit_code: int, host: str, rank: int, type: str, message: str, traceback: str = ""
    ) -> None:
        super().__init__(report, exit_code=exit_code)
        self.host = host
        self.rank = rank
        self.type = type
        self.message = message
        self.traceback = traceback


class RunError(DtrainError):
    pass


class StoreError(DtrainError):
    pass


class ProtocolError(DtrainError):
    pass
