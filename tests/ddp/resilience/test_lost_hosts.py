"""Hosts are lost while resilient workers train, and come back: no process of the others ends. Real sshd."""

import re
import time
from pathlib import Path

import pytest
from testbed.processes import LEASE, run_dtrain, started_dtrain
from testbed.sshd import SshHosts
from testbed.training_seen import TrainingSeen, training

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.timeout(600)]  # warm: for the runs without hosts
SCRIPT = Path(__file__).parents[2] / "programs" / "elastic.py"
LIMIT_S = 120.0


def options(hosts: SshHosts, *more: str) -> list[str]:
    return [
        "run", "--ssh-config", str(hosts.ssh_config), "--nproc-per-node", "1", *LEASE, *more,
        str(SCRIPT),
    ]  # fmt: skip


def test_a_spare_host_takes_over_and_no_bit_changes(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    argv = options(ssh_hosts, "--hosts", "node1,node2,node3", "--nnodes", "2", "--max-restarts", "2")
    with training(*argv, "2", "0.1", cwd=tmp_path) as seen:
        seen.wait(lambda: len(seen.sized(2)) > 20)
        ssh_hosts.stop(2)
        seen.wait(lambda: any(at.host == "node3" for at in seen.commits))
    assert "generation 2 goes on with 2 workers on 2 hosts, without node2, with node3" in seen.stderr
    assert {at.host: at.rank for at in seen.commits} == {"node1": 0, "node2": 1, "node3": 1}
    assert len({at.pid for at in seen.commits if at.host == "node1"}) == 1
    plain = run_dtrain(
        "run", "--nproc-per-node", "2", SCRIPT, "2", "0", cwd=tmp_path, env={"DTRAIN_BACKEND": "gloo"}
    )  # fmt: skip
    assert plain.returncode == 0, plain
    assert seen.said("result") == {*re.findall(r"\] result (.*)$", plain.stdout, re.MULTILINE)}
    assert seen.said("counts") == {"1 1 0"}


def test_the_world_shrinks_without_a_lost_host_and_grows_with_it(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    argv = options(ssh_hosts, "--hosts", "node1,node2,node3", "--nnodes", "1:3")
    with training(*argv, "3", "0.2", cwd=tmp_path) as seen:
        seen.wait(lambda: len(seen.sized(3)) > 15)
        lost = time.monotonic()
        ssh_hosts.stop(3)
        seen.wait(lambda: len(seen.sized(2)) > 10)
        ssh_hosts.start(3)
        seen.wait(lambda: len(seen.sized(3, after=lost + 3)) > 10)
    assert "attempt 1" not in seen.stderr, seen.stderr
    assert "goes on with 2 workers on 2 hosts, without node3" in seen.stderr
    assert "goes on with 3 workers on 3 hosts, with node3" in seen.stderr
    pids = {host: {at.pid for at in seen.commits if at.host == host} for host in ("node1", "node2", "node3")}
    assert {host: len(found) for host, found in pids.items()} == {"node1": 1, "node2": 1, "node3": 2}
    steps = [at.step for at in seen.commits if at.host == "node1"]
    assert steps == sorted({*steps}), "no step was made twice"
    missed = {*range(1, steps[-1])} - {*steps}
    assert len(missed) <= 1, "the commit at which all met node3 ends the function before it is printed"
    least, most, more = (int(word) for word in next(iter(seen.said("counts"))).split())
    assert least == 1
    assert most <= 2
    assert more <= 2, "the rest of an epoch is padded to three equal shares once"


@pytest.mark.parametrize("joins_again", [False, True])
def test_the_global_batch_of_a_strategy_stays_what_it_was(
    ssh_hosts: SshHosts, tmp_path: Path, joins_again: bool
) -> None:
    """10 samples a step, of which three ranks have 4, 3 and 3, and two ranks 5 each: the same steps in the end."""
    epochs, pause_s = ("4", "0.25") if joins_again else ("2", "0.15")
    argv = options(ssh_hosts, "--hosts", "node1,node2,node3", "--nnodes", "1:3")
    with training(*argv, epochs, pause_s, "10", cwd=tmp_path) as seen:
        seen.wait(lambda: len(seen.sized(3)) > 15)
        lost = time.monotonic()
        ssh_hosts.stop(3)
        seen.wait(lambda: len(seen.sized(2)) > 10)
        if joins_again:
            ssh_hosts.start(3)
            seen.wait(lambda: len(seen.sized(3, after=lost + 3)) > 10)
    assert "attempt 1" not in seen.stderr, seen.stderr
    assert seen.said("counts") == {"1 1 0"}, "each sample once in each epoch"
    plain = run_dtrain(
        "run", "--nproc-per-node", "3", SCRIPT, epochs, "0", "10", cwd=tmp_path, env={"DTRAIN_BACKEND": "gloo"}
    )  # fmt: skip
    assert plain.returncode == 0, plain
    steps, *sums = map(float, next(iter(seen.said("result"))).split())
    assert steps == int(epochs) * 480 / 10
    (expected,) = {*re.findall(r"\] result \S+ (.*)$", plain.stdout, re.MULTILINE)}
    assert sums == pytest.approx([float(word) for word in expected.split()], rel=1e-3)


def test_without_the_host_of_the_store_others_meet_elsewhere(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    argv = options(ssh_hosts, "--hosts", "node1,node2,node3", "--nnodes", "1:3")
    with training(*argv, "2", "0.1", cwd=tmp_path) as seen:
        seen.wait(lambda: len(seen.sized(3)) > 15)
        ssh_hosts.stop(1)
        seen.wait(lambda: len(seen.sized(2)) > 10)
    assert "attempt 1" not in seen.stderr, seen.stderr
    assert "goes on with 2 workers on 2 hosts, without node1" in seen.stderr
    assert {at.host: at.rank for at in seen.sized(2)} == {"node2": 0, "node3": 1}, "they have other ranks now"
    assert len({(at.host, at.pid) for at in seen.commits}) == 3
    assert seen.said("counts") == {"1 1 0"}, "each sample of each epoch came once"
    assert len(seen.said("result")) == 1


def test_where_not_all_are_resilient_all_start_again(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.read_text().replace("@ddp.resilient\n", ""))
    argv = [*options(ssh_hosts, "--hosts", "node1,node2", "--nnodes", "1:2")[:-1], str(script)]
    with started_dtrain(*argv, "1", "0.05", cwd=tmp_path) as process:
        seen = TrainingSeen(process)
        seen.wait(lambda: len(seen.sized(2)) > 10)
        ssh_hosts.stop(2)
        (tmp_path / "quick").touch()
        assert process.wait(LIMIT_S) == 0
        assert b"attempt 1 begins on 1 host, without node2" in process.stderr.read()


FIT = """
import os, time, torch, ddp
from ddp.callbacks import Callback
from torch import nn

class Says(Callback):
    def on_step_end(self, step, logs):
        place = (os.environ[name] for name in ("WORLD_SIZE", "RANK"))
        print("at", step, *place, os.getpid(), os.environ["DTRAIN_HOST"], time.monotonic(), flush=True)
        time.sleep(0 if os.path.exists("quick") else 0.1 if step < 20 else 2)  # a host may come late

torch.manual_seed(1)
net = nn.Linear(6, 3)
data = torch.utils.data.TensorDataset(torch.randn(240, 6), torch.randint(3, (240,)))
trainer = ddp.Trainer(net, torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss(), callbacks=[Says()])
trainer.fit(data, epochs=2, global_batch_size=4)
print("result", trainer.step, flush=True)
"""


def test_all_start_again_where_a_fit_loses_a_host(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    script.write_text(FIT)
    argv = [*options(ssh_hosts, "--hosts", "node1,node2", "--nnodes", "1:2")[:-1], str(script)]
    with training(*argv, cwd=tmp_path, env={"DTRAIN_BACKEND": "gloo"}) as seen:
        seen.wait(lambda: len(seen.sized(2)) > 10)
        ssh_hosts.stop(2)
    assert "attempt 1 begins on 1 host, without node2" in seen.stderr, seen.stderr
    assert "generation" not in seen.stderr, "no rank was asked to go on in a smaller world"
    assert seen.said("result") == {"120"}


def test_all_start_again_where_a_host_joins_a_fit(ssh_hosts: SshHosts, tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    script.write_text(FIT)
    argv = [*options(ssh_hosts, "--hosts", "node1,node2", "--nnodes", "1:2", "--grow")[:-1], str(script)]
    with training(*argv, cwd=tmp_path, env={"DTRAIN_BACKEND": "gloo"}) as seen:
        seen.wait(lambda: len(seen.sized(2)) > 10)
        ssh_hosts.stop(2)
        seen.wait(lambda: len(seen.sized(1)) > 5)
        alone = time.monotonic()
        ssh_hosts.start(2)
        seen.wait(lambda: seen.sized(2, after=alone))
    assert "attempt 1 begins on 1 host, without node2" in seen.stderr, seen.stderr
    assert "attempt 2 begins on 2 hosts, with node2" in seen.stderr, seen.stderr
    assert "generation" not in seen.stderr, "no rank was asked to meet it"
    assert {at.pid for at in seen.sized(2)}.isdisjoint({at.pid for at in seen.sized(1)})
    assert seen.said("result") == {"120"}
