"""The examiner: answers `dtrain check` on one host. Starts no process, writes no file, ends with its input.

Started by link.py as an agent would be, as `python -m launcher.check.examiner`, with lines of JSON on its standard
input and output. The main thread only reads, so that the end of the input ends it whatever else hangs; each question
has a thread of its own. An alarm ends it where even that is not seen.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from launcher import __version__
from launcher.check.facts import FORMAT, GREETING, Greeting, Listening, Target, read, write
from launcher.protocol import PROTOCOL, Prepare

__all__ = ["main"]

LIFE_S = 600  # a question's own limits are far below
MAX_LINE_BYTES = 8 << 20


def main() -> None:
    """Serve until the input ends."""
    signal.alarm(LIFE_S)
    for signum in (signal.SIGUSR1, signal.SIGUSR2):  # SLURM sends them to every process of a step
        signal.signal(signum, signal.SIG_IGN)
    examiner = _Examiner()
    python = "{}.{}.{}".format(*sys.version_info[:3])
    examiner.say(GREETING)
    examiner.say(write(Greeting(FORMAT, __version__, PROTOCOL, python, socket.gethostname(), os.getpid())))
    try:
        while line := sys.stdin.buffer.readline(MAX_LINE_BYTES):
            examiner.answer(json.loads(line))
    finally:
        os._exit(0)  # threads may wait for a disk that never answers


class _Examiner:
    """Owns standard output, and the door that the other hosts knock at."""

    def __init__(self) -> None:
        # Read before the user's own exports can change it: "client address, port, server address, port".
        self._reached_at = ([*os.environ.get("SSH_CONNECTION", "").split(" "), "", ""])[2] or None
        self._lock = threading.Lock()

    def say(self, data: bytes) -> None:
        with self._lock:
            view = memoryview(data)
            while view:
                view = view[os.write(1, view) :]

    def answer(self, question: Mapping[str, Any]) -> None:
        """Answer in the background; the time at once."""
        if question.get("ask") == "time":
            self.say(write(time.time()))
            return
        threading.Thread(target=self._answer, args=(question,), daemon=True).start()

    def _answer(self, question: Mapping[str, Any]) -> None:
        try:
            self.say(self._find(question))
        except Exception as error:  # an answer of which nobody thought must still be given
            traceback.print_exc()
            self.say(write(None, problem=f"{type(error).__name__}: {error}"))

    def _find(self, question: Mapping[str, Any]) -> bytes:
        asked = question.get("ask")
        if asked == "facts":
            from launcher.check.examiner_host import find_host_facts

            return write(find_host_facts(Prepare(**question["prepare"])))
        if asked == "listen":
            return write(self._listen(question))
        if asked == "dial":
            from launcher.check.examiner_network import dial

            targets = [read(Target, target) for target in question["targets"]]
            return write([vars(found) for found in dial(targets, question["token"].encode(), question["limit_s"])])
        if asked == "sockets":
            from launcher.machine.network import socket_interfaces

            return write(socket_interfaces(question["master_addr"], question["interfaces"]))
        raise ValueError(f"{asked!r} is not known")

    def _listen(self, question: Mapping[str, Any]) -> Listening:
        from launcher.check.examiner_network import listen
        from launcher.machine.network import choose_address

        interfaces, towards = question["interfaces"], question["towards"]
        address = question["address"] or choose_address(interfaces, towards, self._reached_at)
        return listen(address, question["token"].encode(), question["store_port"])


if __name__ == "__main__":
    main()
