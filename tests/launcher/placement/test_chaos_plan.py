"""How --chaos is written, and what is refused with the grammar."""

from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.hangs.watch import HangPolicy
from launcher.hosts.host import Host, HostKind
from launcher.placement.chaos_plan import ChaosPlan, Fault, parse_chaos
from launcher.placement.job_spec import CommandKind, JobSpec, WorkerCommand


def test_faults_are_listed_with_commas() -> None:
    plan = parse_chaos("kill worker every 30s, stop worker every 1.5m,host every 2h , seed 7")
    assert plan == ChaosPlan(
        (Fault("kill", "worker", 30), Fault("stop", "worker", 90), Fault("kill", "host", 7200)), seed=7
    )


def test_without_a_seed_each_run_has_another() -> None:
    assert len({parse_chaos("kill worker every 30s").seed for _ in range(20)}) > 1


GRAMMAR = r"--chaos.*write `kill worker every 30s`, .*`seed 7`"
LIMITS = "the time must be 1s to 24h"
NETWORK = "fault of the network.*hosts of --simulate share the network of this machine"


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (("", "seed 7", "kill", "kill worker", "kill worker every 30", "burn worker every 3s"), GRAMMAR),
        (("stop host every 9s", "kill worker every 30s; seed 7", "kill worker every 30s, seed x"), GRAMMAR),
        (("kill worker every 0.1s", "kill worker every 99h"), LIMITS),
        (("cut host every 30s", "slow every 1m", "kill worker every 9s, cut every 9s"), NETWORK),
    ],
)
def test_what_is_no_fault_is_refused_with_the_reason(texts: tuple[str, ...], reason: str) -> None:
    for text in texts:
        with pytest.raises(UsageError, match=reason):
            parse_chaos(text)


def _job(text: str, kind: HostKind, *, acts: bool = False) -> JobSpec:
    return JobSpec(
        command=WorkerCommand(CommandKind.SCRIPT, "train.py"), hosts=(Host("a", kind), Host("b", kind)), run_id="r",
        workdir=Path("/"), chaos=parse_chaos(text), hang=HangPolicy(acts=acts),
    )  # fmt: skip


def test_hosts_are_killed_only_where_they_are_simulated() -> None:
    assert _job("kill host every 9s", HostKind.SIMULATED).chaos is not None
    with pytest.raises(UsageError, match="add --simulate, or kill workers"):
        _job("kill host every 9s", HostKind.SSH)


def test_a_worker_is_stopped_only_where_that_is_noticed() -> None:
    assert _job("stop worker every 9s", HostKind.LOCAL, acts=True).chaos is not None
    with pytest.raises(UsageError, match="add --hang auto"):
        _job("stop worker every 9s", HostKind.LOCAL)
