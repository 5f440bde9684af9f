"""The examiner: answers `dtrain check` on one host. Starts no process, writes no file, ends with its input.

Started by link.py as an agent would be, as `python -m launcher.check.examiner`, with the protocol's stream on its
standard input and output. The main thread only reads, so that the end of the input ends it whatever else hangs; each
question has a thread of its own. An alarm ends it where even that is not seen.
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
from launcher.protocol import PREAMBLE, PROTOCOL, Answer, Decoder, Hello, Prepare, Question, encode

__all__ = ["main"]

LIFE_S = 600  # a question's own limits are far below


def main() -> None:
    """Serve until the input ends."""
    signal.alarm(LIFE_S)
    for signum in (signal.SIGUSR1, signal.SIGUSR2):  # SLURM sends them to every process of a step
        signal.signal(signum, signal.SIG_IGN)
    examiner = _Examiner()
    python = "{}.{}.{}".format(*sys.version_info[:3])
    examiner.say(PREAMBLE)
    hello = Hello(
        PROTOCOL, __version__, python, socket.gethostname(), os.getpid(), agent_identity="", time=time.monotonic()
    )
    examiner.say(encode(hello))
    decoder = Decoder()
    try:
        while data := os.read(0, 1 << 16):
            for message in decoder.feed(data):
                if isinstance(message, Question):
                    examiner.answer(message)
    finally:
        os._exit(0)  # threads may wait for a disk that never answers


class _Examiner:
    """Owns standard output."""

    def __init__(self) -> None:
        # Read before the user's own exports can change it: "client address, port, server address, port".
        self._reached_at = ([*os.environ.get("SSH_CONNECTION", "").split(" "), "", ""])[2] or None
        self._lock = threading.Lock()

    def say(self, data: bytes) -> None:
        with self._lock:
            view = memoryview(data)
            while view:
                view = view[os.write(1, view) :]

    def answer(self, question: Question) -> None:
        """Answer in the background; the time at once."""
        if question.ask == "time":
            self.say(encode(Answer(time.time())))
        else:
            threading.Thread(target=self._answer, args=(question,), daemon=True).start()

    def _answer(self, question: Question) -> None:
        try:
            answer = Answer(self._find(question.ask, question.about))
        except Exception as error:  # an answer of which nobody thought must still be given
            traceback.print_exc()
            answer = Answer(None, problem=f"{type(error).__name__}: {error}")
        self.say(encode(answer))

    def _find(self, asked: str, about: Mapping[str, Any]) -> Any:
        from launcher.check.examiner_host import find_host_facts
        from launcher.check.examiner_network import listen, probe_all
        from launcher.machine.network import choose_address, socket_interfaces

        if asked == "facts":
            return asdict(find_host_facts(decode_dataclass(Prepare, about["prepare"])))
        token = about["token"].encode()
        if asked == "listen":
            address = about["address"] or choose_address(about["interfaces"], about["towards"], self._reached_at)
            return asdict(listen(address, token, about["store_port"]))
        if asked == "probe":
            found = probe_all(decode_value(tuple[Target, ...], about["targets"]), token, about["limit_s"])
            return [vars(one) for one in found], socket_interfaces(about["master_addr"], about["interfaces"])
        raise ValueError(f"{asked!r} is not known")


if __name__ == "__main__":
    main()
