"""What every test shares: a clean environment, SSH hosts, and the check that nothing is left running."""

import gc
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Generator, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TypeVar

import hypothesis
import psutil
import pytest
from testbed import processes
from testbed.lab import Lab
from testbed.left import Watch, describe
from testbed.namespaces import find_part
from testbed.network import NetworkHosts
from testbed.nursery import Nursery
from testbed.once import folder_of_run
from testbed.pods import Pods
from testbed.processes import MARK, dtrain_server_if_started, everyone, keep_variables, kill, left_behind, run_dtrain
from testbed.quick import is_heavy, is_quick
from testbed.require import require
from testbed.seeds import Seeds
from testbed.slow import Share, are_named, select
from testbed.slurm import Node, SlurmCluster
from testbed.sshd import BareHosts, SshHosts, find_sshd
from testbed.warm import WarmProcess

from launcher.runs.registry import entries

LABS = pytest.StashKey[list[Lab]]()  # that run
L = TypeVar("L", bound=Lab)
LEFT_BEHIND_S = 20.0
# Whose tests take half a minute each: these come first, or one of them would be the last to end.
LONG = (
    "tests/ddp/resilience/",
    "tests/launcher/inspection/test_debug.py",
    "tests/launcher/runs/test_faults_on_purpose.py",
    "tests/launcher/runs/test_hang.py",
    "tests/test_examples.py",
    "tests/test_testbed_left.py",
)

# A developer's own settings, or the job that the tests themselves run in, must not reach the runs under test.
FOREIGN_PREFIXES = ("DTRAIN_", "SLURM_", "OMPI_", "PMIX_", "TORCHELASTIC_")
FOREIGN_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SSH_AUTH_SOCK",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests without processes, waiting and torch")
    parser.addoption(
        "--slow", metavar="K/N", help="also the K-th of N shares of the slow tests; with -m slow, only these"
    )
    parser.addoption("--seed", type=int, help="repeat the random tests of the run that had this seed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if is_test and config.getoption("quick") and is_heavy(collection_path) else None


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported, which is then left out of collections: a second of CPU time, and more later
    if config.option.seed is None:
        config.option.seed = random.randrange(2**32)  # pytest-xdist hands it to its processes
    if config.option.quick:
        config.option.warn_unused_snapshots = True  # of tests that are left out
    hypothesis.settings.register_profile(
        "quick",
        max_examples=30,
        derandomize=False,  # also where CI is set
        print_blob=True,
        deadline=None,  # a busy machine fails no test
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
    for name in tuple(os.environ):
        if name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES:
            del os.environ[name]
    os.environ["OMP_WAIT_POLICY"] = "passive"  # torch's threads that wait for work would use a core each
    keep_variables()
    # A shell starts what it puts into the background with Ctrl-C ignored, and nohup with SIGHUP: runs would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_unconfigure() -> None:
    if (server := dtrain_server_if_started()) is not None:
        server.close()


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        assert "torch" not in sys.modules, "to import it takes longer than all quick tests of a file"
        items[:] = [item for item in items if is_quick(item)]
    if not are_named(config.args):
        items[:], left_out, unknown = select(items, _share(config))
        if unknown and config.args == config.getini("testpaths") and not config.getoption("quick"):
            raise pytest.UsageError(f"tests/slow.txt names no test of that name: {min(unknown)}")
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    for item in items:
        if not {"ssh_hosts", "bare_hosts", "network_hosts", "pods"}.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.sshd)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _share(config: pytest.Config) -> Share | None:
    text = config.getoption("slow")
    return None if text is None else Share.of_option(text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and "seeds" in getattr(item, "fixturenames", ()):
        again = f"pytest '{item.nodeid}' --seed {item.config.option.seed}"
        report.sections.append(("seeds", f"{again}\nMend it, and keep the seed that failed: seeds(..., kept=[SEED])"))
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not _has_cuda():
        pytest.skip("needs a CUDA device that torch can use")
    if item.get_closest_marker("sshd"):
        require(find_sshd(), "sshd", "apt-get install openssh-server")


def _has_cuda() -> bool:
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))):
        return False
    import torch  # heavy: only where it may find a device

    return torch.cuda.is_available()


def _run_lab(request: pytest.FixtureRequest, lab: L) -> Iterator[L]:
    for part, package in lab.parts.items():
        require(find_part(part), part, f"apt-get install {package}")
    if reason := lab.why_not():  # in CI as well: nothing that could be installed would help
        pytest.skip(f"{type(lab).__name__} cannot run here: {reason}")
    with lab:
        request.config.stash.setdefault(LABS, []).append(lab)
        yield lab


@pytest.fixture(scope="session")
def _ssh_lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    yield from _run_lab(request, SshHosts(tmp_path_factory.mktemp("ssh")))


@pytest.fixture
def ssh_hosts(_ssh_lab: SshHosts) -> SshHosts:
    """Four running SSH hosts, node1 ... node4, with their first keys whatever the last test did to them."""
    _ssh_lab.reset()
    return _ssh_lab


@pytest.fixture(scope="session")
def _bare_lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BareHosts]:
    yield from _run_lab(request, BareHosts(tmp_path_factory.mktemp("bare")))


@pytest.fixture
def bare_hosts(_bare_lab: BareHosts) -> BareHosts:
    """Two SSH hosts, node1 and node2, that have a Python and nothing else: no project, no dtrain, no packages."""
    _bare_lab.reset()
    return _bare_lab


