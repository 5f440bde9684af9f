"""One dataclass holds the options; what the command line makes of nothing is what the dataclass says."""

import re
from dataclasses import fields, make_dataclass
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from testbed.processes import MARK, run_dtrain
from testbed.typed import typed

from launcher.cli import request
from launcher.cli.main import cli
from launcher.cli.options import Options
from launcher.cli.request import read_request
from launcher.placement.job_spec import INTERNAL_VARIABLES, JobSpec


def test_the_command_line_has_no_defaults_of_its_own() -> None:
    assert typed("train.py") == Options(command=("train.py",), typed=frozenset({"command"}))


def test_what_was_typed_is_known_by_name() -> None:
    found = typed("--grace-s", "3", "-x", "A", "-x", "B=1", "--nnodes", "2:4", "-m", "--role", "ps:2", "train", "-x")
    assert (found.grace_s, found.export, found.nnodes, found.module, found.role) == (
        3.0, ("A", "B=1"), (2, 4), True, ("ps:2",)
    )  # fmt: skip
    assert found.command == ("train", "-x")
    assert found.typed == {"grace_s", "export", "nnodes", "module", "role", "command"}


def test_what_the_job_takes_over_has_the_job_s_default() -> None:
    ours, theirs = ({found.name: found.default for found in fields(kind)} for kind in (Options, JobSpec))
    assert {name: ours[name] for name in request._UNCHANGED} == {name: theirs[name] for name in request._UNCHANGED}


@pytest.mark.parametrize(("field", "kind"), [("grace_s", "int"), ("grace_seconds", "float")])
def test_a_field_of_the_job_without_an_option_is_an_error(
    monkeypatch: pytest.MonkeyPatch, field: str, kind: str
) -> None:
    declared = [(found.name, found.type) for found in fields(JobSpec) if found.name != "grace_s"]
    monkeypatch.setattr(request, "JobSpec", make_dataclass("JobSpec", [*declared, (field, kind)]))
    with pytest.raises(TypeError, match=f"'{field}'"):
        request._check_fields()


def test_what_both_have_goes_into_the_job_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    asked = Options(command=("train.py",), grace_s=3.0, stall_timeout_s=7.0, oversubscribe=True, master_port=5)
    spec = read_request(asked).spec
    assert (spec.grace_s, spec.stall_timeout_s, spec.oversubscribe, spec.master_port) == (3.0, 7.0, True, 5)


def test_help_lists_every_option_under_a_heading() -> None:
    text = CliRunner().invoke(cli, ["run", "--help"], terminal_width=110).stdout
    headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert headings == [
        "Hosts", "Workers", "GPUs and processors", "Failure", "Output and runs", "Roles, and other frameworks",
        "Nodes started by hand", "torchrun's", "Options",
    ]  # fmt: skip
    listed, rest = text.split("\nOptions:\n")
    assert rest.split() == ["-h,", "--help", "Show", "this", "message", "and", "exit."]
    assert listed.index("--hosts ") < listed.index("--nproc-per-node") < listed.index("--node-rank")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_gets_a_completion_that_asks_this_command(shell: str) -> None:
    script = CliRunner().invoke(cli, ["completion", shell]).stdout
    assert "_DTRAIN_COMPLETE" in script
    assert "dtrain" in script


def test_words_are_completed() -> None:
    def completed(*words: str) -> list[str]:
        return [item.value for item in ShellComplete(cli, {}, "dtrain", "_DTRAIN_COMPLETE").get_completions(
            list(words[:-1]), words[-1]
        )]  # fmt: skip

    assert completed("hi") == ["history"]
    assert completed("run", "--nproc") == ["--nproc-per-node"]
    assert completed("run", "--start-method", "fo") == ["fork", "forkserver"]
    files = ShellComplete(cli, {}, "dtrain", "_DTRAIN_COMPLETE").get_completions(["run"], "tr")
    assert [item.type for item in files] == ["file"]


def test_runs_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    items = ShellComplete(cli, {}, "dtrain", "_DTRAIN_COMPLETE").get_completions(["stop"], "")
    assert [item.value for item in items] == ["last"]


def test_what_a_worker_gets_is_internal_or_an_option_s(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import os\nprint(*(name for name in os.environ if name.startswith('DTRAIN_')))\n")
    result = run_dtrain("run", script, cwd=tmp_path)
    names = {*result.stdout.partition("] ")[2].split()}
    assert len(names) > 10, result
    assert names - INTERNAL_VARIABLES == {"DTRAIN_ON_NONFINITE", MARK}
