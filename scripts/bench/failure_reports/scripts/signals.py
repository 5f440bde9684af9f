"""Each rank notes USR1 and goes on; at TERM it takes 3 s to save, and ends (pytorch#119856, #154849)."""

import signal
import sys
import time
from types import FrameType

from failing import begin, note


def usr1(signum: int, frame: FrameType | None) -> None:
    note("usr1")


def term(signum: int, frame: FrameType | None) -> None:
    note("term")
    time.sleep(3)
    note("saved")
    sys.exit(0)


signal.signal(signal.SIGUSR1, usr1)
signal.signal(signal.SIGTERM, term)
begin()
note("up")
while True:
    time.sleep(0.1)
    note("alive")
