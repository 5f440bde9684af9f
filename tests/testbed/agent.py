"""Drives a real agent over its pipes, as the controller does, without a controller."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from launcher.machine.processes import find
from launcher.protocol.commands import EndAttempt, OpenStore, Prepare, StartWorker, Stop
from launcher.protocol.frames import Decoder, encode
from launcher.protocol.message import PREAMBLE, Command, Message
from launcher.protocol.reports import Bye, Facts, Hello, Output, Started, StoreOpened, Swept
from launcher.protocol.two_way import Heartbeat
from testbed.processes import TIMEOUT_S, kill_tree

M = TypeVar("M", bound=Message)


class AgentProcess:
    """A running `python -m launcher.agent`. Its guard is `process`, the agent itself `pid`."""

    def __init__(self, folder: Path, *, temp: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        """`temp` is where it makes its folder, so that no other test's agent ends what it leaves."""
        self.folder = folder
        self.temp = temp or folder / "temp"
        self.temp.mkdir(exist_ok=True)
        self.seen: list[Message] = []
        self._unread: list[Message] = []
        self._decoder = Decoder()
        self._errors = (folder / f"agent-{time.monotonic_ns()}.log").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launcher.agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd="/",
            env={**os.environ, **(env or {}), "TMPDIR": str(self.temp)},
            start_new_session=True,
            bufsize=0,
        )
        assert self.process.stdin is not None
        self._stdin = self.process.stdin
        self._stdin.write(PREAMBLE)
        self.hello = self.expect(Hello)

    @property
    def pid(self) -> int:
        return self.hello.pid

    @property
    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def tell(self, *messages: Command) -> None:
        self._stdin.write(b"".join(encode(message) for message in messages))

    def beat(self, ago_s: float = 0.0) -> None:
        """Send a heartbeat, or one that was under way for so long."""
        self.tell(Heartbeat(time=time.monotonic() - ago_s))

    def prepare(self, *, grace_s: float = 0.5, lease_s: float = 0.0, lost_agents: Sequence[str] = ()) -> Facts:
        self.tell(
            Prepare(
                run_id="r", workdir=str(self.folder), script=None, program=None, export={}, grace_s=grace_s,
                lease_s=lease_s, lost_agents=[*lost_agents], part=0, parts=1, interfaces=[],
            )
        )  # fmt: skip
        return self.expect(Facts)

    def start(
        self,
        script: str,
        *args: str,
        rank: int = 0,
        attempt: int = 0,
        env: dict[str, str] | None = None,
        generation: int = 0,
    ) -> int:
        """Start a worker that runs a script given as text; return its pid."""
        path = self.folder / f"script-{rank}.py"
        path.write_text(script)
        self.tell(
            StartWorker(
                rank=rank,
                attempt=attempt,
                through="script",
                argv=[str(path), *args],
                env=env or {},
                defaults={},
                generation=generation,
            )
        )
        return self.expect(Started).pid

    def open_store(self, attempt: int = 0, port: int = 0) -> StoreOpened:
        self.tell(OpenStore(attempt=attempt, address="127.0.0.1", towards="", port=port, exact=port != 0))
        return self.expect(StoreOpened)

    def end_attempt(self, attempt: int = 0, signum: int = signal.SIGTERM) -> Swept:
        self.tell(EndAttempt(attempt=attempt, signum=signum))
        return self.expect(Swept)

    def stop(self, signum: int = signal.SIGTERM) -> Bye:
        """Stop it; return its last word once it has exited with 0."""
        self.tell(Stop(signum=signum))
        bye = self.expect(Bye)
        assert self.process.wait(60) == 0, self.errors
        return bye

    def hang_up(self) -> None:
        """End its input, as the end of the controller does."""
        self._stdin.close()

    def expect(
        self,
        kind: type[M],
        when: Callable[[M], bool] = lambda _: True,
        timeout: float = TIMEOUT_S,
        *,
        with_beats: bool = False,
    ) -> M:
        """Return the next message of a kind; those in between are skipped, and kept in `seen`.

        `with_beats`: send heartbeats meanwhile, so that no lease ends.
        """
        deadline = time.monotonic() + timeout
        while True:
            while self._unread:
                message = self._unread.pop(0)
                self.seen.append(message)
                if isinstance(message, kind) and when(message):
                    return message
            rest_s = deadline - time.monotonic()
            if with_beats and rest_s > 0.1:
                self.beat()
                self._read(0.1)
            elif not self._read(rest_s):
                raise TimeoutError(f"no {kind.__name__} within {timeout:g} s or before the end: {self.errors}")

    def expect_output(self, text: bytes, *, with_beats: bool = False) -> None:
        """Read until the workers have written `text` (within one read of the agent's)."""
        self.expect(Output, lambda message: text in message.data, with_beats=with_beats)

    def listen(self, seconds: float) -> list[Message]:
        """Read for a while and return what it said."""
        deadline, before = time.monotonic() + seconds, len(self.seen)
        while self._read(deadline - time.monotonic()):
            pass
        self.seen += self._unread
        self._unread = []
        return self.seen[before:]

    def has_ended(self, timeout: float = TIMEOUT_S) -> bool:
        """Wait until both agent and guard are gone; return whether they went in time."""
        deadline = time.monotonic() + timeout
        while find(self.pid) is not None or self.process.poll() is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def __enter__(self) -> "AgentProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()
        try:
            self.process.wait(60)  # it removes its files, which a killed one would leave
        except subprocess.TimeoutExpired:
            kill_tree(self.process.pid)
            self.process.wait()
            raise
        assert self.process.stdout is not None
        for stream in (self._stdin, self.process.stdout, self._errors):
            stream.close()

    def _read(self, timeout: float) -> bool:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], max(0.0, timeout))[0]:
            return False
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        self._unread += self._decoder.feed(data)
        return bool(data)
