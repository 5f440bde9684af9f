"""The environment that scripts written for torchrun expect: every variable of it, in every worker."""

import json
from pathlib import Path

import pytest
from testbed.processes import run_dtrain

from launcher.hosts.host import Host, HostKind
from launcher.placement.environment import roles_in_order, worker_defaults, worker_environment
from launcher.placement.job_spec import CommandKind, JobSpec, WorkerCommand
from launcher.placement.placement import HostOffer, place
from launcher.protocol.reports import StoreOpened

HOSTS = [
    HostOffer("alpha", 2, ("3", "GPU-5"), True, "CUDA_VISIBLE_DEVICES", (0, 1, 2, 3), 4),
    HostOffer("beta", 1, ("0", "1"), True, "HIP_VISIBLE_DEVICES", (0,), 1),
    HostOffer("gamma", 1, (), False, "CUDA_VISIBLE_DEVICES", (0,), 1),
]


def _environments(gpus_per_proc: int | None = None) -> list[dict[str, str]]:
    nproc, hosts = (None, HOSTS) if gpus_per_proc is None else (1, HOSTS[:2])
    placement = place(hosts, nproc=nproc, gpus_per_proc=gpus_per_proc)
    spec = JobSpec(
        WorkerCommand(CommandKind.SCRIPT, "train.py"),
        tuple(Host(offer.name, HostKind.SSH) for offer in HOSTS),
        nnodes=(2, 3),
        gpus_per_proc=gpus_per_proc,
        run_id="r1",
        first_attempt=1,
        max_restarts=2,
        signals=("SIGTERM", "SIGINT"),
    )
    store, roles = StoreOpened(attempt=2, address="10.0.0.1", port=29500), roles_in_order(placement)
    workers = placement.workers
    return [worker_environment(spec, placement, worker, store, roles=roles, run_key="5e" * 32) for worker in workers]


def test_the_environment_is_the_contract_s() -> None:
    assert _environments()[1] == {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "default",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "r1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",
        "CUDA_VISIBLE_DEVICES": "3,GPU-5",
        "DTRAIN_ATTEMPT": "r1/2",
        "DTRAIN_HOST": "alpha",
        "DTRAIN_ELASTIC": "1",
        "DTRAIN_LOST_AFTER_S": "30",
        "DTRAIN_ON_NONFINITE": "warn",
        "DTRAIN_ROLES": "default:4",
        "DTRAIN_RUN_KEY": "5e" * 32,
    }


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("RANK", ["0", "1", "2", "3"]),
        ("LOCAL_RANK", ["0", "1", "0", "0"]),
        ("LOCAL_WORLD_SIZE", ["2", "2", "1", "1"]),
        ("GROUP_RANK", ["0", "0", "1", "2"]),
        ("ROLE_RANK", ["0", "1", "2", "3"]),
        ("CUDA_VISIBLE_DEVICES", ["3,GPU-5", "3,GPU-5", None, None]),
        ("HIP_VISIBLE_DEVICES", [None, None, "0,1", None]),
    ],
)
def test_what_differs_between_workers(name: str, values: list[str | None]) -> None:
    assert [env.get(name) for env in _environments()] == values


def test_a_worker_hears_that_several_gpus_are_its_own() -> None:
    """Else it would take them for those of its host, and the one at its local rank for its own."""
    assert not any("DTRAIN_OWN_GPUS" in env for env in _environments())
    assert [env.get("DTRAIN_OWN_GPUS") for env in _environments(gpus_per_proc=2)] == ["r1", "r1"]


def test_defaults_give_way_to_what_a_worker_inherits() -> None:
    defaults = [worker_defaults(worker) for worker in place(HOSTS, nproc=None).workers]
    assert [env["OMP_NUM_THREADS"] for env in defaults] == ["2", "2", "1", "1"]
    assert {env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] for env in defaults} == {"1"}


def test_a_real_worker_has_all_of_it(tmp_path: Path) -> None:
    script = "import json, os; print(json.dumps(dict(os.environ)), flush=True)"
    (tmp_path / "show.py").write_text(script)
    inherited = {
        "DTRAIN_RUN_KEY": "77",
        "DTRAIN_ROLES": "ps:1",
        "RANK": "77",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "elsewhere",
        "TORCHELASTIC_ERROR_FILE": "/elsewhere",
    }
    also = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "MINE": "a=b \n'c'", "GIVEN": "here", "OMP_NUM_THREADS": None}
    options = ["--simulate", "--nnodes", "2", "--nproc-per-node", "1", "--run-id", "r1", "-x", "GIVEN=there"]
    result = run_dtrain("run", *options, "show.py", cwd=tmp_path, env={**inherited, **also})
    assert result.returncode == 0, result
    lines = sorted(result.stdout.splitlines())
    for rank, line in enumerate(lines):
        env = json.loads(line.partition("] ")[2])
        expected = {**_environments()[0], "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        expected["DTRAIN_ELASTIC"] = "0"
        expected["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
        expected |= {"GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "2", "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": "2"}
        expected |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": env["MASTER_PORT"], "DTRAIN_HOST": f"sim{rank}"}
        expected |= {
            "TORCHELASTIC_RESTART_COUNT": "0",
            "DTRAIN_ATTEMPT": f"{env['TORCHELASTIC_RUN_ID']}/0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }
        expected |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "MINE": "a=b \n'c'", "GIVEN": "there"}
        expected |= {
            "DTRAIN_ROLES": "default:2",
            "DTRAIN_RUN_KEY": json.loads(lines[0].partition("] ")[2])["DTRAIN_RUN_KEY"],
        }
        del expected["CUDA_VISIBLE_DEVICES"]
        assert {name: env.get(name) for name in expected} == expected
        assert int(env["MASTER_PORT"]) > 0
        assert len(bytes.fromhex(env["DTRAIN_RUN_KEY"])) == 32
        assert int(env["OMP_NUM_THREADS"]) >= 1
        assert env["TORCHELASTIC_ERROR_FILE"] != "/elsewhere"
    assert len(lines) == 2
