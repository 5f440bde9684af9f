"""What every test shares: a clean environment, SSH hosts, and the check that nothing is left running."""

import os
import time
import uuid
from collections.abc import Iterator
from multiprocessing import resource_tracker

import pytest
from testbed.processes import MARK, describe, everyone, kill, left_behind
from testbed.require import require
from testbed.sshd import SshHosts, find_sshd

SSH_LAB = pytest.StashKey[SshHosts]()
LEFT_BEHIND_S = 5.0

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


def pytest_configure(config: pytest.Config) -> None:
    for name in tuple(os.environ):
        if name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES:
            del os.environ[name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ssh_hosts" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.sshd)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("sshd"):
        require(find_sshd(), "sshd", "apt-get install openssh-server")


@pytest.fixture(scope="session")
def _ssh_lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with SshHosts(tmp_path_factory.mktemp("ssh")) as hosts:
        request.config.stash[SSH_LAB] = hosts
        yield hosts


@pytest.fixture
def ssh_hosts(_ssh_lab: SshHosts) -> SshHosts:
    """Four running SSH hosts, node1 ... node4, with their first keys whatever the last test did to them."""
    _ssh_lab.reset()
    return _ssh_lab


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test that leaves a process running, here or on an SSH host, and end that process."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    before = everyone()
    yield
    lab = request.config.stash.get(SSH_LAB, None)
    marks, servers = {mark}, set(_helpers_of_python())
    if lab is not None:
        marks.add(lab.mark)
        servers |= lab.pids
    deadline = time.monotonic() + LEFT_BEHIND_S
    while (left := left_behind(before, marks, servers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        found = "\n".join(f"  {describe(process)}" for process in left)
        kill(left)
        pytest.fail(f"still running {LEFT_BEHIND_S:g} s after the test:\n{found}", pytrace=False)


def _helpers_of_python() -> Iterator[int]:
    # multiprocessing starts it once and keeps it until the interpreter ends.
    if (pid := resource_tracker._resource_tracker._pid) is not None:
        yield pid
