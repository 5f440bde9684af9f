"""Roles beside the ordinary workers: read, placed, given their environment, and waited for or not."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from testbed.processes import run_dtrain
from testbed.typed import output_of

from launcher.errors import UsageError
from launcher.hosts.host import Host, HostKind
from launcher.placement.environment import (
    ecosystem_environments,
    parse_ecosystems,
    roles_in_order,
    serving_ranks,
    shared_prefixes,
    worker_environment,
)
from launcher.placement.job_spec import CommandKind, JobSpec, WorkerCommand
from launcher.placement.placement import HostOffer, Placement, place
from launcher.placement.roles import Role, Roles, parse_role, roles_of
from launcher.protocol.reports import StoreOpened

CPU = HostOffer("a", None, (), False, "CUDA_VISIBLE_DEVICES", (0, 1, 2, 3), 4)
GPU = HostOffer("b", None, ("0", "1"), True, "CUDA_VISIBLE_DEVICES", (0, 1), 2)
TENSORFLOW = roles_of([], chief=True, ps=2, evaluator=True)
SHOW = (
    "import json, os, signal, sys, time\n"
    "print(json.dumps({k: v for k, v in os.environ.items() if 'R' in k}), sys.argv[1:], flush=True)\n"
)


def _fields(placement: Placement, *names: str) -> list[tuple[object, ...]]:
    return [tuple(getattr(worker, name) for name in names) for worker in placement.workers]


# ---- reading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "role"),
    [
        ("trainer", "trainer"),
        ("ps:2", Role("ps", 2)),
        ("ps:2:serve.py --port 0", Role("ps", 2, ("serve.py", "--port", "0"))),
        ("eval:1:python -c 'print(1)'", Role("eval", 1, ("python", "-c", "print(1)"))),
    ],
)
def test_a_role_is_a_name_a_count_and_a_command(text: str, role: Role | str) -> None:
    assert parse_role(text) == role


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (["ps:0"], {}),
        (["ps:1:"], {}),
        (["ps:1:'x"], {}),
        (["2ps"], {}),
        (["a", "b"], {}),
        (["ps:1", "ps:2"], {}),
        (["ps:1"], {"ps": 1}),
        ([], {"ps": -1}),
        (["ps:1"], {"ends_with": "chief"}),
    ],
    ids=str,
)
def test_a_wrong_role_is_an_error(given: list[str], options: dict[str, Any], snapshot: SnapshotAssertion) -> None:
    with pytest.raises(UsageError) as refused:
        roles_of(given, **options)
    assert str(refused.value) == snapshot


@pytest.mark.parametrize(
    ("roles", "waits_for"),
    [
        (roles_of(["ps:2"]), ["default", "ps"]),
        (roles_of(["ps:2"], ends_with="default"), ["default"]),
        (roles_of([], chief=True), ["chief", "worker"]),
        (roles_of([], ps=2), ["worker"]),
        (roles_of([], chief=True, evaluator=True), ["chief", "worker"]),
        (TENSORFLOW, ["chief"]),
        (roles_of(["data:1"], chief=True, ps=1), ["chief", "data"]),
    ],
)
def test_tensorflow_s_servers_are_not_waited_for(roles: Roles, waits_for: list[str]) -> None:
    assert [name for name in roles.names if roles.needs(name)] == waits_for


@pytest.mark.parametrize("options", [("--ps", "2"), ("--role", "ps:2:serve.py")])
def test_servers_without_workers_are_an_error(options: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match="servers without workers: --nproc-per-node is 0, beside 2 of role ps; "):
        output_of("plan", *options, "--nproc-per-node", "0", "train.py")


# ---- placing -------------------------------------------------------------------------------------------------


def test_other_roles_follow_the_workers_and_go_round_the_hosts() -> None:
    placement = place([CPU, GPU], nproc=2, roles=TENSORFLOW)
    names = ("rank", "role", "role_rank", "role_world_size", "host", "local_rank", "local_world_size")
    assert _fields(placement, *names) == [
        (0, "chief", 0, 1, "a", 0, 2),
        (1, "worker", 0, 3, "a", 1, 2),
        (2, "worker", 1, 3, "b", 0, 2),
        (3, "worker", 2, 3, "b", 1, 2),
        (4, "ps", 0, 2, "a", 0, 1),
        (5, "ps", 1, 2, "b", 0, 1),
        (6, "evaluator", 0, 1, "a", 0, 1),
    ]  # fmt: skip
    assert placement.per_host == (4, 3)
    assert [worker.visible for worker in placement.workers] == [None, None, "0,1", "0,1", None, "", None]
    assert {worker.rank for worker in placement.workers if worker.needed} == {0}


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.lists(st.integers(1, 9), max_size=3), st.booleans())
def test_ranks_are_dense_whatever_roles_there_are(slots: list[int], counts: list[int], chief: bool) -> None:
    offers = [HostOffer(f"h{k}", count, (), False, "CUDA_VISIBLE_DEVICES", (0,), 1) for k, count in enumerate(slots)]
    roles = roles_of([f"r{k}:{count}" for k, count in enumerate(counts)], chief=chief)
    placement = place(offers, nproc=None, roles=roles)
    workers = placement.workers
    assert [worker.rank for worker in workers] == list(range(sum(slots) + sum(counts)))
    for name in {worker.role for worker in workers}:
        same = [worker for worker in workers if worker.role == name]
        assert [worker.role_rank for worker in same] == list(range(len(same)))
        assert {worker.role_world_size for worker in same} == {len(same)}
    on_host = Counter(worker.host for worker in workers)
    assert tuple(on_host[offer.name] for offer in offers) == placement.per_host
    assert (
        max(on_host[o.name] - n for o, n in zip(offers, slots, strict=True))
        - min(on_host[o.name] - n for o, n in zip(offers, slots, strict=True))
        <= 1
    ), "other roles are spread evenly"
    places = [(w.role if w.rank >= sum(slots) else "", w.host, w.local_rank) for w in workers]
    assert len(set(places)) == len(places)


def test_tasks_of_one_machine_count_their_local_ranks_on() -> None:
    def task(name: str, machine: str, gpus: tuple[str, ...]) -> HostOffer:
        return HostOffer(name, 1, gpus, bool(gpus), "CUDA_VISIBLE_DEVICES", (0,), 1, machine=machine)

    both = ("0", "1")
    placement = place(
        [task("t0", "n1", both), task("t1", "n1", both), task("t2", "n2", ("0",)), task("t3", "n2", ("3",))], nproc=None
    )
    assert _fields(placement, "rank", "local_rank", "local_world_size", "node_rank", "gpus", "visible") == [
        (0, 0, 2, 0, ("0",), "0,1"),
        (1, 1, 2, 0, ("1",), "0,1"),
        (2, 0, 2, 1, ("0",), "0"),
        (3, 1, 2, 1, ("3",), "3"),
    ]
    assert [worker.bound for worker in placement.workers] == [False, False, True, True]
    assert placement.nodes == 2


def test_tasks_with_the_same_processors_share_them() -> None:
    def threads(machines: list[str], cores: list[tuple[int, ...]], *others: str) -> list[int]:
        offers = [
            HostOffer(f"t{k}", 1, (), False, "CUDA_VISIBLE_DEVICES", own, len(own), machine=machine)
            for k, (machine, own) in enumerate(zip(machines, cores, strict=True))
        ]
        return [worker.threads for worker in place(offers, nproc=None, roles=roles_of([*others])).workers]

    every = tuple(range(32))
    assert threads(["node1"] * 4, [every] * 4) == [8, 8, 8, 8]
    assert threads(["node1", "node1", "node2"], [every] * 3) == [16, 16, 32]
    assert threads(["node1"] * 2, [every[:16], every[16:]]) == [16, 16], "bound"
    assert threads(["", ""], [every] * 2) == [32, 32], "hosts"
    assert threads(["node1"] * 2, [every] * 2, "data:2") == [8, 8, 8, 8]


def test_an_isolated_worker_sees_its_own_gpu() -> None:
    placement = place([GPU], nproc=2, isolate=True)
    assert _fields(placement, "gpus", "visible") == [(("0",), "0"), (("1",), "1")]


# ---- their environment ---------------------------------------------------------------------------------------


def _environments(wanted: tuple[str, ...], roles: Roles) -> list[dict[str, str]]:
    placement = place([CPU, GPU], nproc=2, roles=roles)
    addresses = {rank: f"10.0.0.1:{5000 + rank}" for rank in serving_ranks(wanted, placement)}
    prefixes = shared_prefixes(wanted, placement, addresses)
    environments = ecosystem_environments(wanted, placement, prefixes)
    return [{name: prefixes.get(name, "") + value for name, value in env.items()} for env in environments]


def test_tensorflow_s_cluster_has_all_but_the_evaluator() -> None:
    configs = [json.loads(env["TF_CONFIG"]) for env in _environments(parse_ecosystems(None, TENSORFLOW), TENSORFLOW)]
    at = "10.0.0.1:500"
    cluster = {"chief": [at + "0"], "worker": [at + "1", at + "2", at + "3"], "ps": [at + "4", at + "5"]}
    assert [config["cluster"] for config in configs] == [cluster] * 7
    tasks = [(config["task"]["type"], config["task"]["index"]) for config in configs]
    assert tasks == [("chief", 0), ("worker", 0), ("worker", 1), ("worker", 2), ("ps", 0), ("ps", 1), ("evaluator", 0)]


def test_without_roles_all_are_tensorflow_s_workers() -> None:
    (config, *_) = [json.loads(env["TF_CONFIG"]) for env in _environments(("tf",), Roles())]
    assert (list(config["cluster"]), len(config["cluster"]["worker"])) == (["worker"], 4)
    assert ["TF_CONFIG" in env for env in _environments(("tf",), roles_of(["data:1"]))] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("text", "roles", "wanted"),
    [
        (None, roles_of([], ps=2), ()),  # ddp's
        ("tf", roles_of([], ps=2), ("tf",)),
        (None, roles_of([], chief=True, ps=2), ("tf",)),
        (None, roles_of([], chief=True), ("tf",)),
        (None, roles_of([], ps=1, evaluator=True), ("tf",)),
        ("horovod", Roles(), ("horovod",)),
    ],
)
def test_tensorflow_s_variable_is_for_those_who_ask(text: str | None, roles: Roles, wanted: tuple[str, ...]) -> None:
    assert parse_ecosystems(text, roles) == wanted


def _calls_for_each_worker(wanted: tuple[str, ...], workers: int) -> float:
    """How many calls of Python code, and of C code from there, the variables of a worker take."""
    offers = [HostOffer(f"h{k}", 8, (), False, "CUDA_VISIBLE_DEVICES", (0,), 1) for k in range(workers // 8)]
    placement = place(offers, nproc=8)
    addresses = {rank: f"10.0.0.1:{rank}" for rank in serving_ranks(wanted, placement)}
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    environments = list(ecosystem_environments(wanted, placement, shared_prefixes(wanted, placement, addresses)))
    sys.setprofile(None)
    assert len(environments) == workers
    return calls / workers


@pytest.mark.parametrize("launcher", ["tf", "horovod"])
def test_a_worker_s_variables_cost_the_same_among_many(launcher: str) -> None:
    assert _calls_for_each_worker((launcher,), 800) < 1.5 * _calls_for_each_worker((launcher,), 80)


def test_other_launchers_variables_are_theirs() -> None:
    env = _environments(("mpi", "deepspeed", "horovod"), Roles())[3]
    assert env == {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_NODE_RANK": "1",
        "OMPI_UNIVERSE_SIZE": "4",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
        "LOCAL_SIZE": "2",
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_HOSTNAME": "b",
    }


def test_an_unknown_launcher_is_an_error() -> None:
    with pytest.raises(UsageError, match="--env-for 'jax' is not known; there are: tf, mpi, deepspeed, horovod"):
        parse_ecosystems("tf,jax", Roles())


def test_torchrun_s_variables_name_the_role() -> None:
    placement = place([CPU, GPU], nproc=1, roles=roles_of(["trainer", "ps:1"]))
    spec = JobSpec(WorkerCommand(CommandKind.SCRIPT, "t.py"), (Host("a", HostKind.SSH),), run_id="r")
    store, roles = StoreOpened(attempt=0, address="a", port=1), roles_in_order(placement)
    environments = [worker_environment(spec, placement, w, store, roles=roles, run_key="k") for w in placement.workers]
    names = ["RANK", "WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"]
    assert [[env[name] for name in names] for env in environments] == [
        ["0", "3", "trainer", "0", "2", "0", "2"],
        ["1", "3", "trainer", "1", "2", "1", "2"],
        ["2", "3", "ps", "0", "1", "0", "2"],
    ]


def test_every_process_gets_all_roles_in_the_order_of_the_ranks() -> None:
    assert roles_in_order(place([CPU, GPU], nproc=2, roles=TENSORFLOW)) == "chief:1,worker:3,ps:2,evaluator:1"
    assert roles_in_order(place([CPU, GPU], nproc=2)) == "default:4"
    assert roles_in_order(place([CPU], nproc=1, roles=roles_of([], chief=True, ps=1))) == "chief:1,ps:1"


def test_another_command_s_processes_have_a_world_of_their_own() -> None:
    placement = place([CPU, GPU], nproc=1, roles=roles_of(["io:2:serve.py", "same:1"]))
    assert _fields(placement, "role", "rank", "world_rank", "world_size") == [
        ("default", 0, 0, 3),
        ("default", 1, 1, 3),
        ("io", 2, 0, 2),
        ("io", 3, 1, 2),
        ("same", 4, 2, 3),
    ]


# ---- real runs -----------------------------------------------------------------------------------------------


def test_a_run_ends_with_its_leaders_and_stops_the_servers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(0.2)\nprint('trained')")
    (tmp_path / "serve.py").write_text("import sys, time\nprint('serving', sys.argv[1], flush=True)\ntime.sleep(600)")
    options = ["--nproc-per-node", "2", "--role", "trainer", "--role", "ps:2:serve.py 7", "--ends-with", "trainer"]
    result = run_dtrain("run", *options, "train.py", cwd=tmp_path)
    assert result.returncode == 0, result
    assert result.stdout.count("trained") == 2
    assert "2 workers finished successfully after" in result.stderr
    assert ", 2 of other roles stopped; 0 processes left on 1 host" in result.stderr


def test_a_server_that_fails_ends_the_run_with_its_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)")
    options = ["--role", "ps:1:bash -c 'exit 7'", "--ends-with", "default", "--grace-s", "1"]
    result = run_dtrain("run", *options, "train.py", cwd=tmp_path)
    assert result.returncode == 7, result
    assert "rank 1 on" in result.stderr


def test_ports_in_tf_config_are_free_for_their_owners(tmp_path: Path) -> None:
    """They are below those that the kernel chooses, so that no connection takes one before its owner."""
    (tmp_path / "serve.py").write_text(
        "import json, os, socket\n"
        "config = json.loads(os.environ['TF_CONFIG'])\n"
        "task = config['task']\n"
        "host, port = config['cluster'][task['type']][task['index']].rsplit(':', 1)\n"
        "server = socket.create_server((host, int(port)))\n"
        "lowest = int(open('/proc/sys/net/ipv4/ip_local_port_range').read().split()[0])\n"
        "print('bound', task['type'], task['index'], int(port) < lowest, flush=True)\n"
    )
    result = run_dtrain(
        "run", "--simulate", "--nnodes", "2", "--nproc-per-node", "2", "--chief", "--ps", "2", "--ends-with",
        "chief,worker,ps", "serve.py", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result
    bound = sorted(line.partition("] ")[2] for line in result.stdout.splitlines())
    tasks = ["chief 0", "ps 0", "ps 1", "worker 0", "worker 1", "worker 2"]
    assert bound == [f"bound {task} True" for task in tasks]
