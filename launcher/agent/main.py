"""The agent's process: starts, watches and stops the workers of one host, and reports (agent.py).

Started by the controller as `python -m launcher.agent`, on this machine or through SSH, with the protocol's stream on
its standard input and output. Its parent is a guard: the same program, forked before anything else. When the agent
dies, whatever killed it, the guard inherits every process of the run and ends it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import NoReturn

from launcher.agent.agent import Agent
from launcher.agent.cleanup.guard import guard, read_orders
from launcher.agent.cleanup.lease import Limits
from launcher.agent.cleanup.run_tag import RunTag, mark_unless_nested
from launcher.agent.warm.folder import prefix_of
from launcher.agent.warm.surroundings import find_surroundings
from launcher.agent.workers.warm_start import Warmth
from launcher.machine import processes


def main(key: str = "", cold: str = "") -> NoReturn:
    """Run the agent, and its guard in another process. `key`: what may stay warm after the run (transport/connect.py).

    `cold` is the reason why a process that is warm already cannot be used.
    """
    surroundings = find_surroundings() if key else {}
    processes.adopt_orphans()
    processes.raise_file_limit()
    mark_unless_nested()
    run_tag, limits, parent = RunTag.new(), Limits.shared(), os.getpid()
    guarded = os.fork()
    if guarded:
        os._exit(guard(guarded, run_tag, limits))  # not sys.exit: its teardown only takes time
    _serve(parent, run_tag, limits, Warmth(prefix_of(key) if key else "", surroundings, cold=cold))


def main_forked(descriptor: int) -> NoReturn:
    """Run an agent forked from a process kept warm, with its orders in an open file. Its parent is its guard."""
    orders = read_orders(descriptor)
    limits, server = Limits.shared(orders["limits"]), socket.socket(fileno=orders["control"])
    os.close(orders["limits"])
    os.set_inheritable(orders["control"], False)
    with socket.socket(fileno=orders["asked_by"]) as asked_by:
        if not os.read(orders["may_begin"], 1):
            os._exit(1)  # it was given up meanwhile
        try:
            asked_by.send(b'{"reason": ""}')
        except OSError:  # the other end is gone
            os._exit(1)
    os.close(orders["may_begin"])
    processes.raise_file_limit()
    mark_unless_nested()
    forked = (orders["server"], server)
    warmth = Warmth(orders["prefix"], orders["surroundings"], kept=orders["kept"], forked=forked)
    _serve(orders["guard"], RunTag.new(orders["run_tag"]), limits, warmth)


def _serve(parent: int, run_tag: RunTag, limits: Limits, warmth: Warmth) -> NoReturn:
    processes.adopt_orphans()
    processes.die_with_parent(parent, signal.SIGTERM)  # without its guard it stops gracefully
    for secret in ("DTRAIN_TOKEN", "DTRAIN_RUN_KEY"):  # of joining nodes, and of another run: not for workers
        os.environ.pop(secret, None)
    status = 1
    try:
        status = Agent(run_tag, limits, warmth).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)
