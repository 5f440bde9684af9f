"""What `dtrain run --node-rank K` does on a node that is not node 0: it lends this node to the run.

Called by the command line. Dials node 0, has an agent started when node 0 wants one, carries what they say
to each other, and ends as the run ends. It decides nothing about the run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from launcher.transport.tcp.dial import JoinError, dial
from launcher.transport.tcp.greeting import Greeting, Verdict
from launcher.transport.tcp.relay import Relay
from launcher.transport.tcp.rendezvous_file import Endpoint
from launcher.transport.tcp.signals import Signals, Stopped

__all__ = ["JoinError", "join"]

_SECRET = "DTRAIN_TOKEN"


def join(
    find: Endpoint | Callable[[], Endpoint | None],
    *,
    greeting: Greeting,
    agent_command: Sequence[str],
    deadline: float,
    rejoin_s: float,
    tell: Callable[[str], None],
    env: Mapping[str, str] | None = None,
) -> int:
    """Take part in the run of node 0 to its end and return the exit code, 128+n when signal n told us to end.

    `find` is where node 0 listens, or says so before each attempt to reach it. `deadline` (monotonic) is for
    the first time; after a break it is dialled again for `rejoin_s`. `tell` gets lines for the terminal. Blocks; must
    be called from the main thread, for the signals. Raises JoinError.
    """
    environment = {name: value for name, value in (os.environ if env is None else env).items() if name != _SECRET}
    certain = isinstance(find, Endpoint)
    look: Callable[[], Endpoint | None] = (lambda: find) if isinstance(find, Endpoint) else find
    broke = ""
    with Signals() as signals:
        while True:
            try:
                joined = dial(look, greeting, certain=certain, deadline=deadline, signals=signals)
            except Stopped:
                return 128 + signals.stops[0]
            except JoinError as error:
                if not broke:
                    raise
                raise JoinError(f"the connection to node 0 broke ({broke}); {error}") from error
            if isinstance(joined, Verdict):
                return _ended(joined, tell)
            host = joined.welcome.host
            tell(_welcome(host, joined.welcome.node_rank, again=bool(broke)))
            end = Relay(joined.connection, agent_command, env=environment, signals=signals).run()
            if signals.stops:
                return 128 + signals.stops[0]
            if isinstance(end, Verdict):
                return _ended(end, tell)
            broke = end.reason
            tell(f"the connection to node 0 ({host}) broke: {broke}; dialling again for {rejoin_s:g} s")
            deadline = time.monotonic() + rejoin_s


def _welcome(host: str, node_rank: int, *, again: bool) -> str:
    return f"joined {host} as node rank {node_rank}{' again' if again else ''}; its terminal shows the run"


def _ended(verdict: Verdict, tell: Callable[[str], None]) -> int:
    if verdict.text:
        tell(verdict.text)
    return verdict.exit_code
