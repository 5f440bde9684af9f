"""What an agent tells its workers of generations, and what it keeps for the next life of a rank."""

import os
import signal
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.agent import AgentProcess
from testbed.processes import wait_until

from launcher.agent.workers.memory_file import MemoryFile
from launcher.agent.workers.worker import GenerationPipe
from launcher.protocol.commands import NextGeneration, OpenStore, RestartWorker
from launcher.protocol.reports import Exited, Output, Started, StoreOpened
from launcher.protocol.two_way import Heartbeat

# Prints its first generation, then what its predecessor left, then each number that it gets; rank 1 ends at "end".
LISTENS = """\
import os, signal, struct, sys
state = os.open(os.environ["DTRAIN_STATE_FILE"], os.O_RDWR)
said = f"first {os.environ['DTRAIN_GENERATION']} {os.read(state, 99).decode() or 'nothing'}\\n"
os.pwrite(state, b"of life " + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0").encode(), 0)
with open(os.environ["DTRAIN_PROGRESS_FILE"], "r+b") as file:
    file.seek(16)
    file.write(struct.pack("<Q", 3))
pipe = os.open(os.environ["DTRAIN_GENERATION_PIPE"], os.O_RDONLY)
os.write(1, said.encode())
while data := os.read(pipe, 8):
    number, = struct.unpack("<Q", data)
    os.write(1, b"rank %s told %d\\n" % (sys.argv[1].encode(), number))
    if sys.argv[1] == "1" and number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path) as agent:
        agent.prepare(grace_s=0.2)
        yield agent


def said(agent: AgentProcess) -> bytes:
    return b"".join(message.data for message in agent.seen if isinstance(message, Output))


def read_until(agent: AgentProcess, text: bytes, times: int = 1) -> None:
    while said(agent).count(text) < times:
        agent.expect(Output)


def test_workers_are_notified_and_a_successor_has_the_newest(agent: AgentProcess) -> None:
    for rank in (0, 1):
        agent.start(LISTENS, str(rank), rank=rank)
        agent.expect_output(b"first 0 nothing\n")
    agent.tell(NextGeneration(attempt=0, number=1))
    assert agent.expect(Exited).restart_policy == 3
    agent.tell(RestartWorker(rank=1, attempt=0, restart=1), NextGeneration(attempt=0, number=2))
    read_until(agent, b" of life 0\n")
    read_until(agent, b"rank 0 told 2\n")
    if b"first 2 of life 0\n" not in said(agent):  # the second order came after its start
        assert b"first 1 of life 0\n" in said(agent)
        read_until(agent, b"rank 1 told 2\n")
    agent.tell(NextGeneration(attempt=0, number=2), NextGeneration(attempt=7, number=9), NextGeneration(0, 3))
    read_until(agent, b" told 3\n", times=2)
    assert said(agent).count(b"rank 0 told 2\n") == 1, "a number that is not newer is ignored"
    assert b" told 9\n" not in said(agent), "and one of another attempt"
    agent.end_attempt()
    agent.tell(OpenStore(attempt=1, address="127.0.0.1", towards="", port=0, exact=False))
    agent.expect(StoreOpened)
    agent.start(LISTENS, "0", attempt=1)
    agent.expect_output(b"first 0 nothing\n")  # of another attempt
    agent.stop()


def test_a_late_first_process_learns_of_earlier_generations(agent: AgentProcess) -> None:
    agent.start(LISTENS, "0")
    agent.tell(NextGeneration(attempt=0, number=4))
    agent.expect_output(b"rank 0 told 4\n")
    agent.start(LISTENS, "2", rank=2)
    read_until(agent, b"rank 2 told 4\n")
    assert said(agent).count(b"first 0 nothing\n") == 2
    agent.stop()


SAYS_FILE = """\
import json, os
pipe = os.open(os.environ["DTRAIN_GENERATION_PIPE"], os.O_RDONLY)
path = os.environ["DTRAIN_GENERATION_FILE"]
first = open(path).read() if os.path.exists(path) else "{}"
os.write(1, f"first {os.environ['DTRAIN_GENERATION']} {os.environ['RANK']} {json.loads(first).get('when')}\\n".encode())
while os.read(pipe, 8):
    said = json.load(open(path))
    os.write(1, f"{said['number']} {said['when']} {said['variables'].get('RANK')} {len(said['variables'])}\\n".encode())