@pytest.fixture(scope="session")
def _network_lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkHosts]:
    yield from _run_lab(request, NetworkHosts(tmp_path_factory.mktemp("network")))


@pytest.fixture
def network_hosts(_network_lab: NetworkHosts) -> NetworkHosts:
    """Three hosts, far1 ... far3, on which network faults can be made; all are well whatever the last test did.

    What runs on them at the end of a test counts as left behind, on a host that is cut off as on any other.
    """
    _network_lab.reset()
    return _network_lab


@pytest.fixture
def pods(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    """The network of stand-ins for pods."""
    yield from _run_lab(request, Pods(tmp_path_factory.mktemp("pods")))


@pytest.fixture(scope="session")
def _slurm_lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    nodes = (Node(cpus=4, gpus=2), Node(cpus=4, gpus=2), Node(cpus=2, gpus=1))
    yield from _run_lab(request, SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes))


@pytest.fixture
def slurm(_slurm_lab: SlurmCluster) -> SlurmCluster:
    """A real SLURM cluster of three unequal nodes, node1 ... node3, all idle whatever the last test did to it."""
    _slurm_lab.reset()
    return _slurm_lab


@pytest.fixture(scope="session")
def _warm_lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmProcess]:
    yield from _run_lab(request, WarmProcess(tmp_path_factory.mktemp("warm")))


@pytest.fixture
def warm(_warm_lab: WarmProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the runs of scripts that import what testbed.warm.HEADER does fork their workers from a warm process."""
    for name, value in _warm_lab.env.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """One process that has torch imported, from which worlds of ranks are forked; pytest's processes share it."""
    with Nursery(folder_of_run(tmp_path_factory)) as nursery:
        yield nursery


@pytest.fixture(params=["here", "simulated", "ssh"])
def where(request: pytest.FixtureRequest) -> list[str]:
    """Options for two workers: on this machine, on two simulated hosts, on two SSH hosts."""
    if request.param == "here":
        return ["--nproc-per-node", "2"]
    if request.param == "simulated":
        return ["--simulate", "--nnodes", "2", "--nproc-per-node", "1"]
    hosts: SshHosts = request.getfixturevalue("ssh_hosts")
    return ["--hosts", "node1,node2", "--ssh-config", str(hosts.ssh_config)]


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Seeds:
    """The seeds of this test, other ones in each run."""
    return Seeds(request.config.option.seed, request.node.nodeid)


@pytest.fixture(autouse=True)
def start_by_exec_in_turn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this test start `dtrain` by exec, as users do, if it is in the share of `--slow`."""
    share = _share(request.config)
    monkeypatch.setattr(processes, "by_exec", share is not None and share.has(request.node.nodeid))


@pytest.fixture(autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the runs of a test out of the user's own list, and its temporary files apart from those of others."""
    folder = tmp_path_factory.getbasetemp() / "own" / uuid.uuid4().hex[:8]
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    (folder / "temp").mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(folder / "temp"))


@pytest.fixture
def own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which the test types, with a list of runs of its own in `state`, which all end with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield tmp_path
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # which the test may have changed
    for entry in entries():
        if not entry.state and entry.lives and entry.pid != os.getpid():
            run_dtrain("stop", "--kill", entry.run_id)


@pytest.fixture(autouse=True)
def nothing_left_behind(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, own_folders: None
) -> Iterator[None]:
    """Fail the test that leaves something of a program when that has ended, or anything soon after the test.

    That is a process, here or on a host of a lab, a temporary file, a socket, shared memory, or a control group.
    """
    if request.config.getoption("quick"):  # starts none, and to look takes longer than most of these tests
        yield
        return
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    labs = request.config.stash.setdefault(LABS, [])
    before = everyone()
    watch = Watch.current = Watch(mark, labs)
    variables = dict(os.environ)
    traces = watch.traces(variables)
    yield
    Watch.current = None
    if not watch.is_sure:
        monkeypatch.setenv("XDG_STATE_HOME", variables["XDG_STATE_HOME"])
        entries()  # who lists the runs removes the sockets of killed ones
    if watch.killed_whole and watch.left_now(traces, variables):
        run_dtrain("run", "--no-python", "true", cwd=Path(variables["TMPDIR"]).parent)  # the next one clears away
    marks = {mark, *(lab.mark for lab in labs)}

    def left_now() -> tuple[list[psutil.Process], list[str]]:
        processes = left_behind(before, marks, {*_helpers(), *(pid for lab in labs for pid in lab.pids)})
        return processes, watch.left_now(traces, variables)

    deadline = time.monotonic() + LEFT_BEHIND_S
    while any(left := left_now()) and time.monotonic() < deadline:
        time.sleep(0.02)
    if any(left):
        found = "".join(f"\n  {each}" for each in (*(describe(process.pid) for process in left[0]), *left[1]))
        kill(left[0])
        watch.found.append(f"still there {LEFT_BEHIND_S:g} s after the test:{found}")
    if watch.found:
        pytest.fail("\n".join(watch.found), pytrace=False)


def _helpers() -> Iterator[int]:
    """What is started once and kept until the end: by the testbed, and by multiprocessing."""
    if (server := dtrain_server_if_started()) is not None:
        yield server.pid
    if (pid := vars(resource_tracker._resource_tracker)["_pid"]) is not None:
        yield pid
