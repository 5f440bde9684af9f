"""`dtrain run` in the jobs of a real SLURM: on unequal nodes, with GPUs, through signals, cancellation and crashes."""

import contextlib
import re
import shlex
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from testbed import REPOSITORY
from testbed.present import present
from testbed.processes import LEASE, wait_until
from testbed.slurm import SlurmCluster

from launcher.errors import HostError
from launcher.hosts.host import Host, HostKind
from launcher.hosts.slurm_allocation import Allocation, Node, find_step
from launcher.transport.srun import Srun

WAIT = "import signal, time\nprint('up', flush=True)\ntime.sleep(60)\n"
SHOW = """\
import os
names = "RANK SLURMD_NODENAME LOCAL_RANK WORLD_SIZE CUDA_VISIBLE_DEVICES OMP_NUM_THREADS MASTER_ADDR".split()
print("I", *(os.environ.get(name, "-") for name in names))
"""
SIGNALLED = """\
import signal, sys, time
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
print("up", flush=True)
while not seen:
    time.sleep(0.01)
time.sleep(0.3)
print("signals", len(seen), flush=True)
"""
TRAIN = """\
import os, time
import torch
import ddp
world = ddp.init()
model = ddp.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoint = ddp.Checkpoint("saved")
restored = checkpoint.load(model=model, optimizer=optimizer)
start = restored.step if restored else 0
if restored:
    print("goes on from", start, "in attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
for step in range(start + 1, start + 4 if restored else 10_000):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    if checkpoint.due(step, every=0):
        checkpoint.save(step, model=model, optimizer=optimizer)
        print("saved", step, flush=True)
    if step == 3:
        print("up", flush=True)
"""


class Folder:
    """Where a job is submitted and writes to."""

    def __init__(self, slurm: SlurmCluster, path: Path) -> None:
        self.slurm = slurm
        self.path = path
        self.log = path / "log"  # of all jobs

    def submit(self, text: str, *options: str, run: str = "") -> str:
        """Submit a job that runs a Python script, given as text, with options of sbatch, and of dtrain run."""
        (self.path / "train.py").write_text(text)
        command = shlex.join([sys.executable, "-m", "launcher", "run", *run.split(), "train.py"])
        script = f"#!/bin/bash\nexec {command}\n"
        return self.slurm.submit(script, f"--output={self.log}", "--open-mode=append", *options, cwd=self.path)

    def said(self, pattern: str) -> list[str]:
        """All that the jobs have written and that matches."""
        return re.findall(pattern, self.log.read_text() if self.log.exists() else "")

    def await_said(self, pattern: str, times: int = 1) -> None:
        """Wait until the log has it so often: what a step says may be written after its job has ended."""
        try:
            wait_until(lambda: len(self.said(pattern)) >= times, f"{pattern!r} is in the log, {times} times")
        except TimeoutError as error:
            pytest.fail(f"{error}:\n{self.log.read_text()}", pytrace=False)

    def await_up(self, workers: int) -> None:
        self.await_said(r"\] up\n", workers)

    def ended(self, job: str, *states: str) -> str:
        """Wait for a job's end in one of these states; return its exit code as SLURM has it."""
        wanted = states or ("COMPLETED",)
        facts = self.slurm.await_state(job, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
        assert facts["JobState"] in wanted, (facts["JobState"], facts["ExitCode"], self.log.read_text())
        return facts["ExitCode"]


@pytest.fixture
def folder(slurm: SlurmCluster, tmp_path: Path) -> Folder:
    return Folder(slurm, tmp_path)


def test_a_job_over_unequal_nodes_has_what_each_gives(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "192.0.2.1 5000 192.0.2.2 22")  # of the login from which it is submitted
    # Five tasks, each with its GPU: two, two and one. Of itself a step on one node would get one GPU.
    job = folder.submit(SHOW, "-N3", "-n5", "--gpus-per-task=1")
    assert folder.ended(job) == "0:0"
    places = sorted(line.split() for line in folder.said(r"I (.*)"))
    assert [place[:5] for place in places] == [
        ["0", "node1", "0", "5", "0,1"],
        ["1", "node1", "1", "5", "0,1"],
        ["2", "node2", "0", "5", "0,1"],
        ["3", "node2", "1", "5", "0,1"],
        ["4", "node3", "0", "5", "0"],
    ]
    assert not [place for place in places if place[6] == "192.0.2.2"], "the address of the login"


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        (["-N3", "--gpus=4"], ["0,1", "0,1", "0", "0"]),
        (["-N3", "--exclusive"], ["0,1", "0,1", "0,1", "0,1", "0"]),
        (["-n1", "--gpus-per-node=1", ":", "-N2"], ["0", "-", "-"]),
    ],
    ids=["in-all", "exclusive", "heterogeneous"],
)
def test_every_gpu_of_the_job_gets_a_worker(folder: Folder, options: list[str], gpus: list[str]) -> None:
    job = folder.submit(SHOW, *options)
    assert folder.ended(job) == "0:0"
    assert [place.split()[4] for place in sorted(folder.said(r"I (.*)"))] == gpus


