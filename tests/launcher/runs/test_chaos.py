"""A small elastic training on three SSH hosts under random faults, one after another, from a seed.

24 of them, three of each kind. Replay: CHAOS_SEED=N CHAOS_FAULTS=M pytest FILE
"""

import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from testbed.processes import LEASE, MARK, Program, kill, marked, started_dtrain, wait_until
from testbed.seeds import Seeds
from testbed.sshd import HOST, SshHosts

# Rank 0 trains and saves each step; a rank of which there are two at a time finds its lock taken. All have a child
# that hides as well as it can.
SCRIPT = """\
import fcntl, json, os, struct, subprocess, sys, time
e = os.environ
attempt, rank = e["TORCHELASTIC_RESTART_COUNT"], e["RANK"]
lock = open(f"lock-{rank}", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    open("two-at-once", "a").write(f"rank {rank} in attempt {attempt}\\n")
subprocess.Popen(["sleep", "600"], start_new_session=True, close_fds=True)
print("here", attempt, rank, e["WORLD_SIZE"], e["DTRAIN_HOST"], flush=True)
state = {"step": 0, "sum": 0}
if rank == "0" and os.path.exists("state.json"):
    state = json.load(open("state.json"))
progress = open(e["DTRAIN_PROGRESS_FILE"], "r+b", buffering=0)
while not os.path.exists("finish"):
    time.sleep(0.02)
    if rank == "0":
        state = {"step": state["step"] + 1, "sum": state["sum"] + state["step"]}
        with open("state.new", "w") as file:
            json.dump(state, file)
        os.replace("state.new", "state.json")
        progress.seek(0)
        progress.write(struct.pack("<QQ", state["step"], 1))
"""


@pytest.mark.timeout(1800)
def test_an_elastic_training_goes_on_under_random_faults(ssh_hosts: SshHosts, tmp_path: Path, seeds: Seeds) -> None:
    seed = int(os.environ.get("CHAOS_SEED", seeds(1)[0]))
    faults = int(os.environ.get("CHAOS_FAULTS", "24"))
    (tmp_path / "train.py").write_text(SCRIPT)
    hosts = ["--hosts", "node1,node2,node3", "--nnodes", "1:3", "--ssh-config", str(ssh_hosts.ssh_config)]
    options = ["--grow", "--max-restarts", "1000", *LEASE, "--grace-s", "0.5"]
    argv = ["run", *hosts, *options, "--nproc-per-node", "1", "train.py"]
    with started_dtrain(*argv, cwd=tmp_path) as process:
        run = _Run(process, ssh_hosts, random.Random(seed))
        run.settle(0, "the start")
        for number in range(faults):
            fault = run.strike()
            said = f"fault {number} of seed {seed}: {fault}"
            run.settle(run.attempt + 1, said)
            assert not (tmp_path / "two-at-once").exists(), f"{said}: {(tmp_path / 'two-at-once').read_text()}"
        (tmp_path / "finish").touch()
        process.wait(60)
        run.close()
        assert process.returncode == 0, run.stderr[-5000:]
    assert b"0 processes left on 3 hosts" in run.stderr
    assert not marked({ssh_hosts.mark, os.environ[MARK]}, RANK="0")


class _Run:
    """A running training, what its workers have said, and the faults that can befall it."""

    def __init__(self, process: Program, hosts: SshHosts, chance: random.Random) -> None:
        self.stderr = b""
        self.attempt = 0
        self._process = process
        self._hosts = hosts
        self._marks = {hosts.mark, os.environ[MARK]}
        self._chance = chance
        self._next: list[Callable[[int], None]] = []
        self._last = 0  # the host of the last fault: one that fails twice in a row would be left out
        self._up: dict[int, dict[int, str]] = {}
        self._worlds: dict[int, int] = {}
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for thread in self._threads:
            thread.join(60)

    def strike(self) -> str:
        """Let something happen to a host, and say what."""
        i = self._chance.choice([i for i in (1, 2, 3) if i != self._last])
        self._last = i
        if not self._next:  # each kind once before one comes again
            self._next = [
                self.kill_worker,
                self.crash_worker,
                self.kill_agent,
                self.kill_guard,
                self.kill_agent_and_guard,
                self.kill_session,
                self.freeze_agent,
                self.power_off,
            ]
            self._chance.shuffle(self._next)
        fault = self._next.pop()
        time.sleep(self._chance.random() * 0.2)
        fault(i)
        return f"{fault.__name__} on node{i}"

    def settle(self, least: int, said: str) -> None:
        """Wait until an attempt from `least` on runs on all three hosts, and nothing of another one is left."""

        def runs() -> bool:
            assert self._process.poll() is None, f"{said}: it ended: {self.stderr[-5000:].decode()}"
            newest = max(self._up, default=-1)
            return newest >= least and self._worlds[newest] == 3 and len(self._up[newest]) == 3

        try:
            wait_until(runs, said)
        except TimeoutError:
            pytest.fail(f"{said}: no attempt from {least} on runs: {self._worlds}\n{self.stderr[-5000:].decode()}")
        self.attempt = max(self._up)
        others = [p for p in marked(self._marks) if _attempt_of(p) not in (None, str(self.attempt))]
        assert not others, f"{said}: of a former attempt: {others}"
        assert len(self._workers()) == 3, said

    # ---- faults ----

    def kill_worker(self, i: int) -> None:
        kill([self._chance.choice(self._workers(i))])

    def crash_worker(self, i: int) -> None:
        self._chance.choice(self._workers(i)).send_signal(11)

    def kill_agent(self, i: int) -> None:
        self._agent(i).kill()

    def kill_guard(self, i: int) -> None:
        _parent(self._agent(i)).kill()

    def kill_agent_and_guard(self, i: int) -> None:
        agent = self._agent(i)
        guard = _parent(agent)
        guard.suspend()
        agent.kill()
        guard.kill()

    def kill_session(self, i: int) -> None:
        _parent(_parent(self._agent(i))).kill()

    def freeze_agent(self, i: int) -> None:
        self._agent(i).suspend()

    def power_off(self, i: int) -> None:
        self._hosts.stop(i)
        self._hosts.start(i)

    # ---- what there is ----

    def _workers(self, i: int | None = None) -> list[psutil.Process]:
        also = {} if i is None else {HOST: f"node{i}"}
        found = marked(self._marks, TORCHELASTIC_RESTART_COUNT=str(self.attempt), **also)
        return sorted((p for p in found if "train.py" in _command(p)), key=lambda p: p.pid)

    def _agent(self, i: int) -> psutil.Process:
        return _parent(self._workers(i)[0])

    def _read(self) -> None:
        for line in self._process.stdout:
            if match := re.search(rb"here (\d+) (\d+) (\d+) (\S+)", line):
                attempt, rank, world = (int(match[k]) for k in (1, 2, 3))
                self._worlds[attempt] = world
                self._up.setdefault(attempt, {})[rank] = match[4].decode()

    def _read_errors(self) -> None:
        for line in self._process.stderr:
            self.stderr += line


def _parent(process: psutil.Process) -> psutil.Process:
    parent = process.parent()
    assert parent is not None
    return parent


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _attempt_of(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ().get("TORCHELASTIC_RESTART_COUNT")
    return None
