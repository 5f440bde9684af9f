"""What `dtrain warm` asks one host: what is kept warm there, to stop it, or to import a script's packages ahead.

Started as an agent would be, as `python -m launcher.agent.warm.answers`, with the protocol's stream on its standard
input and output; ends with its input.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping

from launcher import __version__
from launcher.agent.cleanup.run_tag import RunTag
from launcher.agent.host_facts import find_resources, likely_workers
from launcher.agent.warm.folder import prefix_of
from launcher.agent.warm.kept import describe, stop
from launcher.agent.warm.surroundings import find_surroundings
from launcher.agent.workers.warm_start import ForkServer, Warmth
from launcher.decode import decode_dataclass
from launcher.errors import SocketError
from launcher.machine import processes
from launcher.protocol.commands import Prepare
from launcher.protocol.frames import Decoder, encode
from launcher.protocol.message import PREAMBLE, PROTOCOL
from launcher.protocol.reports import Hello
from launcher.protocol.two_way import Answer, Question

LIFE_S = 600  # whatever hangs


def main() -> None:
    surroundings = find_surroundings()
    signal.alarm(LIFE_S)
    processes.adopt_orphans()
    python = "{}.{}.{}".format(*sys.version_info[:3])
    host = socket.gethostname()
    hello = Hello(PROTOCOL, __version__, python, host, os.getpid(), agent_identity="", time=time.monotonic())
    _write(PREAMBLE + encode(hello))
    decoder = Decoder()
    while data := os.read(0, 1 << 16):
        for message in decoder.feed(data):
            if isinstance(message, Question):
                _write(encode(_answer(message, surroundings)))


def _write(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def _answer(question: Question, surroundings: Mapping[str, str]) -> Answer:
    about = question.about
    try:
        if question.ask == "start":
            prepare = decode_dataclass(Prepare, about["prepare"])
            return Answer(None, problem=_start(about["key"], prepare, surroundings))
        return Answer(stop() if question.ask == "stop" else describe())
    except (OSError, SocketError) as error:
        return Answer(None, problem=str(error))


def _start(key: str, prepare: Prepare, surroundings: Mapping[str, str]) -> str:
    """Import what a script does in a process that stays warm; return why that does not go, if it does not."""
    os.environ.update(prepare.export)
    selector = selectors.DefaultSelector()
    fork_server = ForkServer(RunTag.new(), selector, Warmth(prefix_of(key), surroundings))
    fork_server.prepare(prepare, likely_workers(prepare.workers, find_resources(prepare.part, prepare.parts)))
    while fork_server.is_loading:
        for chosen, _ in selector.select():
            chosen.data()
    why_not = fork_server.keep(prepare)
    fork_server.kill()
    return why_not


if __name__ == "__main__":
    main()
