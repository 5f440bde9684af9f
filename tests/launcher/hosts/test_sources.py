"""Where hosts come from: one source, said clearly; a discovery script is asked again while the run goes on."""

import stat
from collections.abc import Mapping
from pathlib import Path

import pytest
from testbed.job_drive import Drive, notices, receivers
from testbed.processes import run_dtrain, started_dtrain
from testbed.sshd import SshHosts
from testbed.typed import output_of

from launcher.errors import DtrainError, UsageError
from launcher.hosts import sources as sources_module
from launcher.hosts.host import Host, HostKind
from launcher.hosts.sources import Sources, choose_hosts, discover, wait_for_discovery
from launcher.job.events import Discovered, Open
from launcher.job.fleet import HostPhase
from launcher.protocol.commands import EndAttempt

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}


def _script(folder: Path, text: str) -> str:
    path = folder / "discover"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def _names(hosts: tuple[Host, ...]) -> list[str]:
    return [host.name for host in hosts]


def test_each_source_gives_its_hosts(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("a slots=2\nb slots=4\n")
    assert _names(choose_hosts(Sources(hosts="n[1-2],m"), nnodes=None)) == ["n1", "n2", "m"]
    assert _names(choose_hosts(Sources(hostfile=hostfile), nnodes=None)) == ["a", "b"]
    (host,) = choose_hosts(Sources(hostfile=hostfile, include="b:1,3"), nnodes=None)
    assert (host.name, host.chosen, host.slots) == ("b", (1, 3), 2)
    assert _names(choose_hosts(Sources(script=_script(tmp_path, "echo c:1; echo d:2")), nnodes=None)) == ["c", "d"]
    (host,) = choose_hosts(Sources(include="localhost:1"), nnodes=None)
    assert (host.kind, host.chosen) == (HostKind.LOCAL, (1,)), "a GPU of this machine, as in DeepSpeed"
    allocated = choose_hosts(Sources(environment=JOB), nnodes=None)
    assert [(host.name, host.kind) for host in allocated] == [(f"n{k}", HostKind.SRUN) for k in (1, 2, 3)]
    assert _names(choose_hosts(Sources(hosts="a", environment=JOB), nnodes=None)) == ["a"], "a list is stronger"
    assert _names(choose_hosts(Sources(exclude="n2", environment=JOB), nnodes=None)) == ["n1", "n3"]
    assert _names(choose_hosts(Sources(environment=JOB), nnodes=(2, 2))) == ["n1", "n2"]


@pytest.mark.parametrize(
    ("sources", "nnodes", "message"),
    [
        (Sources(hosts="a"), (2, 2), "--nnodes 2, but only 1 host is named: a"),
        (Sources(simulate=True), None, "--simulate needs the number of hosts to divide this machine into: --nnodes N"),
        (Sources(hosts="a,b", simulate=True), (2, 2), "--simulate divides this machine; "),
        (Sources(hosts="a", hostfile=Path("b")), None, "--hosts and --hostfile cannot be used together"),
        (Sources(script="x", simulate=True), (2, 2), "--hosts-script and --simulate cannot be used together"),
        (Sources(include="a", simulate=True), (2, 2), "or this machine, not from --simulate"),
        (Sources(include="a"), None, "a"),
        (Sources(environment=JOB), (4, 4), "--nnodes 4, but only 3 hosts are in the SLURM allocation: n1, n2, n3"),
        (Sources(), (2, 2), "--nnodes 2, but no hosts are known. Name them: --hosts"),
        (Sources(hostfile=Path("/none/there")), None, "/none/there"),
        (Sources(environment={"SLURM_JOB_ID": "7"}), None, "NODELIST is not set"),
    ],
)
def test_what_gives_no_hosts_is_an_error(sources: Sources, nnodes: tuple[int, int] | None, message: str) -> None:
    with pytest.raises(UsageError) as error:
        choose_hosts(sources, nnodes=nnodes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("env", "words", "hosts"),
    [
        ({"DTRAIN_HOSTFILE": "hosts.txt"}, ["--hosts", "other:1"], ["other"]),
        ({"DTRAIN_HOSTS": "one:1"}, ["--hostfile", "hosts.txt"], ["far", "near"]),
        ({"DTRAIN_HOSTFILE": "hosts.txt"}, ["--exclude", "near"], ["far"]),
        ({**JOB, "SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "2(x3)"}, ["--hosts", "one:1"], ["one"]),
    ],
)
def test_what_is_typed_is_stronger_than_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str], words: list[str], hosts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts.txt").write_text("far slots=1\nnear slots=1\n")
    shown = output_of("plan", *words, "train.py", **env)
    rows = [line.split() for line in shown.splitlines()[2:] if not line.startswith("?")]
    assert [row[1] for row in rows] == hosts


def test_an_allocation_gives_processes_too() -> None:
    env = {**JOB, "SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    rows = output_of("plan", "--json", "train.py", **env)
    assert [rows.count(f'"host": "n{k}"') for k in (1, 2, 3)] == [2, 2, 1]
    more = output_of("plan", "--json", "--nproc-per-node", "4", "--nnodes", "1", "train.py", **env)
    assert more.count('"host": "n1"') == 4, "what is typed overrides it"


# ---- discovery -----------------------------------------------------------------------------------------------


def test_a_discovery_script_that_fails_says_so(tmp_path: Path) -> None:
    with pytest.raises(DtrainError, match="ended with 3: no credentials"):
        discover(_script(tmp_path, "echo no credentials >&2; exit 3"))
    with pytest.raises(UsageError, match="cannot be run: No such file"):
        discover(str(tmp_path / "none"))
    with pytest.raises(UsageError, match=r"2 hosts are needed, .* names 1: a"):
        wait_for_discovery(_script(tmp_path, "echo a:1"), 2, 0.0)


def test_a_discovery_script_that_hangs_is_killed_with_its_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "DISCOVERY_S", 0.3)
    with pytest.raises(DtrainError, match=r"did not answer within 0\.3 s"):
        discover(_script(tmp_path, "sleep 60 & sleep 60"))  # that nothing stays is checked after every test


@pytest.mark.parametrize("where", ["", " >&2"])
def test_a_discovery_script_that_prints_endlessly_is_killed(tmp_path: Path, where: str) -> None:
    with pytest.raises(DtrainError, match="was ended, since it printed more than 1 MiB; it must print one HOST:SLOTS"):
        discover(_script(tmp_path, f"sleep 60 & yes node1:1{where}"))


def test_a_discovery_script_may_close_its_output_before_it_ends(tmp_path: Path) -> None:
    with pytest.raises(DtrainError, match="ended with 3: no credentials"):
        discover(_script(tmp_path, "echo a:1; echo no credentials >&2; exec >&- 2>&-; sleep 0.3; exit 3"))


def test_quiet_does_not_hide_that_the_discovery_script_fails(tmp_path: Path) -> None:
    script = _script(
        tmp_path, "[ ! -e started ] || { echo >> failed; echo no credentials >&2; exit 3; }; echo localhost:1"
    )
    (tmp_path / "work.py").write_text(
        "import os, time\nopen('started', 'w')\n"
        "while not os.path.exists('failed') or os.path.getsize('failed') < 2: time.sleep(0.02)\n"  # the second time
    )
    result = run_dtrain("run", "-q", "--hosts-script", script, "--nnodes", "1:2", "work.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (said,) = result.stderr.splitlines()
    assert "ended with 3: no credentials" in said


def test_a_discovery_script_that_runs_at_the_end_is_no_error(tmp_path: Path) -> None:
    script = _script(tmp_path, "if [ -e started ]; then touch asked; sleep 60; fi; echo localhost:1")
    (tmp_path / "work.py").write_text(
        "import os, time\nopen('started', 'w')\nwhile not os.path.exists('asked'): time.sleep(0.02)\n"
    )
    result = run_dtrain("run", "--hosts-script", script, "--nnodes", "1:2", "work.py", cwd=tmp_path)
    assert (result.returncode, "--hosts-script" in result.stderr) == (0, False), result


def test_a_run_grows_and_shrinks_as_the_script_says() -> None:
    drive = Drive("a", "b", nnodes=(1, 3), grow=True, hosts_script="x")
    drive.join()
    drive.check()
    drive.wait(20.0, heard="ab")
    drive.begin()
    (a, b), c = drive.job.spec.hosts, Host("c", HostKind.SSH, slots=2)
    found = drive.event(Discovered((a, c)))
    assert [command for command in found if isinstance(command, Open)] == [Open(c, 1)]
    assert notices(found) == ["b is excluded from further attempts: it is no longer named by --hosts-script"]
    assert receivers(drive.back("c"), EndAttempt) == ["a", "b"]
    drive.swept()
    assert (drive.number, drive.members) == (1, ("a", "c"))
    assert drive.job.fleet.states["b"].phase is HostPhase.LEAVING
    drive.event(Discovered((a, b, c)))
    assert drive.job.fleet.wanted(drive.job.fleet.states["b"]), "it is used again"


def test_a_host_that_the_script_names_later_joins_the_run(tmp_path: Path, ssh_hosts: SshHosts) -> None:
    names = tmp_path / "names"
    names.write_text("node1:1\n")
    (tmp_path / "work.py").write_text(
        "import os, time\nprint('world', os.environ['WORLD_SIZE'], flush=True)\n"
        "time.sleep(60 if os.environ['WORLD_SIZE'] == '1' else 0)\n"
    )
    words = ["--hosts-script", _script(tmp_path, f"cat {names}"), "--nnodes", "1:2", "--run-id", "job"]
    words += ["--workdir", f"{tmp_path}/../{tmp_path.name}", "--fetch", "names"]
    words += ["--ssh-config", str(ssh_hosts.ssh_config)]
    with started_dtrain("run", *words, "work.py", cwd=tmp_path) as process:
        assert process.stdout.readline() == b"[node1:0] world 1\n"
        names.write_text("node1:1\nnode2:1\n")
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.count(b"world 2") == 2
    assert b"node2 has come" in err
    assert len([*tmp_path.glob("runs/job/fetched/*/names")]) == 2
