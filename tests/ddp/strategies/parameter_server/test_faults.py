"""Parameter servers under dtrain when something dies: a worker, a server, the network for some seconds.

Each start imports torch in every process, so that one run shows several things.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from testbed.network import NetworkHosts
from testbed.processes import Program, run_dtrain, started_dtrain
from testbed.sshd import SshHosts

from ddp.errors import ParameterServerError
from ddp.strategies.parameter_server.client import Client

# Trains a small model; says who it is, where it joins, each epoch, and whether it has learnt. In sync mode, replica 0
# makes the same training alone: each step on the mean of the replicas' gradients.
SCRIPT = """\
import json, os, pathlib, sys, time
import torch
from torch.nn import functional as F
import ddp
from ddp.data.replica_loader import ReplicaLoader

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
options, epochs, pause_s = json.loads(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
folder = pathlib.Path(sys.argv[4])
who, life = os.environ["ROLE_NAME"] + os.environ["ROLE_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("is", who, os.getpid(), flush=True)
strategy = ddp.strategy("parameter_server", **options)
torch.manual_seed(0)
x = torch.randn(160, 5)
y = (x @ torch.randn(5, 3)).argmax(1)
data = torch.utils.data.TensorDataset(x, y)

def build():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
    return model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

def is_better(model):
    return F.cross_entropy(model(x), y) < 0.5 * F.cross_entropy(build()[0](x), y)

def await_life(of, number):
    deadline = time.monotonic() + 100
    while not (folder / f"{of} {number}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)

model, optimizer = strategy.prepare(*build())
(folder / f"{who} {life}").touch()
print("joined", who, strategy.step, flush=True)
if strategy.role == "evaluator":
    steps = list(strategy.evaluations(every_s=0.1))
    print("evaluated", len(steps), steps[-1], is_better(model).item(), flush=True)
    sys.exit()
loader = strategy.loader(data, global_batch_size=16, shuffle=True)
if len(sys.argv) > 5 and life == "0":
    await_life("worker0", 0)
    await_life("worker1", 0)
made = 0
for epoch in loader.epochs(epochs):
    for a, b in loader:
        strategy.mean(F.cross_entropy(model(a), b, reduction="none")).backward()
        optimizer.step()
        optimizer.zero_grad()
        made += 1
        time.sleep(pause_s)
    print("epoch", who, epoch, strategy.step, flush=True)
    if epoch == 5 and len(sys.argv) > 5:
        await_life(sys.argv[5], 1)
    if epoch == 7 and len(sys.argv) > 5:
        await_life("ps0", "stopped")
    if epoch == 8 and len(sys.argv) > 5:
        await_life("ps0", "killed")
strategy.sync()
print("ended", who, made, strategy.step, is_better(model).item(), flush=True)
if options.get("mode", "sync") == "sync" and strategy.is_main:
    alone, its_optimizer = build()
    shares = [ReplicaLoader(data, global_batch_size=16, replica=r, replicas=2, shuffle=True) for r in range(2)]
    for epoch in range(epochs):
        for pair in zip(*shares):
            grads = [torch.autograd.grad(F.cross_entropy(alone(a), b, reduction="sum") / 16 * 2, alone.parameters())
                     for a, b in pair]
            for parameter, mine, other in zip(alone.parameters(), *grads):
                parameter.grad = (mine + other) / 2
            its_optimizer.step()
    print("same bits", all(map(torch.equal, model.parameters(), alone.parameters())), flush=True)
"""


class Run:
    """The output of a run, read line by line."""

    def __init__(self, process: Program) -> None:
        self.process = process
        self.lines: list[list[str]] = []

    def until(self, *words: str) -> list[str]:
        """Read until a line begins with these words; return the rest of it."""
        while line := self.process.stdout.readline().decode():
            said = re.sub(r"^\[[^]]*\] ", "", line).split()
            self.lines.append(said)
            if said[: len(words)] == list(words):
                return said[len(words) :]
        raise AssertionError(f"it ended without {words}: {self.lines} {self.process.stderr.read().decode()}")

    def end(self) -> tuple[int, str]:
        """Read the rest; return the exit code and what dtrain and the workers said on stderr."""
        out, err = self.process.communicate(timeout=60)
        self.lines += [re.sub(r"^\[[^]]*\] ", "", line).split() for line in out.decode().splitlines()]
        return self.process.returncode, err.decode()

    def pid(self, who: str, life: int = -1) -> int:
        return int(self.said("is", who)[life][0])

    def said(self, *words: str) -> list[list[str]]:
        return [line[len(words) :] for line in self.lines if line[: len(words)] == list(words)]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def _argv(script: Path, launching: list[str | Path], options: dict[str, object], *more: str) -> list[str | Path]:
    return ["run", *launching, script, json.dumps(options), *more]


def test_lost_workers_and_servers_come_back_to_where_training_is(ssh_hosts: SshHosts, script: Path) -> None:
    """A worker is killed; a server is stopped, and killed."""
    every = 20
    options = {"mode": "async", "snapshots": str(script.parent / "snapshots"), "snapshot_every": every}
    hosts: list[str | Path] = ["--ssh-config", ssh_hosts.ssh_config, "--hosts", "node1,node2", "--nproc-per-node", "1"]
    launching = [*hosts, "--ps", "1", "--evaluator", "--max-restarts", "4", "--hang", "auto"]
    argv = _argv(script, launching, options, "10", "0.02", str(script.parent), "worker1")
    with started_dtrain(*argv, cwd=script.parent) as process:
        run = Run(process)
        run.until("epoch", "worker1", "1")
        os.kill(run.pid("worker1"), signal.SIGKILL)
        joined = int(run.until("joined", "worker1")[0])
        assert 20 <= joined <= 60, "where the other has come to, who went on to epoch 5"
        if not run.said("epoch", "worker0", "5"):
            run.until("epoch", "worker0", "5")
        reached = int(run.until("epoch", "worker0", "7")[0])
        os.kill(run.pid("ps0"), signal.SIGSTOP)  # the others wait, and no socket breaks
        (script.parent / "ps0 stopped").touch()
        run.until("is", "ps0")
        again = int(run.until("epoch", "worker0", "8")[0])
        os.kill(run.pid("ps0"), signal.SIGKILL)
        (script.parent / "ps0 killed").touch()
        code, stderr = run.end()
    assert code == 0, stderr
    assert f"(pid {run.pid('ps0', 0)}) hangs: a signal stopped it" in stderr
    assert "; only this worker restarts (restart 1 of 4)" in stderr
    assert "; only this worker restarts (restart 2 of 4)" in stderr
    assert "; only this worker restarts (restart 3 of 4)" in stderr
    snapshot = [int(step) for step in re.findall(r"continues from the snapshot of step (\d+)", stderr)]
    assert len(snapshot) == 2
    # The last one may have been on its way to the disk.
    assert reached - 2 * every <= snapshot[0] <= 100
    assert again - 2 * every <= snapshot[1] <= 100
    ended = {line[0]: line[1:] for line in run.said("ended")}
    assert ended["worker0"] == ["100", "100", "True"]
    assert ended["worker1"][1:] == ["100", "True"]
    assert int(ended["worker1"][0]) == 100 - joined, "what was trained on before it joined is left out"
    ((count, last, is_better),) = run.said("evaluated")
    assert int(count) > 2
    assert (last, is_better) == ("100", "True")


def test_without_restarts_the_others_train_to_the_end(script: Path) -> None:
    launching: list[str | Path] = ["--ps", "1", "--nproc-per-node", "2"]
    argv = _argv(script, launching, {"mode": "bounded", "lost_after_s": 1.5}, "8", "0.02", str(script.parent))
    with started_dtrain(*argv, cwd=script.parent) as process:
        run = Run(process)
        run.until("epoch", "worker1", "0")
        os.kill(run.pid("worker1"), signal.SIGKILL)
        code, stderr = run.end()
    assert code == 137, stderr
    assert "; the other workers continue without it" in stderr
    assert "worker 1 has been silent for" in stderr
    assert run.said("ended") == [["worker0", "80", "80", "True"]]


def test_a_cut_of_the_network_changes_no_bit(network_hosts: NetworkHosts, script: Path) -> None:
    hosts: list[str | Path] = ["--ssh-config", network_hosts.ssh_config, "--hosts", "far1,far2", "--ps", "1"]
    launching = [*hosts, "--nproc-per-node", "1", "--heartbeat-timeout-s", "30"]
    argv = _argv(script, launching, {}, "6", "0.02", str(script.parent))
    with started_dtrain(*argv, cwd=script.parent) as process:
        run = Run(process)
        run.until("epoch", "worker0", "0")
        network_hosts.cut("far2")
        time.sleep(3)  # the fault's length
        network_hosts.mend("far2")
        code, stderr = run.end()
    assert code == 0, stderr
    assert sorted(run.said("ended")) == [[who, "60", "60", "True"] for who in ("worker0", "worker1")]
    assert run.said("same", "bits") == [["True"]]


@pytest.mark.parametrize("held", [True, False])
def test_the_wait_for_servers_has_no_end_under_a_debugger(
    held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a worker whose servers wait for the gradients of a rank that stands at a prompt."""
    (tmp_path / "debugger").write_text("open" if held else "0.0")
    monkeypatch.setenv("DTRAIN_DEBUGGER_FILE", str(tmp_path / "debugger"))
    client = Client.__new__(Client)
    client._links, client._options = [], SimpleNamespace(timeout_s=0.1)  # type: ignore[assignment]
    monkeypatch.setattr(client, "_pump", lambda wait_s: time.sleep(0.02))
    monkeypatch.setattr(client, "_why", lambda *_: "nothing has come")
    until = time.monotonic() + 1.0  # many times the limit
    if held:
        client._wait(lambda: time.monotonic() > until)
        return
    with pytest.raises(ParameterServerError, match="nothing has come"):
        client._wait(lambda: False)


FIT = """\
import os, pathlib, signal, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import ddp
from ddp import callbacks as cb

class Dies(cb.Callback):
    def on_step_end(self, step, logs):
        if (strategy.replica, step) == (1, 5) and not pathlib.Path("died").exists():
            pathlib.Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(80, 6), torch.arange(80) % 3)
strategy = ddp.strategy("parameter_server", mode=sys.argv[1], timeout_s=30.0)
net = nn.Linear(6, 3)
optimizer = torch.optim.SGD(net.parameters(), 0.05)
trainer = ddp.Trainer(net, optimizer, nn.CrossEntropyLoss(), strategy=strategy, callbacks=[Dies()], seed=1)
history = trainer.fit(data, epochs=3, validation=data, global_batch_size=10)
print("ended", strategy.replica, trainer.step, trainer.epoch, history["val_loss"][-1], flush=True)
"""


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_a_worker_that_restarts_within_a_fit_goes_on_with_the_others(tmp_path: Path, mode: str) -> None:
    """It meets them at the end of the epoch, not where `fit` begins."""
    (tmp_path / "fit.py").write_text(FIT)
    launching = ["--ps", "1", "--nproc-per-node", "2", "--max-restarts", "1"]
    result = run_dtrain("run", *launching, "fit.py", mode, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "only this worker restarts (restart 1 of 1)" in result.stderr
    ended = sorted(re.findall(r"ended (\d) (\d+) (\d) (.*)", result.stdout))
    assert [line[:3] for line in ended] == [("0", "24", "3"), ("1", "24", "3")]
    if mode == "sync":
        assert ended[0][3] == ended[1][3]
