"""torchrun's command line is taken whole, and `dtrain-torchrun` stands in for the word `torchrun`."""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from syrupy.assertion import SnapshotAssertion
from testbed.processes import Result, run_dtrain, run_program

from launcher.cli.main import cli
from launcher.cli.options import Options
from launcher.cli.torchrun import defaults, translate
from launcher.errors import UsageError

SHOW = "import json, os, sys\nprint(json.dumps([dict(os.environ), sys.argv[1:]]), flush=True)"


def _torchrun(*words: str | Path, cwd: Path, env: Mapping[str, str | None] | None = None) -> Result:
    program = "import sys; from launcher.__main__ import torchrun; sys.argv[0] = 'dtrain-torchrun'; torchrun()"
    return run_program(sys.executable, "-c", program, *words, cwd=cwd, env=env)


def _shown(result: Result) -> list[tuple[dict[str, str], list[str]]]:
    assert result.returncode == 0, result
    return [tuple(json.loads(line.partition("] ")[2])) for line in result.stdout.splitlines()]


def test_every_option_of_torchrun_is_known() -> None:
    from torch.distributed.run import get_args_parser

    known = {name for param in cli.commands["run"].params if isinstance(param, click.Option) for name in param.opts}
    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    missing = {name for name in theirs if name.replace("_", "-") not in known} - {"-h", "--help"}
    assert missing == set()


def test_a_command_line_of_torchrun_s_runs_unchanged(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    words = [
        "--nnodes=1:1 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 --rdzv_id=job/7",
        "--max_restarts=3 --rdzv-conf join_timeout=30,read_timeout=3 --monitor_interval 5 --role trainer",
        "--log_dir logs --tee 3 --start-method spawn --shutdown-timeout 4 --signals-to-handle SIGTERM,SIGINT",
        "show.py --lr 1 --nnodes 9",
    ]
    result = _torchrun(*" ".join(words).split(), cwd=tmp_path)
    (env, argv), _ = sorted(_shown(result), key=lambda shown: shown[0]["RANK"])
    assert argv == ["--lr", "1", "--nnodes", "9"]
    names = ["WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS"]
    assert [env[name] for name in names] == ["2", "trainer", "job-7", "3"]
    assert (tmp_path / "logs" / "job-7" / "attempt_0" / "1" / "stdout.log").exists()
    for word in ("--monitor-interval", "--start-method", "--rdzv-conf read_timeout"):
        assert result.stderr.count(f"{word} has no meaning here") == 1


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("-np", "dtrain's option for -n is --nproc-per-node; it counts the workers of each host"),
        ("--max-np", "dtrain's option for --max-np is --nnodes MIN:MAX"),
        ("--num_gpus", "dtrain's option for --num-gpus is --nproc-per-node"),
    ],
)
def test_options_of_other_launchers_are_translated(tmp_path: Path, option: str, said: str) -> None:
    result = run_dtrain("run", option, "2", "show.py", cwd=tmp_path)
    assert (result.returncode, said in result.stderr) == (2, True), result


def test_its_defaults_are_torchrun_s(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    ((env, _),) = _shown(_torchrun("show.py", cwd=tmp_path))
    assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("1", "1")
    two = _shown(_torchrun("show.py", cwd=tmp_path, env={"PET_NPROC_PER_NODE": "2", "PET_STANDALONE": "1"}))
    assert {env["WORLD_SIZE"] for env, _ in two} == {"2"}


def test_old_scripts_get_their_local_rank_as_an_argument(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    shown = _shown(_torchrun("--nproc-per-node", "2", "--pass-local-rank", "show.py", "x", cwd=tmp_path))
    assert {(env["LOCAL_RANK"], *argv) for env, argv in shown} == {
        ("0", "--local-rank=0", "x"),
        ("1", "--local-rank=1", "x"),
    }
    shown = _shown(_torchrun("--nproc-per-node", "2", "--virtual-local-rank", "show.py", cwd=tmp_path))
    assert {env["LOCAL_RANK"] for env, _ in shown} == {"0"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rdzv_endpoint": "alpha:29400"}, {"master_addr": "alpha", "master_port": 29400}),
        ({"rdzv_endpoint": "alpha"}, {"master_addr": "alpha", "master_port": None}),
        ({"rdzv_endpoint": "[fe80::1]:7"}, {"master_addr": "fe80::1", "master_port": 7}),
        ({"rdzv_conf": "timeout=900,is_host=true"}, {"start_timeout_s": 900.0, "rdzv_is_host": True}),
        ({"rdzv_conf": "last_call_timeout=3"}, {"last_call_s": 3.0}),
        ({"rdzv_conf": "rank=3"}, {"node_rank": 3}),
        ({"shutdown_timeout": 7.0}, {"grace_s": 7.0}),
        ({"signals_to_handle": "SIGTERM, sigusr1"}, {"signals": ("SIGTERM", "SIGUSR1")}),
        ({"standalone": True, "nnodes": (2, 4), "rdzv_endpoint": "a:1"}, {"nnodes": (1, 1), "master_addr": None}),
    ],
)
def test_its_words_become_ours(given: dict[str, object], expected: dict[str, object]) -> None:
    before = Options(**given)  # type: ignore[arg-type]  # some options of many types
    options = replace(before, **translate(before)[0])
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    "given",
    [
        {"rdzv_backend": "etcd"},
        {"rdzv_endpoint": "a:b:c"},
        {"rdzv_conf": "timeout"},
        {"rdzv_conf": "timeout=soon"},
        {"rdzv_conf": "rank=x"},
        {"signals_to_handle": "SIGKILL"},
    ],
    ids=lambda given: " ".join("=".join(each) for each in given.items()),
)
def test_a_wrong_option_of_torchrun_s(given: dict[str, Any], snapshot: SnapshotAssertion) -> None:
    with pytest.raises(UsageError) as refused:
        translate(Options(**given))
    assert str(refused.value) == snapshot


def test_variables_come_before_a_file_and_that_before_defaults() -> None:
    env = {"PET_MAX_RESTARTS": "2", "PET_STANDALONE": "1", "PET_OTHER": "x", "PET_COMMAND": "y"}
    found = defaults(env, {"max_restarts": "1", "nproc_per_node": "4"})
    assert found == {"nproc_per_node": "4", "max_restarts": "2", "standalone": True}
