"""TensorFlow's strategies train under dtrain to the numbers of one process, and the run ends with those that lead."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from testbed import REPOSITORY
from testbed.processes import Result, run_dtrain, run_program
from testbed.require import require
from testbed.sshd import SshHosts

PROGRAMS = REPOSITORY / "tests/programs"
MIRRORED = PROGRAMS / "tf_mirrored.py"
SERVERS = PROGRAMS / "tf_servers.py"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
LIMIT_S = 150.0  # TensorFlow alone takes 5 s of a core to import

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module", autouse=True)
def _tensorflow() -> None:
    require(find_spec("tensorflow"), "tensorflow", "scripts/test --full")


# ---- the same on every worker ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def losses_alone() -> dict[int, float]:
    ((_, losses),) = _losses(_alone(MIRRORED)).items()
    assert len(losses) == 6
    return losses


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        (["--nproc-per-node", "3", "--env-for", "tf"], {"worker 0", "worker 1", "worker 2"}),
        (["--simulate", "--nnodes", "2", "--nproc-per-node", "1", "--chief"], {"chief 0", "worker 0"}),
    ],
)
def test_mirrored_workers_compute_what_one_process_does(
    options: list[str], trained: set[str], losses_alone: dict[int, float], tmp_path: Path
) -> None:
    result = _train(*options, MIRRORED, cwd=tmp_path)
    assert result.returncode == 0, result
    _assert_trained(result, trained, losses_alone)
    assert f"all {len(trained)} workers finished successfully" in result.stderr


def test_an_evaluator_over_ssh_is_stopped_at_the_end(
    ssh_hosts: SshHosts, losses_alone: dict[int, float], tmp_path: Path
) -> None:
    hosts = ["--hosts", "node1,node2", "--ssh-config", str(ssh_hosts.ssh_config)]
    result = _train(*hosts, "--chief", "--evaluator", MIRRORED, "--checkpoints", tmp_path, cwd=tmp_path)
    assert result.returncode == 0, result
    _assert_trained(result, {"chief 0", "worker 0"}, losses_alone)
    (evaluated,) = re.findall(r"^\[node1:2\] evaluator loss ([\d.]+)$", result.stdout, re.MULTILINE)
    assert float(evaluated) < losses_alone[5]
    assert "2 workers finished successfully after" in result.stderr
    assert "1 of other roles stopped; 0 processes left on 2 hosts" in result.stderr


def test_the_worker_that_raises_is_named(tmp_path: Path) -> None:
    # It handles TERM itself, and waits: it ends by KILL.
    options = ["--nproc-per-node", "3", "--chief", "--grace-s", "1"]
    result = _train(*options, MIRRORED, "--fail-at", "2", cwd=tmp_path)
    assert result.returncode == 1, result
    said = [line for line in result.stderr.splitlines() if line.startswith("dtrain: ")]
    assert re.fullmatch(r"dtrain: rank 2 on \S+ \(pid \d+\) raised an exception after [\d.]+ s", said[0])
    assert said[1] == "dtrain:   ArithmeticError: this worker gives up"
    assert "0 processes left on 1 host" in result.stderr


# ---- parameter servers -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def numbers_alone() -> list[float]:
    numbers = _numbers(_alone(SERVERS))
    assert len(numbers) == 6 + 5
    return numbers


@pytest.fixture(params=["here", "simulated", "ssh"])
def for_servers(request: pytest.FixtureRequest) -> list[str]:
    """Options for a chief and at least one worker."""
    if request.param == "here":
        return ["--nproc-per-node", "3"]
    if request.param == "simulated":
        return ["--simulate", "--nnodes", "2", "--nproc-per-node", "1"]
    hosts: SshHosts = request.getfixturevalue("ssh_hosts")
    return ["--hosts", "node1,node2", "--ssh-config", str(hosts.ssh_config)]


def test_a_coordinator_trains_with_servers_and_ends_the_run(
    for_servers: list[str], numbers_alone: list[float], tmp_path: Path
) -> None:
    result = _train(*for_servers, "--chief", "--ps", "2", SERVERS, cwd=tmp_path)
    assert result.returncode == 0, result
    assert _numbers(result) == pytest.approx(numbers_alone, abs=1e-9)
    served = re.findall(r"((?:ps|worker) \d) serves at grpc://(\S+)", result.stdout)
    workers = ["worker 0", "worker 1"][: 1 if len(for_servers) > 2 else 2]
    assert sorted(name for name, _ in served) == ["ps 0", "ps 1", *workers]
    assert len({at for _, at in served}) == len(served)
    assert "1 worker finished successfully after" in result.stderr
    assert f"{len(served)} of other roles stopped; 0 processes left" in result.stderr


@pytest.mark.parametrize(("role", "rank"), [("ps", 4), ("worker", 2)])
def test_a_server_that_is_killed_is_the_cause(role: str, rank: int, tmp_path: Path) -> None:
    options = ["--nproc-per-node", "3", "--chief", "--ps", "2", "--grace-s", "1"]
    result = _train(*options, SERVERS, "--die", role, cwd=tmp_path)
    assert result.returncode == 128 + 9, result
    assert re.search(rf"^dtrain: rank {rank} on \S+ \(pid \d+\) was killed by SIGKILL", result.stderr, re.MULTILINE)
    assert "4 workers stopped by dtrain" in result.stderr or "3 workers stopped by dtrain" in result.stderr
    assert "0 processes left on 1 host" in result.stderr


# ---- what they print -------------------------------------------------------------------------------------------


def _alone(program: Path) -> Result:
    result = run_program(sys.executable, program, env=QUIET, timeout=LIMIT_S)
    assert result.returncode == 0, result
    return result


def _train(*words: str | Path, cwd: Path) -> Result:
    return run_dtrain("run", "-x", "TF_CPP_MIN_LOG_LEVEL", *words, cwd=cwd, env=QUIET, timeout=LIMIT_S)


def _losses(result: Result) -> dict[str, dict[int, float]]:
    """The losses by task and step."""
    found: dict[str, dict[int, float]] = {}
    for task, step, loss in re.findall(r"((?:chief|worker) \d) step (\d+) loss ([\d.]+)", result.stdout):
        found.setdefault(task, {})[int(step)] = float(loss)
    return found


def _assert_trained(result: Result, tasks: set[str], losses_alone: dict[int, float]) -> None:
    losses = _losses(result)
    assert set(losses) == tasks
    for task in tasks:
        assert losses[task] == pytest.approx(losses_alone, abs=1e-9)
    assert result.stdout.count(f"trained with {len(tasks)} replicas") == len(tasks)


def _numbers(result: Result) -> list[float]:
    """The losses of all steps, then the weights."""
    (weights,) = re.findall(r"weights (.*)$", result.stdout, re.MULTILINE)
    losses = re.findall(r"step \d+ loss ([\d.]+)", result.stdout)
    return [float(number) for number in (*losses, *weights.split())]