def test_typed_numbers_are_stronger_than_the_allocation(folder: Folder) -> None:
    (folder.path / "train.py").write_text(SHOW)
    command = [sys.executable, "-m", "launcher", "run", "--nnodes", "1", "--nproc-per-node", "3", "train.py"]
    result = folder.slurm.run("salloc", "--quiet", "-N2", "--ntasks-per-node=2", *command, cwd=folder.path)
    assert result.returncode == 0, result.stderr
    assert Counter(re.findall(r"I \d (\S+) \d 3 - (\d)", result.stdout)) == {("node1", "1"): 3}


def test_a_step_on_one_node_stays_there(folder: Folder) -> None:
    (folder.path / "train.py").write_text(SHOW)
    command = [sys.executable, "-m", "launcher", "run", "train.py"]
    result = folder.slurm.run(
        "salloc", "--quiet", "-N2", "--gpus-per-node=2",
        "srun", "--nodes=1", "--ntasks=1", "--nodelist=node2", "--gpus-per-node=1", *command, cwd=folder.path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert re.findall(r"I (\S+ \S+ \S+ \S+ \S+)", result.stdout) == ["0 node2 0 1 0"]


def test_the_exit_code_of_the_first_failure_is_the_jobs(folder: Folder) -> None:
    job = folder.submit("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)", "-N2")
    assert folder.ended(job, "FAILED") == "7:0"
    assert folder.said(r"rank 1 on node2 .*")
    assert folder.said("0 processes left on 2 hosts")


@pytest.mark.parametrize(
    ("tasks", "places"),
    [
        (["-n2"], ["0 node1 0 4", "1 node1 1 4", "2 node2 0 4", "3 node2 1 4"]),
        (["-n3", "--gpus-per-task=1"], ["0 node1 0 3 0 ", "1 node1 0 3 1 ", "2 node2 0 3 0 "]),
    ],
)
def test_tasks_that_srun_starts_take_their_places_in_one_run(
    folder: Folder, tasks: list[str], places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.path / "train.py").write_text(SHOW)
    workers = ["--nproc-per-node", "2"] if tasks == ["-n2"] else []
    command = [sys.executable, "-m", "launcher", "run", *workers, "train.py"]
    monkeypatch.setenv("DTRAIN_TOKEN", "somebody has one, for other runs")
    monkeypatch.setenv("SLURM_PTY_PORT", "33559")  # of the interactive shell in which srun is typed
    result = folder.slurm.run("srun", "-N2", *tasks, *command, cwd=folder.path)
    assert result.returncode == 0, result.stderr
    shown = sorted(re.findall(r"I (.*)", result.stdout))
    assert [line[: len(place)] for line, place in zip(shown, places, strict=True)] == places
    assert result.stderr.count("workers finished successfully") == 1, "only one of them speaks"
    assert not list((folder.path / "runs").glob(".slurm-*")), "nothing is left of how they met"


def test_a_cancelled_job_leaves_nothing(folder: Folder) -> None:
    job = folder.submit(WAIT, "-N2")
    folder.await_up(2)
    folder.slurm.say("scancel", job)
    folder.ended(job, "CANCELLED")
    wait_until(lambda: not any(map(folder.slurm.steps, folder.slurm.names)), "no step is left")


def test_a_node_that_dies_ends_the_run_and_is_named(folder: Folder) -> None:
    job = folder.submit(WAIT, "-N2", "--no-kill", run=" ".join(LEASE))
    folder.await_up(2)
    folder.slurm.crash("node2")
    folder.await_said("processes left on")
    assert folder.said("host node2 was lost")
    folder.slurm.boot("node2")
    assert folder.ended(job, "FAILED") == "1:0"


def test_a_connection_opened_at_the_end_leaves_no_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\necho an agent\nexec sleep 600\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    way = Srun()
    way._known = (Allocation("1", (Node("n1.invalid"),), None), {"n1.invalid": ()})
    before = psutil.Process().children()
    way.close()  # after connect() has found the run going on, and before it knows of its srun
    with pytest.raises(HostError, match="the run has ended"):
        way.connect(Host("n1.invalid", HostKind.SRUN), ["python"], time.monotonic() + 60)
    assert psutil.Process().children() == before


def test_an_agent_that_is_killed_is_named(folder: Folder) -> None:
    folder.submit(WAIT, "-N2")
    folder.await_up(2)
    agents = [p for step in folder.slurm.steps("node2") for p in step.children(recursive=True) if is_agent(p)]
    max(agents, key=lambda agent: (agent.create_time(), agent.pid)).kill()  # of guard and agent the second
    folder.await_said("processes left on")
    assert folder.said("host node2 was lost.*: its agent was killed")


def is_agent(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()[-2:] == ["-m", "launcher.agent"]
    return False


def test_a_cancelled_step_ends_the_run_and_names_a_node(folder: Folder) -> None:
    job = folder.submit(WAIT, "-N2")
    folder.await_up(2)
    steps = re.findall(rf"StepId=({job}\.\d+)", folder.slurm.say("scontrol", "show", "step", job))
    folder.slurm.say("scancel", *steps)
    folder.await_said("processes left on")
    # Its signal reaches workers, agents and tasks alike: which of them dtrain hears of first is chance.
    cause = r"(?:host|on) node\d .*(?:CANCELLED AT|was killed|was lost|sent it SIGTERM)"
    assert folder.said(cause), folder.log.read_text()


def test_without_dtrain_its_steps_end(folder: Folder) -> None:
    job = folder.submit(WAIT, "-N2")
    folder.await_up(2)
    conf = str(folder.slurm.config)
    (dtrain,) = [process for process in psutil.process_iter() if is_dtrain(process, job, conf)]
    dtrain.kill()
    wait_until(lambda: not any(map(folder.slurm.steps, folder.slurm.names)), "no step is left")


def is_dtrain(process: psutil.Process, job: str, conf: str) -> bool:
    """Whether it is the controller of a job's run: the process above its sruns."""
    with contextlib.suppress(psutil.Error):
        if any(child.name() == "srun" for child in process.children()) and process.name() != "srun":
            environ = process.environ()
            return (environ.get("SLURM_JOB_ID"), environ.get("SLURM_CONF")) == (job, conf)
    return False


def test_usr1_reaches_every_worker_once(folder: Folder) -> None:
    job = folder.submit(SIGNALLED, "-N2")
    folder.await_up(2)
    folder.slurm.say("scancel", "--signal=USR1", "--batch", job)
    assert folder.ended(job) == "0:0"
    assert folder.said(r"signals (\d)") == ["1", "1"]


def test_the_tasks_of_an_array_are_runs_of_their_own(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    (folder.path / "train.py").write_text("import sys\nprint('with', *sys.argv[1:])")
    script = str(REPOSITORY / "scripts" / "slurm" / "array.sbatch")
    words = ["--array=0-1", f"--output={folder.log}", "--open-mode=append", script, "train.py", "--fast"]
    job = folder.slurm.say("sbatch", "--parsable", *words, cwd=folder.path, outlived=True)
    for task in (0, 1):
        folder.ended(f"{job}_{task}")
    assert sorted(folder.said(r"with (.*)")) == ["--fast --lr 1e-2", "--fast --lr 1e-3"]
    assert len(list(folder.path.glob(f"runs/slurm-{job}_[01]*/attempt_0/0/stdout.log"))) == 2


def test_a_job_that_makes_room_goes_on_when_it_is_queued_again(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    (folder.path / "train.py").write_text(TRAIN)
    script = str(REPOSITORY / "scripts" / "slurm" / "preempt_requeue.sbatch")
    words = ["--nodes=2", f"--output={folder.log}", script, "train.py"]
    job = folder.slurm.say("sbatch", "--parsable", *words, cwd=folder.path, outlived=True)
    folder.await_up(2)
    folder.slurm.say("scancel", "--signal=USR1", "--batch", job)
    folder.slurm.start_now(job)
    assert folder.ended(job) == "0:0"
    goes_on = r"goes on from (\d+) in attempt 1"
    folder.await_said("requeueing the job")
    folder.await_said(goes_on, 2)
    assert set(folder.said(goes_on)) == set(folder.said(r"saved (\d+)")[-1:])


def test_dtrain_sbatch_submits_what_was_typed(folder: Folder) -> None:
    (folder.path / "my train.py").write_text("import sys\nprint('args', sys.argv[1:])")
    args = ["it's", '"', "$(touch pwned)", "`touch pwned`", "new\nline"]
    comment = 'a "b" \\ # $(touch pwned)'
    words = ["--parsable", "-N", "2", "--output", str(folder.log), "--comment", comment, "--", "my train.py", *args]
    submit = [sys.executable, "-m", "launcher", "sbatch"]
    job = folder.slurm.say(*submit, *words, cwd=folder.path, outlived=True)
    assert folder.ended(job) == "0:0"
    assert folder.said(r"args (.*)") == [repr(args)] * 2
    facts = folder.slurm.say("scontrol", "show", "job", job)
    assert f"Comment={comment} " in f"{facts} "
    assert "JobName=my_train" in facts
    assert not (folder.path / "pwned").exists()


def test_a_job_that_a_step_submits_is_no_step(folder: Folder) -> None:
    inner = (
        f"#!/bin/bash\n#SBATCH -N1 --nodelist=node2 --output={folder.log}\nenv; echo; grep -az . /proc/$PPID/cmdline"
    )
    (folder.path / "inner.sh").write_text(inner)
    outer = ["salloc", "--quiet", "-N1", "--nodelist=node2", "srun", "sbatch", "--parsable", "inner.sh"]
    job = folder.slurm.say(*outer, cwd=folder.path, outlived=True).splitlines()[-1]
    folder.ended(job)
    text = folder.log.read_text()
    env = dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)
    assert env["SLURM_STEP_NODELIST"] == "node2"  # of the step that submitted it
    title = present(re.search(r"slurmstepd: \[(.*?)\]", text))
    assert title[1] == f"{job}.batch"
    assert find_step(env, title[1]) is None


def test_code_is_sent_to_the_nodes_and_files_are_fetched(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.path.parent / "cache"))
    text = (
        "import os\nprint('I', __file__.count('/cache/dtrain/code/'))\nopen('out.pt', 'w').write(os.environ['RANK'])\n"
    )
    job = folder.submit(text, "-N2", run="--sync code --fetch *.pt --run-id job")
    assert folder.ended(job) == "0:0"
    assert folder.said(r"I (.*)") == ["1", "1"]
    fetched = sorted((folder.path / "runs/job/fetched").glob("*/out.pt"))
    assert [path.read_text() for path in fetched] == ["0", "1"]
    assert [path.parent.name for path in fetched] == ["node1", "node2"]
