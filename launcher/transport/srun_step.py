"""One srun for many nodes: its tasks connect back to a listener here, each for the agent of its node.

Made by srun.py, which has an srun of its own for each node where this cannot be: there are too few for it to be worth
while, they have different things of the job, or cannot connect to this machine. The listener is bound to the one
address of the route to the nodes. Who connects proves that it knows a token, which goes to the tasks through the
standard input of srun, never through arguments or variables, and whose way from there is SLURM's.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from launcher.errors import HostError, StreamError
from launcher.transport.local import start_process
from launcher.transport.stream import LastWords, Stream, broken_by
from launcher.transport.tcp.greeting import where_at
from launcher.transport.tcp.listener import Listener
from launcher.transport.tcp.step_task import node_ranks

__all__ = ["SrunStep"]

LOOK_S = 0.5  # between looks whether there is still hope for a node
AGAIN_S = 5.0  # for a node that was there to connect again
SHARE = 0.5  # of the time for a node, the rest is for an srun of its own
END_S = 3.0  # for srun to end once its tasks know that the run is over
WORDS_S = 2.0  # for srun's word on why a connection broke


class SrunStep:
    """The step and its listener. `nodes` are those on which `command` starts a task.

    `explain` puts srun's words into one line. Raises UsageError, HostError.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        nodes: Sequence[str],
        address: str,
        agent: Sequence[str],
        explain: Callable[[str], str],
    ) -> None:
        self._ranks = node_ranks(nodes)
        self._explain = explain
        token = secrets.token_hex(32)
        names = ["", *self._ranks]  # the first is this process's own, which has no part in it
        self._listener = Listener(address, 0, token.encode(), expected={}, nodes=names, tell=lambda _: None)
        self._lock = threading.Lock()
        self._problems: dict[str, str] = {}
        self._were_there: set[str] = set()
        self._closed = False
        try:
            self._process = start_process(command, env)
        except HostError:
            self._listener.close(1)
            raise
        assert self._process.stderr is not None
        self._words = LastWords(self._process.stderr)
        threading.Thread(target=self._read, name="output of the step", daemon=True).start()
        self._where = where_at(self._listener.address, self._listener.port)
        endpoint = {"address": self._listener.address, "port": self._listener.port, "token": token}
        order = json.dumps({"endpoint": endpoint, "agent": list(agent)}).encode() + b"\n"
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which its nodes see
            self._process.stdin.write(order)

    def connect(self, node: str, deadline: float) -> Stream | str:
        """Return the stream to a new agent on a node once its task is here, or why it cannot be waited for.

        That is empty for a node that was here before. Blocks until half of the time up to `deadline` (monotonic) is
        over at most. Raises HostError once it is closed.
        """
        now, again = time.monotonic(), node in self._were_there
        until = now + (AGAIN_S if again else SHARE * max(0.0, deadline - now))
        while True:
            ended = self._process.poll() is not None
            try:
                stream = self._listener.wait(node, min(until, time.monotonic() + LOOK_S))
            except HostError:
                if self._closed:
                    raise
                if (why := self._why_not(node, ended=ended, late=time.monotonic() >= until)) is not None:
                    return "" if again else why
            else:
                self._were_there.add(node)
                return _StepStream(stream, self._said)

    def _why_not(self, node: str, *, ended: bool, late: bool) -> str | None:
        """Return why a node's task cannot be waited for any longer; None: it can."""
        if node in self._problems:
            return f"{node} cannot connect back to {self._where}: {self._problems[node]}"
        if ended:
            return f"srun has ended: {self._said(WORDS_S) or f'status {self._process.returncode}'}"
        return f"{node} has not connected back to {self._where} in time" if late else None

    def close(self) -> None:
        """Let the tasks end, and srun with them; kill it if it does not."""
        self._closed = True
        self._listener.close(0)
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _said(self, wait_s: float) -> str:
        """Return why srun has ended, if it ends in time."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return ""
        return self._explain(self._words.wait(1.0))

    def _read(self) -> None:
        """Take note of the tasks that cannot connect; in a thread of its own."""
        assert self._process.stdout is not None
        with self._process.stdout as lines, broken_by():
            rest = b""
            while data := os.read(lines.fileno(), 1 << 12):
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    self._note(line)

    def _note(self, line: bytes) -> None:
        try:
            said = json.loads(line)
            self._problems[str(said["node"])] = str(said["problem"])
        except (ValueError, KeyError, TypeError):  # a prologue of the site's may print what it likes
            return


class _StepStream:
    """A stream whose break is explained by srun, if it ended as well. A `Stream`."""

    def __init__(self, inner: Stream, said: Callable[[float], str]) -> None:
        self.our_address = inner.our_address
        self._inner = inner
        self._said = said
        self.write, self.end, self.finish = inner.write, inner.end, inner.finish

    def read(self) -> bytes:
        try:
            return self._inner.read()
        except StreamError as error:
            if words := self._said(WORDS_S):
                raise StreamError(f"the connection closed: {words}") from error
            raise
