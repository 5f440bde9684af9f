"""The launcher's errors. Only cli/main.py prints them and exits.

DtrainError                 exit code 1
├── UsageError              what was typed or configured cannot be run: exit code 2
│   ├── PlacementError      the workers do not fit on the hosts
│   ├── HostListError       a list of hosts is wrong, at one column (hosts/ranges.py)
│   └── NodeZeroTakenError     another command of the same run is node 0
├── HostError               one host cannot be used: name, reason, the next step
│   └── StartError          some hosts could not be made ready, all of them named (hosts/folding.py)
├── StreamError             the stream to a host broke, whatever carried it
├── SocketError             a folder of sockets is not this user's alone, or the process behind one is not usable
│   └── WarmError           a process that is kept warm cannot be used, or none can be kept
├── LaunchError             a run of launcher.launch() failed, or was stopped: its report
│   └── WorkerError         one of its workers failed: host, rank, traceback
├── RunError                a run that is named by its id cannot be found, or not be asked (runs/)
├── StoreError              the rendezvous store could not be opened, or was lost
├── JoinError               this node, started by hand, could not take part in the run (transport/tcp/dial.py)
└── ProtocolError           the bytes of a stream are not this version's protocol
    └── HandshakeError      nodes did not prove to each other that they belong together (transport/tcp/handshake.py)
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
    """Root of the launcher's errors; `exit_code` is what the command ends with."""

    exit_code = 1


class UsageError(DtrainError):
    exit_code = 2


class PlacementError(UsageError):
    pass


class NodeZeroTakenError(UsageError):
    pass


class HostError(DtrainError):
    """One host cannot be used. `reason` ends with the next step where there is one."""

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
    """A run failed, or was stopped, that a Python program had started. The message is the run's report.

    `exit_code` is what `dtrain run` would have ended with.
    """

    def __init__(self, report: str, *, exit_code: int) -> None:
        super().__init__(report)
        self.exit_code = exit_code


class WorkerError(LaunchError):
    """A worker failed. Its own exception is `__cause__`, if that could travel.

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
