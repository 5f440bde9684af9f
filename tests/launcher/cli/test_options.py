"""One dataclass holds the options; what the command line makes of nothing is what the dataclass says."""

from dataclasses import fields

import click
import pytest

from launcher.cli.options import Options, takes_options
from launcher.cli.request import read_request
from launcher.placement.job_spec import JobSpec

# What request.py reads before the job has it.
READ = {
    "hang",
    "chaos",
    "command",
    "hosts",
    "workdir",
    "python",
    "export",
    "log_dir",
    "run_id",
    "env_for",
    "numa_binding",
}


def _typed(*words: str) -> Options:
    found: list[Options] = []
    command = click.command(context_settings={"allow_interspersed_args": False})(takes_options(found.append))
    command.main(list(words), standalone_mode=False)
    return found[0]


def test_the_command_line_has_no_defaults_of_its_own() -> None:
    assert _typed("train.py") == Options(command=("train.py",), typed=frozenset({"command"}))


def test_what_was_typed_is_known_by_name() -> None:
    found = _typed("--grace-s", "3", "-x", "A", "-x", "B=1", "--nnodes", "2:4", "-m", "--role", "ps:2", "train", "-x")
    assert (found.grace_s, found.export, found.nnodes, found.module, found.role) == (
        3.0, ("A", "B=1"), (2, 4), True, ("ps:2",)
    )  # fmt: skip
    assert found.command == ("train", "-x")
    assert found.typed == {"grace_s", "export", "nnodes", "module", "role", "command"}


def test_options_and_job_agree_on_what_both_have() -> None:
    ours, theirs = ({found.name: found for found in fields(kind)} for kind in (Options, JobSpec))
    shared = ours.keys() & theirs.keys() - READ
    assert {name: (ours[name].type, ours[name].default) for name in shared} == {
        name: (theirs[name].type, theirs[name].default) for name in shared
    }
    assert {"grace_s", "max_restarts", "signals", "last_call_s"} <= shared


def test_what_both_have_goes_into_the_job_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    asked = Options(command=("train.py",), grace_s=3.0, stall_timeout_s=7.0, oversubscribe=True, master_port=5)
    spec = read_request(asked).spec
    assert (spec.grace_s, spec.stall_timeout_s, spec.oversubscribe, spec.master_port) == (3.0, 7.0, True, 5)
