"""Resilient workers under dtrain: one is killed, its successor starts, all others hear of it and live on."""

import re
from pathlib import Path

import pytest
from testbed.processes import Result, run_dtrain

# The ranks meet in each generation, through files, and one of them dies then, as the arguments say, until the last.
SCRIPT = """\
import os, queue, signal, struct, sys, threading, time
import click  # a script that imports the standard library alone is not forked
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
first = int(os.environ["DTRAIN_GENERATION"])
kills = [int(word) for word in sys.argv[1:]]  # who dies in which generation

with open(os.environ["DTRAIN_PROGRESS_FILE"], "r+b") as file:
    file.write(struct.pack("<QQQ", 1, 0, 3))  # a step, so that no restart waits
with open(os.environ["DTRAIN_STATE_FILE"], "r+") as file:
    print("life", first, "after", file.read() or "nobody", flush=True)
    file.truncate(0)
    file.seek(0)
    file.write(f"{rank} of generation {first}")
news = queue.Queue()

def listen():
    pipe = os.open(os.environ["DTRAIN_GENERATION_PIPE"], os.O_RDONLY)
    while data := os.read(pipe, 8):
        news.put(int.from_bytes(data, "little"))

threading.Thread(target=listen, daemon=True).start()

def meet(generation):
    open(f"{generation}-{rank}", "w").close()
    deadline = time.monotonic() + 90
    while not all(os.path.exists(f"{generation}-{other}") for other in range(world)):
        assert time.monotonic() < deadline, f"generation {generation} is not complete"
        time.sleep(0.002)

def await_others(generation):
    # The run may end with what comes next.
    open(f"met-{generation}-{rank}", "w").close()
    while not all(os.path.exists(f"met-{generation}-{other}") for other in range(world)):
        time.sleep(0.002)

generation = first
while True:
    meet(generation)
    print("met", generation, os.getpid(), time.monotonic(), flush=True)
    if generation == len(kills):
        break
    await_others(generation)
    if kills[generation] == rank:
        print("dies", generation, time.monotonic(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    generation = news.get(timeout=90)
with open(os.environ["DTRAIN_PROGRESS_FILE"], "r+b") as file:
    file.write(struct.pack("<QQQ", 1, 0, 0))  # it ends as an ordinary process
"""


def run(script: Path, *kills: int, options: tuple[str, ...] = ()) -> Result:
    script.write_text(SCRIPT)
    common = ("--simulate", "--nnodes", "2", "--nproc-per-node", "2")
    return run_dtrain("run", *common, *options, script, *map(str, kills), cwd=script.parent)


def said(stdout: str, rank: int, word: str) -> list[list[str]]:
    lines = (line.partition("] ") for line in stdout.splitlines())
    return [text.split() for prefix, _, text in lines if prefix.endswith(f":{rank}") and text.startswith(word)]


@pytest.mark.parametrize("start_method", ["fork", "exec"])
def test_survivors_meet_the_successor_which_gets_the_state(tmp_path: Path, start_method: str) -> None:
    script = tmp_path / "train.py"
    result = run(script, 3, 1, 3, options=("--max-restarts", "3", "--start-method", start_method))
    assert result.returncode == 0, result
    assert "forked" not in result.stderr, "it says so where --start-method fork cannot be had"
    lives = {rank: [" ".join(life) for life in said(result.stdout, rank, "life")] for rank in range(4)}
    assert lives == {
        0: ["life 0 after nobody"],
        1: ["life 0 after nobody", "life 2 after 1 of generation 0"],
        2: ["life 0 after nobody"],
        3: ["life 0 after nobody", "life 1 after 3 of generation 0", "life 3 after 3 of generation 1"],
    }
    met = {rank: said(result.stdout, rank, "met") for rank in range(4)}
    assert [[line[1] for line in met[rank]] for rank in range(4)] == 4 * [["0", "1", "2", "3"]]
    assert [len({line[2] for line in met[rank]}) for rank in range(4)] == [1, 2, 1, 3], "processes of each rank"
    assert "; only this worker restarts (restart 3 of 3)" in result.stderr
    assert "all 4 workers finished successfully" in result.stderr
    died = {line[1]: float(line[2]) for rank in range(4) for line in said(result.stdout, rank, "dies")}
    for generation, at in sorted(died.items()):
        after = str(int(generation) + 1)
        all_met = max(float(line[3]) for rank in range(4) for line in met[rank] if line[1] == after)
        print(f"{start_method}: generation {after} is met {1000 * (all_met - at):.0f} ms after the death before it")


def test_without_restarts_left_a_failure_ends_the_run(tmp_path: Path) -> None:
    result = run(tmp_path / "train.py", 3, 3, options=("--max-restarts", "1", "--grace-s", "1"))
    assert result.returncode == 137, result
    assert re.search(r"the one restart \(--max-restarts\) was used", result.stderr), result.stderr
    assert [line[1] for line in said(result.stdout, 0, "met")] == ["0", "1"]
