"""What a node does that is not node 0: dials it, serves it with an agent, and dials again when the connection broke.

Used by the command that is typed on a node (cli/run_node.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from launcher.transport.tcp.dial import JoinError, Signals, Stopped, dial
from launcher.transport.tcp.greeting import Greeting, RunEnd
from launcher.transport.tcp.relay import Relay
from launcher.transport.tcp.rendezvous import Endpoint

__all__ = ["join"]

_SECRET = "DTRAIN_TOKEN"


def join(
    find: Endpoint | Callable[[], Endpoint | None],
    *,
    greeting: Greeting,
    agent_command: Sequence[str],
    deadline: float,
    rejoin_s: float,
    tell: Callable[[str], None],
    env: Mapping[str, str],
) -> int:
    """Take part in the run of node 0 to its end and return the exit code, 128+n when signal n told us to end.

    `find` is where node 0 listens, or says so before each attempt to reach it. `deadline` (monotonic) is for
    the first time; after a break it is dialled again for `rejoin_s`. `tell` gets lines for the terminal. Blocks; must
    be called from the main thread, for the signals. Raises JoinError.
    """
    environment = {name: value for name, value in env.items() if name != _SECRET}
    broke = ""
    with Signals() as signals:
        while True:
            try:
                joined = dial(find, greeting, deadline=deadline, signals=signals)
            except Stopped:
                return 128 + signals.stops[0]
            except JoinError as error:
                if not broke:
                    raise
                raise JoinError(f"the connection to node 0 broke ({broke}); {error}") from error
            if isinstance(joined, RunEnd):
                return _ended(joined, tell)
            host, again = joined.welcome.host, " again" if broke else ""
            tell(f"joined {host} as node rank {joined.welcome.node_rank}{again}; its terminal shows the run")
            end = Relay(joined.connection, agent_command, env=environment, signals=signals).run()
            if signals.stops:
                return 128 + signals.stops[0]
            if isinstance(end, RunEnd):
                return _ended(end, tell)
            broke = end.reason
            tell(f"the connection to node 0 ({host}) broke: {broke}; dialling again for {rejoin_s:g} s")
            deadline = time.monotonic() + rejoin_s


def _ended(run_end: RunEnd, tell: Callable[[str], None]) -> int:
    if run_end.text:
        tell(run_end.text)
    return run_end.exit_code
