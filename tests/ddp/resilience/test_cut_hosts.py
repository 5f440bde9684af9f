"""Hosts that a real network takes away from resilient workers, without a word, and gives back."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.network import NetworkHosts
from testbed.processes import LEASE
from testbed.training_seen import training

SCRIPT = Path(__file__).parents[2] / "programs" / "elastic.py"
pytestmark = pytest.mark.timeout(600)
Fault = Callable[[NetworkHosts, str], None]
FAULTS: dict[str, tuple[Fault, Fault]] = {
    "drop": (NetworkHosts.drop, NetworkHosts.mend),
    "freeze": (NetworkHosts.freeze, NetworkHosts.thaw),
    "power off": (NetworkHosts.poweroff, NetworkHosts.boot),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("lost", ["far1", "far3"])
def test_a_host_that_falls_silent_is_left_and_joins_again(
    network_hosts: NetworkHosts, tmp_path: Path, fault: str, lost: str
) -> None:
    """The store is on far1."""
    take, give_back = FAULTS[fault]
    argv = [
        "run", "--ssh-config", str(network_hosts.ssh_config), *LEASE,
        "--grace-s", "1", "--nproc-per-node", "1", "--hosts", "far1,far2,far3", "--nnodes", "1:3",
        str(SCRIPT), "3", "0.2",
    ]  # fmt: skip
    with training(*argv, cwd=tmp_path) as seen:
        seen.wait(lambda: len(seen.sized(3)) > 15)
        taken = time.monotonic()
        take(network_hosts, lost)
        seen.wait(lambda: len(seen.sized(2)) > 10)
        given = time.monotonic()
        give_back(network_hosts, lost)
        seen.wait(lambda: len(seen.sized(3, after=given)) > 10)
    shrunk, grown = seen.sized(2)[0].time - taken, seen.sized(3, after=given)[0].time - given
    print(f"{fault} {lost}: next commit after {shrunk:.2f} s, with it again {grown:.2f} s after its return")
    assert "attempt 1" not in seen.stderr, seen.stderr
    stay = {"far1", "far2", "far3"} - {lost}
    assert all(len({at.pid for at in seen.commits if at.host == host}) == 1 for host in stay)
    least, _, more = (int(word) for word in next(iter(seen.said("counts"))).split())
    assert (least, more <= 2) == (1, True)
    assert len(seen.said("result")) == 1
