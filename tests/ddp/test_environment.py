"""Where a launcher put a process is read from its environment, and a contradiction is an error that says what to do."""

from __future__ import annotations

import os
import pty

import pytest

import ddp
from ddp.environment import ALONE, read_placement, typed_in_a_shell


def torchrun(**more: str) -> dict[str, str]:
    return {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", **more}


def mpirun(**more: str) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = ("5", "8", "1", "4")
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, values, strict=True)} | more


def srun(**more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "4",
        "SLURM_NTASKS": "6",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_NNODES": "2",
        "SLURM_TASKS_PER_NODE": "4,2",
        **more,
    }


def test_no_launcher_is_a_world_of_one() -> None:
    assert read_placement({"PATH": "/bin"}) == ALONE
    assert (ALONE.rank, ALONE.world_size, ALONE.local_rank, ALONE.local_world_size) == (0, 1, 0, 1)


def test_torchruns_variables() -> None:
    place = read_placement(torchrun(**mpirun()))
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    assert (place.node_rank, place.source, place.is_single_host) == (1, "env", False)


def test_rank_and_size_alone_are_taken_as_one_host() -> None:
    place = read_placement({"RANK": "1", "WORLD_SIZE": "2"})
    assert (place.local_rank, place.local_world_size, place.is_single_host) == (1, 2, True)


def test_open_mpis_variables() -> None:
    place = read_placement(mpirun(**srun()))
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 8, 1, 4)
    assert place.source == "mpirun"


@pytest.mark.parametrize(
    ("node", "tasks", "local_size"), [("0", "4(x2),2", 4), ("1", "4(x2),2", 4), ("2", "4(x2),2", 2), ("1", "1,3", 3)]
)
def test_slurms_variables(node: str, tasks: str, local_size: int) -> None:
    place = read_placement(
        srun(SLURM_NODEID=node, SLURM_STEP_TASKS_PER_NODE=tasks, SLURM_NTASKS="10", SLURM_NNODES="3")
    )
    assert (place.rank, place.world_size, place.local_rank) == (4, 10, 0)
    assert (place.local_world_size, place.node_rank, place.source) == (local_size, int(node), "srun")


def test_the_steps_size_counts_not_the_jobs() -> None:
    place = read_placement(srun(SLURM_STEP_NUM_TASKS="5", SLURM_STEP_NUM_NODES="1"))
    assert (place.world_size, place.is_single_host) == (5, True)


def test_a_batch_script_outside_srun_is_alone() -> None:
    environ = srun()
    del environ["SLURM_STEP_ID"]
    assert read_placement(environ) == ALONE


def test_what_is_typed_in_a_shell_of_srun_is_alone() -> None:
    shell = srun(SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="0", SLURM_PTY_PORT="33559")
    assert read_placement(shell, is_typed=lambda: True) == ALONE
    assert (
        read_placement(shell, is_typed=lambda: False).world_size == 4
    )  # a task: of that step, or started in the shell
    assert read_placement(srun(), is_typed=lambda: True).source == "srun"


def test_a_shell_gives_what_is_typed_a_group_of_its_own() -> None:
    task, terminal = pty.fork()
    if not task:  # leads its session, as what `srun --pty` starts
        os._exit(typed_in_a_shell() + 2 * _forked(own_group=False) + 4 * _forked(own_group=True))
    assert os.waitstatus_to_exitcode(os.waitpid(task, 0)[1]) == 4
    os.close(terminal)


def _forked(*, own_group: bool) -> int:
    """Fork a process as a script does, or an interactive shell; return whether it takes itself for typed."""
    child = os.fork()
    if not child:
        if own_group:
            os.setpgid(0, 0)
        os._exit(typed_in_a_shell())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_without_terminal_was_not_typed() -> None:
    child = os.fork()
    if not child:
        os.setsid()
        os._exit(_forked(own_group=True))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_batch_script_that_a_step_submitted_is_alone() -> None:
    inherited = {"SLURM_STEP_TASKS_PER_NODE": "4,2", "SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "0"}
    assert read_placement(srun(**inherited, SLURM_NODEID="0", SLURM_GTIDS="0")) == ALONE
    assert read_placement(srun(**inherited, SLURM_NODEID="0", SLURM_GTIDS="0,1,2,3")).world_size == 6
    assert read_placement(srun(**inherited, SLURM_NODEID="1", SLURM_GTIDS="4,5")).local_world_size == 2


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not an integer"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 in a world of 2; it must be 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "size 0"),
        (torchrun(LOCAL_RANK="2"), "local rank 2 in a world of 2"),
        (torchrun(LOCAL_WORLD_SIZE="5"), "5 local processes in a world of 4"),
        (mpirun(OMPI_COMM_WORLD_SIZE="x"), "OMPI_COMM_WORLD_SIZE='x'"),
    ],
)
def test_contradictions_are_errors(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ddp.errors.LaunchEnvironmentError, match=says):
        read_placement(environ)
