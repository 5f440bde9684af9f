"""SLURM's variables, the arguments and the output of srun, and the scripts that sbatch gets. Without a SLURM."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from testbed.present import present

from launcher.cli.main import cli
from launcher.cli.sbatch import batch_script, run_sbatch
from launcher.errors import UsageError
from launcher.hosts.host import HostKind
from launcher.hosts.slurm_allocation import (
    Node,
    cpu_limit,
    find_allocation,
    find_step,
    hosts_of,
    requeue,
    restart_count,
    slurm_run_id,
)
from launcher.transport.srun import explain, parse_granted, presumed, srun_command, srun_environment

# As a real SLURM sets them.
BATCH = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_TASKS_PER_NODE": "1(x3)",
    "SLURMD_NODENAME": "node1",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_CPUS_ON_NODE": "4",
}
STEP = {  # srun -n3 over two of them; the first task on the second one
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "3",
    "SLURMD_NODENAME": "node2",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "2",
}
HET = {
    "SLURM_JOB_ID": "1",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node[2-3]",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "2(x2)",
    "SLURM_NTASKS_HET_GROUP_0": "1",
    "SLURM_NTASKS_HET_GROUP_1": "4",
}


STEP_CODE = "from launcher.hosts import slurm_allocation as s; print(s.step_title(), s.task_has_terminal())"


def slots(env: Mapping[str, str]) -> list[tuple[str, int | None]]:
    return [(host.name, host.slots) for host in hosts_of(present(find_allocation(env)))]


def test_nodes_become_hosts_that_srun_reaches() -> None:
    hosts = hosts_of(present(find_allocation(BATCH)))
    assert [(host.name, host.kind, host.slots) for host in hosts] == [
        (f"node{i}", HostKind.SRUN, None) for i in (1, 2, 3)
    ]
    assert {host.max_slots for host in hosts} == {0}  # --nproc-per-node may ask for more


def test_tasks_count_only_where_several_on_a_node_were_asked_for() -> None:
    several = {"SLURM_TASKS_PER_NODE": "4(x2),2"}
    assert slots({**BATCH, **several}) == [("node1", None), ("node2", None), ("node3", None)]  # processors
    assert slots({**BATCH, **several, "SLURM_NTASKS": "10"}) == [("node1", 4), ("node2", 4), ("node3", 2)]
    uneven = {"SLURM_TASKS_PER_NODE": "2,1(x2)", "SLURM_NTASKS": "4"}
    assert slots({**BATCH, **uneven}) == [("node1", 2), ("node2", 1), ("node3", 1)]
    assert slots({**BATCH, "SLURM_NTASKS_PER_NODE": "1"}) == [("node1", None), ("node2", None), ("node3", None)]


def test_the_only_node_needs_no_srun_if_we_are_on_it() -> None:
    one = {**BATCH, "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "1"}
    for here, kind in (("node1", HostKind.LOCAL), ("", HostKind.SRUN)):
        allocation = present(find_allocation({**one, "SLURMD_NODENAME": here}))
        assert [host.kind for host in hosts_of(allocation)] == [kind]


def test_parts_of_a_heterogeneous_job_are_hosts_of_one_run() -> None:
    allocation = present(find_allocation(HET))
    assert allocation.nodes == (Node("node1", None, 0), Node("node2", 2, 1), Node("node3", 2, 1))
    with pytest.raises(UsageError, match="has the node node1 twice"):
        find_allocation({**HET, "SLURM_JOB_NODELIST_HET_GROUP_1": "node[1-2]"})


@given(st.lists(st.tuples(st.integers(1, 999), st.integers(1, 9)), min_size=1, max_size=20))
def test_counts_of_tasks_are_read_as_slurm_writes_them(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{times})" if times > 1 else str(tasks) for tasks, times in runs)
    expected = [tasks for tasks, times in runs for _ in range(times)]
    nodes = {"SLURM_JOB_NODELIST": f"n[1-{len(expected)}]", "SLURM_JOB_NUM_NODES": str(len(expected))}
    found = slots({**BATCH, **nodes, "SLURM_TASKS_PER_NODE": text, "SLURM_NTASKS": str(sum(expected))})
    several = any(tasks > 1 for tasks in expected)
    assert [tasks for _, tasks in found] == (expected if several else [None] * len(expected))


@pytest.mark.parametrize("outer", [{"SLURM_NTASKS": "1"}, {"SLURM_NTASKS_PER_NODE": "1"}, {"SLURM_NTASKS": ""}])
def test_a_number_of_tasks_of_the_job_that_submitted_it_does_not_count(outer: dict[str, str]) -> None:
    processors = {**BATCH, "SLURM_TASKS_PER_NODE": "64(x3)"}
    assert slots({**processors, **outer}) == [("node1", None), ("node2", None), ("node3", None)]
    asked = {**processors, **outer, "SLURM_NTASKS_PER_NODE": "64"}
    assert slots(asked) == [("node1", 64), ("node2", 64), ("node3", 64)]


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_JOB_ID": "x1"},
        {"SLURM_JOB_NODELIST": ""},
        {"SLURM_JOB_NODELIST": "(null)"},
        {"SLURM_JOB_NODELIST": "node[1-"},
        {"SLURM_JOB_NODELIST": "node[1-2]"},
        {"SLURM_TASKS_PER_NODE": "1(x2)"},
        {"SLURM_TASKS_PER_NODE": "1(x999999)"},
        {"SLURM_TASKS_PER_NODE": "1(x0),3"},
        {"SLURM_JOB_NUM_NODES": "three"},
        {"SLURM_JOB_NODELIST": "node[1,1-2]"},
        {"SLURM_HET_SIZE": "2"},
    ],
    ids=lambda changes: " ".join("=".join(each) for each in changes.items()),
)
def test_variables_that_are_no_allocation(changes: dict[str, str], snapshot: SnapshotAssertion) -> None:
    with pytest.raises(UsageError) as refused:
        find_allocation({**BATCH, **changes})
    assert str(refused.value) == snapshot


def test_outside_of_slurm_there_is_nothing() -> None:
    assert [find_allocation({}), find_step({}), slurm_run_id({}), cpu_limit({})] == [None] * 4
    assert restart_count({"SLURM_RESTART_COUNT": "3"}) == 0
    assert "no SLURM job" in (requeue({}) or "")


# ---- steps ---------------------------------------------------------------------------------------------------


def test_a_task_of_srun_has_a_place_and_the_nodes_of_its_step() -> None:
    allocation = present(find_allocation(STEP))
    step = present(allocation.step)
    assert (step.rank, step.tasks, step.node_rank, step.local_rank, step.interactive) == (2, 3, 1, 0, False)
    assert allocation.nodes == (Node("node1", 2), Node("node2", 1))


@pytest.mark.parametrize("shell", [{"SLURM_STEP_ID": "4294967290"}, {"SLURM_PTY_PORT": "33559"}])
def test_an_interactive_shell_stands_for_the_whole_allocation(shell: dict[str, str]) -> None:
    one = {"SLURM_STEP_NODELIST": "node2", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}
    env = {**STEP, **one, "SLURM_TASKS_PER_NODE": "1", **shell}
    allocation = present(find_allocation(env, has_terminal=lambda: True))
    assert allocation.step is None
    assert [node.name for node in allocation.nodes] == ["node1", "node2", "node3"]


@pytest.mark.parametrize("title", ["12.0", None])
def test_a_task_that_srun_starts_in_an_interactive_shell_is_a_task(title: str | None) -> None:
    env = {**STEP, "SLURM_PTY_PORT": "33559"}
    assert not present(find_step(env, title, has_terminal=lambda: False)).interactive
    assert present(find_allocation(env, title, has_terminal=lambda: False)).step is not None
    assert present(find_step(env, title, has_terminal=lambda: True)).interactive


@pytest.mark.parametrize(("before", "seen"), [("", False), ("setsid --wait --ctty ", True)])
def test_the_task_below_slurmstepd_has_a_terminal_or_none(before: str, seen: bool) -> None:
    ours, theirs = os.openpty()
    command = f'{before}sh -c \'"$0" -c "$1"; exit\' {shlex.quote(sys.executable)} {shlex.quote(STEP_CODE)}; exit'
    done = subprocess.run(
        ["slurmstepd: [12.0]", "-c", command],
        executable="/bin/sh", stdin=theirs, capture_output=True, text=True, check=True, start_new_session=True,
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    assert done.stdout == f"12.0 {seen}\n"


def test_variables_of_the_step_that_submitted_it_do_not_count() -> None:
    inherited = {**STEP, **BATCH}
    assert find_step(inherited) is None
    assert len(slots(inherited)) == 3
    # On the same nodes they fit together, by chance; what slurmstepd calls itself settles it.
    chance = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_TASKS_PER_NODE": "1(x3)"}
    assert find_step(chance, "12.batch") is None
    assert find_step(chance, "12.0") is not None
    assert find_step({**STEP, "SLURM_STEP_ID": "4294967291"}) is None


def test_a_run_is_named_after_its_job() -> None:
    array = {**BATCH, "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "7", "SLURM_RESTART_COUNT": "2"}
    assert (slurm_run_id(BATCH), slurm_run_id(array)) == ("slurm-12", "slurm-9_7")
    assert (restart_count(BATCH), restart_count(array)) == (0, 2)
    assert cpu_limit(BATCH) == 4


@pytest.mark.parametrize(("array", "told"), [("12", "12_7"), ("9", "12")], ids=["its own", "of another task or job"])
def test_scontrol_is_told_the_number_of_this_job_alone(
    array: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/told\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert requeue({**BATCH, "SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": "7"}) is None
    assert (tmp_path / "told").read_text() == f"requeue {told}\n"


# ---- srun ----------------------------------------------------------------------------------------------------


def test_srun_reads_no_options_of_the_job_but_scripts_see_them() -> None:
    job = {
        "SLURM_JOB_ID": "12", "SLURM_CONF": "/c", "SLURM_GPUS": "4", "SLURM_NTASKS_PER_NODE": "2", "SRUN_DEBUG": "9",
        "SLURM_CPU_BIND_TYPE": "mask", "SLURM_CPUS_PER_TASK": "3", "SLURM_ARRAY_TASK_ID": "7", "HOME": "/h",
        "SLURM_PTY_PORT": "1", "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    kept = {"SLURM_JOB_ID": "12", "SLURM_CONF": "/c", "SLURM_ARRAY_TASK_ID": "7", "HOME": "/h"}
    assert srun_environment(job) == {**kept, "CUDA_VISIBLE_DEVICES": "0"}  # the user's own choice
    assert srun_environment({**job, "SLURM_JOB_GPUS": "0"}) == kept  # SLURM's, for this node alone
    words = srun_command(
        Node("n1", group=1), ["python", "-m", "x"], job, granted=["--gpus=2"], deadline=time.monotonic() + 6.5
    )
    assert {"--nodelist=n1", "--het-group=1", "--gpus=2", "--overlap", "--ntasks=1", "--immediate=5"} <= set(words)
    env = words.index("env")
    assert words[env + 1 :] == [
        "SLURM_CPUS_PER_TASK=3", "SLURM_GPUS=4", "SLURM_NTASKS_PER_NODE=2", "python", "-m", "x",
    ]  # fmt: skip


def test_a_step_asks_for_what_the_job_has_on_its_node() -> None:
    shown = (
        "JobId=12 TRES=cpu=3 NumNodes=3 Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0-1),nic:1(CNT:1) "
        "Nodes=n[2-3] CPU_IDs=0 Mem=0 GRES= MailUser=me"
    )
    none = ("--gres=none",)
    assert parse_granted(shown) == {"n1": ("--gpus=a100:2", "--gres=nic:1"), "n2": none, "n3": none}
    assert parse_granted("Nodes=n1 CPU_IDs=0 Mem=0 GRES= ") == parse_granted("slurm_load_jobs error") == {}
    assert presumed({"SLURM_GPUS_PER_TASK": "a100:2"}, Node("n1", 3), 2) == ("--gpus=a100:6",)
    assert presumed({"SLURM_GPUS": "4"}, Node("n1"), 2) == ("--gpus=2",)
    assert presumed({"SLURM_GPUS_PER_NODE": "4"}, Node("n1"), 2) == ()


@pytest.mark.parametrize(
    "said",
    [
        "srun: error: Unable to create step for job 4: Requested nodes are busy",
        "srun: error: Unable to confirm allocation for job 9: Invalid job id specified",
        "slurmstepd-n2: error: *** STEP 4.6 ON n2 CANCELLED AT 2026-11-21 DUE TO TIME LIMIT ***",
        "slurmstepd-n2: error: *** STEP 4.6 ON n2 CANCELLED AT 2026-11-21T11:02:28 ***",
        "srun: error: Node failure on n2",
        "Traceback: the agent's own text",
        "OSError: Connection refused",
        "",
    ],
)
def test_what_srun_says_comes_with_the_next_step(said: str, snapshot: SnapshotAssertion) -> None:
    noise = "srun: cluster configuration lacks support for cpu binding\n{}\nsrun: error: n2: task 0: Killed\n"
    assert explain(noise.format(said)) == snapshot


# ---- sbatch --------------------------------------------------------------------------------------------------


def test_a_script_holds_the_options_and_runs_what_was_typed() -> None:
    script = batch_script(
        ["--nodes=2", "-c", "4"], ["--nproc-per-node", "4", "train.py", "--lr", "1"], dtrain=["/b/dtrain"]
    )
    head = ["#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH -c 4", "#SBATCH --job-name=train"]
    assert script.splitlines()[:4] == head
    assert script.endswith("\nexec /b/dtrain run --nproc-per-node 4 train.py --lr 1\n")


def test_a_job_that_may_be_queued_again_is_notified_of_its_end() -> None:
    lines = batch_script(["--requeue", "--time", "1-0"], ["train.py"], dtrain=["dtrain"]).splitlines()
    assert {"#SBATCH --signal=B:USR1@120", "#SBATCH --open-mode=append"} <= set(lines)
    assert lines[-1] == "exec dtrain run --requeue train.py"
    for limit, ahead in (("2", 60), ("3:30", 105), ("0:0:20", 10), ("10", 120), ("0-1", 120)):
        assert f"--signal=B:USR1@{ahead}\n" in batch_script(["--requeue", "-t", limit], ["a.py"], dtrain=["d"])
    own = batch_script(["--requeue", "--signal=USR2@9", "--open-mode=truncate"], ["a.py"], dtrain=["d"])
    assert "USR1@" not in own
    assert "#SBATCH --signal=B:USR2@9\n" in own
    assert "append" not in own


@pytest.mark.parametrize(
    ("typed", "becomes"),
    [("USR1@600", "B:USR1@600"), ("R:10", "RB:10"), ("B:USR1@600", "B:USR1@600"), ("BR:10@60", "BR:10@60")],
)
def test_the_signal_before_the_end_goes_to_dtrain(typed: str, becomes: str) -> None:
    for words, line in (([f"--signal={typed}"], f"--signal={becomes}"), (["--signal", typed], f"--signal {becomes}")):
        assert f"#SBATCH {line}\n" in batch_script(["--requeue", *words], ["train.py"], dtrain=["d"])
        assert f"#SBATCH {' '.join(words)}\n" in batch_script(words, ["train.py"], dtrain=["d"])


@pytest.mark.parametrize("typed", [["--no-kill"], ["--no-kill=off"], ["-k"]])
def test_a_job_outlives_a_node_if_its_run_does(typed: list[str]) -> None:
    line = "#SBATCH --no-kill\n"
    assert line in batch_script(["-N4"], ["train.py"], dtrain=["d"], is_elastic=True)
    assert line not in batch_script(["-N4"], ["train.py"], dtrain=["d"])
    assert batch_script(typed, ["train.py"], dtrain=["d"], is_elastic=True).count(f"#SBATCH {typed[0]}\n") == 1


@pytest.mark.parametrize(
    ("run", "kept"),
    [
        (["--nnodes", "2:4", "train.py"], True),
        (["--nnodes=2:4", "train.py"], True),
        (["--nnodes", "4:4", "train.py"], False),
        (["train.py", "--nnodes", "2:4"], False),
    ],
)
def test_a_run_with_fewer_nodes_keeps_its_job(
    run: list[str], kept: bool, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run_sbatch(["--nodes=4", "--print", "--", *run], cli) == 0
    assert (b"#SBATCH --no-kill\n" in capfdbinary.readouterr().out) is kept


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20), min_size=1))
def test_no_argument_is_taken_for_code(words: list[str]) -> None:
    script = batch_script([], words, dtrain=["dtrain"])
    assert shlex.split(script[script.index("\nexec dtrain run") :])[3:] == words


def test_bash_gives_the_arguments_on_as_they_were() -> None:
    words = ["a b", "it's", '"', "$(touch /tmp/x)", "`id`", "\\", "new\nline", "", "*", "-", "#", "é", "!!"]
    script = batch_script([], words, dtrain=["printf", "%s\\0"])
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == ["run", *words]


@pytest.mark.parametrize(
    "argv",
    [
        ["--nodes=2", "train.py"],
        ["--nodes=2", "--"],
        ["--wrap=ls", "--", "train.py"],
        ["--comment=a\nexit", "--", "train.py"],
        ["--", "--nproc-per-node", "many", "train.py"],
        ["--", "--hang", "never", "train.py"],
        ["--", "--max-restarts", "-1", "train.py"],
        ["--", "--lines", "merge", "--log-format", "json", "train.py"],
        ["--", "--no-python", "-m", "train"],
    ],
    ids=" ".join,
)
def test_what_is_no_job(argv: list[str], snapshot: SnapshotAssertion) -> None:
    at = argv.index("--") if "--" in argv else 0
    with pytest.raises(UsageError) as refused:
        run_sbatch([*argv[:at], "--print", *argv[at:]] if at or argv[0] == "--" else argv, cli)
    assert str(refused.value) == snapshot


def test_a_job_gets_no_numbers_of_the_job_in_which_it_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ncat > /dev/null\nenv > {tmp_path}/env\n")
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    for name in (
        "CONF",
        "NTASKS",
        "NTASKS_PER_NODE",
        "NPROCS",
        "ARRAY_TASK_ID",
        "RESTART_COUNT",
        "STEP_ID",
        "PTY_PORT",
    ):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    assert run_sbatch(["--nodes=2", "--", "train.py"], cli) == 0
    kept = [line for line in (tmp_path / "env").read_text().splitlines() if line.startswith("SLURM_")]
    assert kept == ["SLURM_CONF=1"]


def test_what_dtrain_run_would_refuse_is_not_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = tmp_path / "bin/submitted"
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f"#!/bin/sh\ncat > {submitted}\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"the script \S+/train.py does not exist\nnothing was submitted"):
        run_sbatch(["--nodes=2", "--", "train.py"], cli)
    with pytest.raises(click.NoSuchOption, match="--nprocs"):
        run_sbatch(["--nodes=2", "--", "--nprocs", "2", "train.py"], cli)
    (tmp_path / "dtrain.toml").write_text("workdir = '/nowhere'")  # of the job's folder it is another
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/train.py").touch()
    (tmp_path / "sub/dtrain.toml").write_text("wrong = true")
    with pytest.raises(UsageError, match=r"sub/dtrain\.toml: unknown key 'wrong'"):
        run_sbatch(["-D", "sub", "--", "train.py"], cli)
    assert run_sbatch(["--", "-h"], cli) == 0
    assert not submitted.exists()
    (tmp_path / "sub/dtrain.toml").write_text("no-allreduce = true  # of another command")
    assert run_sbatch(["-D", "sub", "--", "--nproc_per_node", "2", "train.py", "--nprocs"], cli) == 0
    assert submitted.read_text().endswith("run --nproc_per_node 2 train.py --nprocs\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sub/dtrain.toml").unlink()
    assert run_sbatch(["-D", "/", "--", "--nnodes=2:4", "--grow", "--workdir", "~/sub", "train.py"], cli) == 0
    assert "#SBATCH --no-kill\n" in submitted.read_text()
