"""The examiner: answers `dtrain check` on one host. Starts no process, writes no file, ends with its input.

Started by link.py like an agent, as `python -m launcher.check.examiner`, with the protocol's stream on its standard
input and output. The main thread only reads, so that the end of the input ends the process even if something hangs;
each request has its own thread. An alarm ends it if even that fails.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from launcher import __version__
from launcher.check.facts import Target
from launcher.decode import decode_dataclass, decode_value
from launcher.protocol.commands import Prepare
from launcher.protocol.frames import Decoder, encode
from launcher.protocol.message import PREAMBLE, PROTOCOL
from launcher.protocol.reports import Hello
from launcher.protocol.two_way import Answer, Question

LIFE_S = 600  # the limits of requests are far below
# Read before the user's exports can change it: "client address, port, server address, port".
_REACHED_AT = ([*os.environ.get("SSH_CONNECTION", "").split(" "), "", ""])[2] or None


def main() -> None:
    """Serve until the input ends."""
    signal.alarm(LIFE_S)
    for signum in (signal.SIGUSR1, signal.SIGUSR2):  # SLURM sends them to every process of a step
        signal.signal(signum, signal.SIG_IGN)
    python = "{}.{}.{}".format(*sys.version_info[:3])
    host = socket.gethostname()
    hello = Hello(PROTOCOL, __version__, python, host, os.getpid(), agent_identity="", time=time.monotonic())
    _write(PREAMBLE + encode(hello))
    decoder = Decoder()
    try:
        while data := os.read(0, 1 << 16):
            for message in decoder.feed(data):
                if isinstance(message, Question) and message.ask == "time":
                    _write(encode(Answer(time.time())))
                elif isinstance(message, Question):
                    threading.Thread(target=_answer, args=(message,), daemon=True).start()
    finally:
        os._exit(0)  # threads may wait for a disk that never answers


def _write(data: bytes) -> None:
    """Write to standard output. Never concurrent: each request is answered before the next one is sent."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def _answer(question: Question) -> None:
    try:
        answer = encode(Answer(_find(question.ask, question.about)))
    except Exception as error:  # an unexpected error must be reported, too
        traceback.print_exc()
        answer = encode(Answer(None, problem=f"{type(error).__name__}: {error}"))
    _write(answer)


def _find(asked: str, about: Mapping[str, Any]) -> Any:
    from launcher.check.examiner_host import find_host_facts
    from launcher.check.examiner_network import listen, probe_all
    from launcher.machine.network import choose_address, socket_interfaces

    if asked == "facts":
        return asdict(find_host_facts(decode_dataclass(Prepare, about["prepare"])))
    token = about["token"].encode()
    if asked == "listen":
        address = about["address"] or choose_address(about["interfaces"], about["towards"], _REACHED_AT)
        return asdict(listen(address, token, about["store_port"]))
    if asked == "probe":
        found = probe_all(decode_value(tuple[Target, ...], about["targets"]), token, about["limit_s"])
        return [vars(one) for one in found], socket_interfaces(about["master_addr"], about["interfaces"])
    raise ValueError(f"unknown request {asked!r}")


if __name__ == "__main__":
    main()