"""


def test_a_worker_can_read_who_it_is_in_the_newest_generation(agent: AgentProcess) -> None:
    agent.start(SAYS_FILE, env={"RANK": "4", "WORLD_SIZE": "6"})
    agent.expect_output(b"first 0 4 None\n")
    agent.tell(NextGeneration(0, 1, "later"))
    agent.expect_output(b"1 later 4 2\n")
    agent.tell(NextGeneration(0, 2, "now", {"0": {"RANK": "2"}, "9": {"RANK": "3"}}))
    agent.expect_output(b"2 now 2 2\n")
    agent.start(SAYS_FILE, rank=5, env={"RANK": "5", "WORLD_SIZE": "6"}, generation=3)
    agent.expect_output(b"first 3 5 now\n")
    agent.stop()


def test_a_heartbeat_says_whether_all_workers_are_resilient(agent: AgentProcess) -> None:
    agent.start(LISTENS, "0")
    agent.expect_output(b"first 0 nothing\n")
    while not agent.expect(Heartbeat).resilient:
        pass
    agent.start("import time\nprint('here', flush=True); time.sleep(600)", rank=3)
    agent.expect_output(b"here")
    while agent.expect(Heartbeat).resilient:
        pass
    agent.stop()


def test_the_files_are_the_user_s_alone_and_go_with_the_attempt(agent: AgentProcess) -> None:
    agent.start("import os, time\nfor name in ('GENERATION_PIPE', 'STATE_FILE'): print(os.environ['DTRAIN_' + name])\n"
                "print(flush=True); time.sleep(600)")  # fmt: skip
    output = b""
    while not output.endswith(b"\n\n"):
        output += agent.expect(Output).data
    pipe, state = map(Path, output.decode().split())
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert {path.stat().st_mode & 0o777 for path in (pipe, state)} == {0o600}
    agent.end_attempt()
    assert not pipe.exists()
    assert not state.exists()
    agent.stop()


def test_a_pipe_that_no_one_reads_keeps_the_newest_number(tmp_path: Path) -> None:
    pipe = GenerationPipe(tmp_path / "pipe")
    for number in range(1, 20_001):
        pipe.announce(number)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    data = b""
    while len(data) % 8 == 0 and not data.endswith(struct.pack("<Q", 20_000)):
        data += os.read(reader, 1 << 16)
    numbers = struct.unpack(f"<{len(data) // 8}Q", data)
    assert list(numbers) == sorted(set(numbers))
    os.close(reader)
    pipe.close()


def test_without_memory_files_the_state_is_with_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    state = MemoryFile("state", str(tmp_path / "2-5.state"))
    assert Path(state.path) == tmp_path / "2-5.state"
    assert Path(state.path).stat().st_mode & 0o777 == 0o600
    state.close()


def test_no_descriptor_stays_open_after_an_attempt(agent: AgentProcess) -> None:
    agent.open_store()
    agent.end_attempt()
    before = len(os.listdir(f"/proc/{agent.pid}/fd"))
    for attempt in (1, 2):
        agent.start(LISTENS, "1", rank=1, attempt=attempt)
        agent.tell(NextGeneration(attempt=attempt, number=1))
        agent.expect(Exited)
        agent.tell(RestartWorker(rank=1, attempt=attempt, restart=1))
        agent.expect(Started)
        agent.end_attempt(attempt)
    wait_until(lambda: len(os.listdir(f"/proc/{agent.pid}/fd")) <= before, "all are closed")
    agent.stop()


# Makes a step every 50 ms, and none for 8 s once it gets a generation.
WAITS = """\
import os, select, struct, time
pipe = os.open(os.environ["DTRAIN_GENERATION_PIPE"], os.O_RDONLY)
with open(os.environ["DTRAIN_PROGRESS_FILE"], "r+b", buffering=0) as file:
    for step in range(1, 100000):
        file.seek(0)
        file.write(struct.pack("<Q", step))
        if step == 20:
            os.write(1, b"trains\\n")
        if select.select([pipe], [], [], 0.05)[0] and os.read(pipe, 8):
            time.sleep(8)
            os.write(1, b"again\\n")
"""


def test_a_wait_for_others_is_no_measure_of_a_step(agent: AgentProcess) -> None:
    agent.start(WAITS)
    agent.expect_output(b"trains\n")
    agent.expect(Heartbeat)
    agent.tell(NextGeneration(attempt=0, number=1))
    agent.expect_output(b"again\n")
    steps = agent.expect(Heartbeat).steps
    while (beat := agent.expect(Heartbeat)).steps < steps + 20:
        pass
    assert max(beat.longest_s) < 7, beat.longest_s


@pytest.mark.parametrize("restart_policy", [3, 4])
def test_a_restarted_worker_counts_by_its_restart_policy(agent: AgentProcess, restart_policy: int) -> None:
    agent.start(LISTENS.replace('"<Q", 3', f'"<Q", {restart_policy}'), "1", rank=1)
    agent.expect_output(b"first 0 nothing\n")
    agent.tell(NextGeneration(attempt=0, number=1))
    assert agent.expect(Exited).restart_policy == restart_policy
    assert [agent.expect(Heartbeat).resilient for _ in range(2)][1] == (restart_policy == 3)


def test_a_worker_that_cannot_be_notified_is_killed_and_the_report_says_why(agent: AgentProcess) -> None:
    agent.start(LISTENS, "0")
    agent.expect_output(b"first 0 nothing\n")
    (folder,) = agent.temp.glob("dtrain-*")
    (folder / "0-0.json.generation.new").mkdir()  # stands in for a full disk
    agent.tell(NextGeneration(attempt=0, number=1))
    exited = agent.expect(Exited)
    assert exited.status == -signal.SIGKILL
    assert exited.killer == f"dtrain, since {folder} cannot be written: Is a directory; see TMPDIR"
