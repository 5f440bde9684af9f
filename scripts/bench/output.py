"""What merging equal lines costs where very many are shown: a terminal with --lines merge against --lines all.

    python scripts/bench/output.py [--pairs 9]

Eight ranks write lines of 80 bytes, in chunks as they are read of a pipe (64 KiB) or line by line, to a terminal whose
other side a process reads as fast as it can. Printed are the medians of alternating pairs: megabytes a second and the
CPU time of the thread that writes, both relative to --lines all. Below 0.95 and above 1.05 merging would be seen.
"""

from __future__ import annotations

import argparse
import os
import pty
import signal
import statistics
import time

from launcher.output.console import Console

RANKS = 8
LINES = {"64 KiB chunks": (800, 60), "single lines": (1, 4000)}  # lines of a chunk; chunks of a rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9, help="runs of each [%(default)s]")
    pairs = parser.parse_args().pairs
    for text, equal in (("equal", True), ("different", False)):
        for how, (lines, chunks) in LINES.items():
            speeds, costs = [], []
            for _ in range(pairs):
                plain, merged = (_run(mode, lines, chunks, equal=equal) for mode in ("all", "merge"))
                speeds.append(plain[0] / merged[0])
                costs.append(merged[1] / plain[1])
            speed, cost = statistics.median(speeds), statistics.median(costs)
            print(f"{text:>9} lines, {how:<13}: throughput x {speed:.2f}, CPU time x {cost:.2f}")


def _run(mode: str, lines: int, chunks: int, *, equal: bool) -> tuple[float, float]:
    """Return the wall time and the CPU time that it takes to show everything."""
    main_side, terminal = pty.openpty()
    reader = os.fork()
    if reader == 0:
        os.close(terminal)
        try:
            while os.read(main_side, 1 << 16):
                pass
        except OSError:  # no one has the other side open any more
            pass
        os._exit(0)
    os.close(main_side)
    console = Console(out=terminal, err=terminal, colour=False, lines=mode)
    for rank in range(RANKS):
        console.add_worker(rank, "host")
    data = [
        [
            b"".join(
                b"%-79d\n" % ((chunk * lines + line) * (1 if equal else RANKS) + rank * (not equal))
                for line in range(lines)
            )
            for chunk in range(chunks)
        ]
        for rank in range(RANKS)
    ]
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    for chunk in range(chunks):
        for rank in range(RANKS):
            console.write(rank, 1, data[rank][chunk])
    console.finish()
    took = time.perf_counter() - wall_s, time.thread_time() - cpu_s
    os.close(terminal)
    os.kill(reader, signal.SIGTERM)
    os.waitpid(reader, 0)
    return took


if __name__ == "__main__":
    main()
