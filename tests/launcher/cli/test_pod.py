"""What the variables of a pod set, and which of them contradict each other."""

from dataclasses import replace
from typing import Any

import pytest

from launcher.cli.options import Options
from launcher.cli.pod import with_pod_variables
from launcher.errors import UsageError

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "job-master-0"}
TRAINJOB = {
    **POD,
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "1",
}
PYTORCHJOB = {**POD, "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"}
TWO_PODS = {"nnodes": (2, 2), "master_addr": "job-0.job"}


def _options(given: dict[str, Any], origin: str = "command line", **more: Any) -> Options:
    typed = frozenset(given) if origin == "command line" else frozenset()
    return Options(**given, typed=typed, origins=tuple((name, origin) for name in given), **more)


def _filled(given: dict[str, Any], env: dict[str, str], **how: Any) -> dict[str, Any]:
    before = _options(given, **how)
    after = with_pod_variables(before, env)
    names = ("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port")
    return {name: value for name in names if (value := getattr(after, name)) != getattr(before, name)}


@pytest.mark.parametrize(
    ("given", "env", "filled"),
    [
        pytest.param(
            {},
            TRAINJOB,
            {
                "nnodes": (2, 2),
                "nproc_per_node": "4",
                "node_rank": 1,
                "master_addr": "job-node-0-0.job",
                "master_port": 29500,
            },
            id="a TrainJob",
        ),
        pytest.param(
            {},
            PYTORCHJOB,
            {"nnodes": (3, 3), "node_rank": 2, "master_addr": "job-master-0", "master_port": 23456},
            id="a PyTorchJob",
        ),
        pytest.param(
            {},
            {**PYTORCHJOB, "PET_NNODES": "3", "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "12"},
            {
                "nnodes": (3, 3),
                "nproc_per_node": "4",
                "node_rank": 2,
                "master_addr": "job-master-0",
                "master_port": 23456,
            },
            id="a PyTorchJob whose WORLD_SIZE counts workers",
        ),
        pytest.param(
            {},
            {**PYTORCHJOB, "MASTER_ADDR": "localhost", "RANK": "0"},
            {"nnodes": (3, 3), "node_rank": 0, "master_addr": "job-master-0", "master_port": 23456},
            id="the first pod of an old PyTorchJob",
        ),
        pytest.param(TWO_PODS, {**POD, "JOB_COMPLETION_INDEX": "1"}, {"node_rank": 1}, id="an Indexed Job"),
        pytest.param({}, {**POD, "JOB_COMPLETION_INDEX": "1"}, {}, id="an Indexed Job of runs of one pod each"),
        pytest.param({"nnodes": (1, 1)}, {**POD, "JOB_COMPLETION_INDEX": "1"}, {}, id="the same, with --nnodes 1"),
        pytest.param({}, {**TRAINJOB, "PET_NNODES": "1"}, {"nnodes": (1, 1), "nproc_per_node": "4"}, id="one pod"),
        pytest.param(
            {"nnodes": (1, 2), "nproc_per_node": "1", "master_port": 29500},
            TRAINJOB,
            {"node_rank": 1, "master_addr": "job-node-0-0.job"},
            id="flags that agree, an elastic one, and a number of workers of its own",
        ),
        pytest.param({"standalone": True}, TRAINJOB, {}, id="--standalone"),
        pytest.param({"hosts": "a,b"}, TRAINJOB, {}, id="--hosts"),
        pytest.param({}, {**TRAINJOB, "LOCAL_RANK": "0"}, {}, id="in a worker"),
        pytest.param({}, {**POD, "RANK": "1", "WORLD_SIZE": "2"}, {}, id="RANK and WORLD_SIZE without the others"),
        pytest.param({}, {k: v for k, v in TRAINJOB.items() if k not in POD}, {}, id="PET_* in a shell"),
        pytest.param({}, {k: v for k, v in PYTORCHJOB.items() if k not in POD}, {}, id="RANK in a shell"),
        pytest.param({}, {}, {}, id="no variable"),
    ],
)
def test_variables_of_a_pod_set_the_options_that_are_not_given(
    given: dict[str, Any], env: dict[str, str], filled: dict[str, Any]
) -> None:
    assert _filled(given, env) == filled


@pytest.mark.parametrize(
    ("given", "env", "both"),
    [
        ({}, {**TRAINJOB, "JOB_COMPLETION_INDEX": "0"}, ("PET_NODE_RANK=1", "JOB_COMPLETION_INDEX=0")),
        ({}, {**PYTORCHJOB, "PET_NODE_RANK": "1"}, ("PET_NODE_RANK=1", "RANK=2")),
        ({}, {**PYTORCHJOB, "PET_MASTER_ADDR": "other"}, ("PET_MASTER_ADDR=other", "MASTER_ADDR=job-master-0")),
        ({}, {**PYTORCHJOB, "PET_MASTER_PORT": "1"}, ("PET_MASTER_PORT=1", "MASTER_PORT=23456")),
        ({}, {**PYTORCHJOB, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}, ("PET_NNODES=2", "WORLD_SIZE=3")),
        ({}, {**PYTORCHJOB, "PET_NPROC_PER_NODE": "4"}, ("WORLD_SIZE=3", "PET_NPROC_PER_NODE=4")),
        ({"node_rank": 0}, TRAINJOB, ("--node-rank is 0", "PET_NODE_RANK is 1")),
        ({"nnodes": (4, 4)}, TRAINJOB, ("--nnodes is 4", "PET_NNODES is 2")),
        ({"nnodes": (3, 4)}, TRAINJOB, ("--nnodes is 3:4", "PET_NNODES is 2")),
        ({"master_addr": "a"}, TRAINJOB, ("--master-addr is a", "PET_MASTER_ADDR is job-node-0-0.job")),
        ({"master_port": 1}, PYTORCHJOB, ("--master-port is 1", "MASTER_PORT is 23456")),
        (
            {**TWO_PODS, "node_rank": 1},
            {**POD, "JOB_COMPLETION_INDEX": "0"},
            ("--node-rank is 1", "JOB_COMPLETION_INDEX is 0"),
        ),
        ({}, {**TRAINJOB, "PET_NODE_RANK": "x"}, ("PET_NODE_RANK is 'x'", "a number")),
        ({}, {**TRAINJOB, "PET_NNODES": "many"}, ("PET_NNODES", "'many'")),
    ],
)
def test_what_contradicts_is_an_error_that_names_both(
    given: dict[str, Any], env: dict[str, str], both: tuple[str, str]
) -> None:
    with pytest.raises(UsageError) as error:
        with_pod_variables(_options(given), env)
    assert all(each in str(error.value) for each in both), error.value


def test_a_variable_of_dtrain_wins_and_the_config_file_does_not() -> None:
    """A JobSet of several Jobs has several pods of index 0: DTRAIN_NODE_RANK says which is which."""
    assert "node_rank" not in _filled({"node_rank": 0}, TRAINJOB, origin="DTRAIN_NODE_RANK")
    assert _filled({"node_rank": 0}, TRAINJOB, origin="dtrain.toml")["node_rank"] == 1


def test_for_torchrun_flags_win_and_need_no_rank() -> None:
    flags = {"node_rank": 0, "master_addr": "a"}
    assert with_pod_variables(_options(flags, as_torchrun=True), TRAINJOB).node_rank == 0
    c10d = {"rdzv_backend": "c10d", "rdzv_endpoint": "a:1", "nnodes": (2, 2)}
    assert _filled(c10d, TRAINJOB, as_torchrun=True) == {"nproc_per_node": "4"}


def test_the_origin_of_what_was_filled_is_its_variable() -> None:
    filled = with_pod_variables(replace(_options({}), origins=(("node_rank", "dtrain.toml"),)), TRAINJOB)
    assert dict(filled.origins)["node_rank"] == "PET_NODE_RANK"
    assert filled.typed == frozenset(), "a flag alone takes the place of other sources of hosts"
