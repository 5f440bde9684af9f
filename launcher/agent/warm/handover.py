"""Replaces a new agent by one forked from a process kept warm, by handing over its streams.

Called before the agent itself is imported. The process that was started as the agent then only waits: it exits with
the status of the other, and if it ends first, the other stops.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import Any

from launcher.agent.warm.folder import open_folder, prefix_of
from launcher.errors import SocketError, WarmError

ANSWER_S = 2.0
_MESSAGE_BYTES = 1 << 16


def hand_over(key: str, script: str = "") -> str:
    """Hand over to a process kept warm that fits, first to one of the same script; do not return then.

    `script` (transport/connect.py) is compared with what others have imported; without it only the same script counts.
    Otherwise return the reason why the newest cannot be used, or an empty string if there is none.
    """
    why_not = ""
    try:
        with open_folder() as folder:
            if folder is None or _in_job():
                return ""
            own = prefix_of(key)
            others = prefix_of(key.partition("-")[0]) if script else own
            for name in sorted(folder.names(others), key=lambda name: not name.startswith(own)):
                try:
                    connection = folder.connect(name, ANSWER_S)
                    if connection is not None:
                        reason = _offer(connection, own, "" if name.startswith(own) else script)
                        why_not = why_not or reason
                except (OSError, SocketError) as error:
                    why_not = why_not or str(error)
    except (OSError, SocketError) as error:  # a read-only or broken file system must not prevent a run
        return why_not or str(error)
    return why_not


def _in_job() -> bool:
    """Return whether this process belongs to a SLURM job, whose processes must stay in it."""
    return "SLURM_JOB_ID" in os.environ


def _offer(connection: socket.socket, prefix: str, script: str) -> str:
    """Hand over if the process fits, else return why not. The agent compares its own script."""
    from launcher.agent.warm.surroundings import find_surroundings

    with connection:
        also = {"script": json.loads(bytes.fromhex(script))} if script else {}
        answer = ask(connection, "check", surroundings=find_surroundings(), **also)
        if answer["reason"]:
            return str(answer["reason"])
        return _hand_over(connection, prefix)


def _hand_over(connection: socket.socket, prefix: str) -> str:
    """Hand over and do not return; or return why no agent was started.

    A pipe with one byte decides which process is the agent: the forked one reads it before it begins, or this process
    does if no answer came in time. So there are never two.
    """
    before = {}
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):  # as a guard does
        if signal.getsignal(signum) is not signal.SIG_IGN:
            before[signum] = signal.signal(signum, lambda *_: None)
    environ = os.memfd_create("environ", os.MFD_CLOEXEC)
    os.write(environ, json.dumps(dict(os.environ)).encode())
    may_begin, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.write(write_end, b"1")
    os.close(write_end)
    order = json.dumps({"ask": "run", "cores": sorted(os.sched_getaffinity(0)), "prefix": prefix}).encode()
    try:
        socket.send_fds(connection, [order], [environ, may_begin, 0, 1, 2])
        answer = json.loads(connection.recv(_MESSAGE_BYTES))
    except (OSError, ValueError):
        answer = {"reason": "the process kept warm does not answer"}
    os.close(environ)
    withdrawn = os.read(may_begin, 1)
    os.close(may_begin)
    if withdrawn:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        return str(answer.get("reason", "the process kept warm has started no agent"))
    connection.settimeout(None)
    status = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        while "status" not in answer:
            answer = json.loads(connection.recv(_MESSAGE_BYTES))
        status = answer["status"]
    finally:
        os._exit(status)


def ask(connection: socket.socket, question: str, **about: Any) -> dict[str, Any]:
    """Return the answer of a process kept warm. Raises WarmError if none comes in time."""
    try:
        connection.send(json.dumps({"ask": question, **about}).encode())
        answer: dict[str, Any] = json.loads(connection.recv(_MESSAGE_BYTES))
    except (OSError, ValueError) as error:
        raise WarmError("the process kept warm does not answer") from error
    return answer
