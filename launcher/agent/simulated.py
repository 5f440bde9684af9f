"""Starts the agents of simulated hosts, all on this machine: forks them, with their imports already done.

Started by the controller (transport/simulated.py) as `python -m launcher.agent --simulated SCRIPT`. Its standard input
is a socket: a message with three descriptors, an agent's standard streams, starts an agent; one without kills it. The
answer is its number and exit status, once it has ended. Such an agent equals one of `python -m launcher.agent`, except
that it starts faster. This process ends when the other end of the socket is closed and no agent is left.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket

from launcher.agent.cleanup.guard import reap
from launcher.agent.main import main as run_agent
from launcher.agent.warm.handover import hand_over
from launcher.machine import oom  # noqa: F401  # else each agent would import it for its first worker

MESSAGE_BYTES = 64


def serve(script: str) -> None:
    """Start agents until the other end of the socket is closed, and report when they end. Blocks."""
    control = socket.socket(fileno=os.dup(0))
    wake_read, wake_write = os.pipe()
    for descriptor in (wake_read, wake_write):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.freeze()  # so that collections in the agents leave the pages shared
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    agents: dict[int, int] = {}  # number by pid
    wanted = True
    while wanted or agents:
        for descriptor, _ in poll.poll():
            if descriptor == wake_read:
                os.read(wake_read, 1 << 12)
            elif not _obey(control, agents, (control.fileno(), wake_read, wake_write), script):
                wanted = False
                poll.unregister(control)
        for pid, wait_status in reap().items():
            if (number := agents.pop(pid, None)) is not None:
                _answer(control, f"{number} {os.waitstatus_to_exitcode(wait_status)}")


def _obey(control: socket.socket, agents: dict[int, int], own: tuple[int, ...], script: str) -> bool:
    """Handle a message; return False if the socket was closed."""
    data, streams, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 3)
    if not data:
        return False
    number_text, *key = data.decode().split()  # KEY of `python -m launcher.agent`, if there is one
    number = int(number_text)
    if not streams:
        for pid in [pid for pid, its in agents.items() if its == number]:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
        return True
    try:
        pid = os.fork()
    except OSError as error:
        os.write(streams[2], f"no process for the agent: {error.strerror}; see ulimit -u\n".encode())
        _answer(control, f"{number} 1")
    else:
        if pid == 0:
            _become_agent(streams, own, script, *key)
        agents[pid] = number
    for descriptor in streams:
        os.close(descriptor)
    return True


def _become_agent(streams: list[int], own: tuple[int, ...], script: str, key: str = "") -> None:
    """Become an agent with these standard streams and nothing else of this process. Never returns."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for place, descriptor in enumerate(streams):
            os.dup2(descriptor, place)
        for descriptor in (*streams, *own):
            os.close(descriptor)
        run_agent(key, hand_over(key, script) if key else "")
    finally:
        os._exit(1)


def _answer(control: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):  # the other end is gone
        control.send(text.encode())
