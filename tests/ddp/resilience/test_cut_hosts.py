"""Hosts that a real network takes away from resilient workers, without a word, and gives back."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from testbed.network import NetworkHosts
from testbed.processes import run_dtrain, started_dtrain
from testbed.training_seen import TrainingSeen

SCRIPT = Path(__file__).parents[2] / "ddp_worlds" / "elastic_script.py"
TIMEOUT_S = 2.0
Fault = Callable[[NetworkHosts, str], None]
FAULTS: dict[str, tuple[Fault, Fault]] = {
    "drop": (NetworkHosts.drop, NetworkHosts.mend),
    "freeze": (NetworkHosts.freeze, NetworkHosts.thaw),
    "power off": (NetworkHosts.poweroff, NetworkHosts.boot),
}
SAYS_WHAT_IT_IS_FORKED_FROM = """
import psutil
servers = [each for each in psutil.Process().parents() if "fork_server.py" in " ".join(each.cmdline())]
oldest = min([each.create_time() for each in servers], default=time.time())
print("began", os.environ["DTRAIN_HOST"], oldest, flush=True)
"""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("lost", ["far1", "far3"])
def test_a_host_that_is_gone_without_a_word_is_done_without_and_joins_again(
    network_hosts: NetworkHosts, tmp_path: Path, fault: str, lost: str
) -> None:
    """The store is on far1.

    With --keep-warm, given where packets are dropped, the workers of a host that is cut off end, and what they were
    forked from stays for its return: the script says when the oldest fork server above it began.
    """
    take, give_back = FAULTS[fault]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.read_text().replace("entered = 0\n", "entered = 0\n" + SAYS_WHAT_IT_IS_FORKED_FROM))
    kept = ["--keep-warm", "120s"] if fault == "drop" else []
    argv = [
        "run", "--ssh-config", str(network_hosts.ssh_config), "--heartbeat-timeout-s", f"{TIMEOUT_S:g}",
        "--grace-s", "1", "--nproc-per-node", "1", "--hosts", "far1,far2,far3", "--nnodes", "1:3", *kept,
        str(script), "3", "0.2",
    ]  # fmt: skip
    with started_dtrain(*argv, cwd=tmp_path, outlived=bool(kept)) as process:
        seen = TrainingSeen(process)
        seen.wait(lambda: len(seen.sized(3)) > 15)
        taken = time.monotonic()
        take(network_hosts, lost)
        seen.wait(lambda: len(seen.sized(2)) > 10)
        given, given_at = time.monotonic(), time.time()
        give_back(network_hosts, lost)
        seen.wait(lambda: len(seen.sized(3, after=given)) > 10)
        stderr = seen.end_well()
    if kept:
        stopped = run_dtrain("warm", "--stop", "--ssh-config", network_hosts.ssh_config, "--hosts", "far1,far2,far3")
        assert stopped.returncode == 0, stopped
    shrunk, grown = seen.sized(2)[0].time - taken, seen.sized(3, after=given)[0].time - given
    print(f"{fault} {lost}: next commit after {shrunk:.2f} s, with it again {grown:.2f} s after its return")
    assert "attempt 1" not in stderr, stderr
    stay = {"far1", "far2", "far3"} - {lost}
    assert all(len({at.pid for at in seen.commits if at.host == host}) == 1 for host in stay)
    least, _, more = (int(word) for word in next(iter(seen.said("counts"))).split())
    assert (least, more <= 2) == (1, True)
    assert len(seen.said("result")) == 1
    if kept:
        oldest = max(float(line.split()[1]) for line in seen.said("began") if line.startswith(lost))
        assert oldest < given_at, stderr
