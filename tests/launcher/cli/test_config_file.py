"""Where options come from: flag, then environment, then dtrain.toml or [tool.dtrain]. With the real command."""

import json
from pathlib import Path

import click
import pytest
from syrupy.assertion import SnapshotAssertion
from testbed.processes import run_dtrain
from testbed.typed import message_of, output_of

from launcher.cli.config_file import nearest, read_config_file
from launcher.errors import DtrainError, UsageError

SHOW = "import os, sys\nprint(os.environ['RANK'], os.environ.get('GIVEN'), *sys.argv[1:], flush=True)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "show.py").write_text(SHOW)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _workers(*args: str, **env: str) -> int:
    return len(json.loads(output_of("plan", "--json", *args, "show.py", **env)))


def _refusal(*args: str, **env: str) -> str:
    with pytest.raises((UsageError, click.UsageError)) as refused:
        output_of("plan", "--json", *args, "show.py", **env)
    return message_of(refused.value)


# ---- precedence ----------------------------------------------------------------------------------------------


def test_a_flag_beats_the_environment_which_beats_the_file(folder: Path) -> None:
    assert _workers() == 1
    (folder / "dtrain.toml").write_text("nproc-per-node = 2\n")
    assert _workers() == 2
    assert _workers(DTRAIN_NPROC_PER_NODE="3") == 3
    assert _workers("--nproc-per-node", "4", DTRAIN_NPROC_PER_NODE="3") == 4


def test_each_source_may_set_what_the_others_leave_open(folder: Path) -> None:
    (folder / "dtrain.toml").write_text("simulate = true\n")
    assert _workers("--nproc-per-node=2", DTRAIN_NNODES="3") == 6


def test_the_environment_switches_off_a_flag_of_the_file(folder: Path) -> None:
    (folder / "dtrain.toml").write_text("simulate = true\nnnodes = 2\nnproc-per-node = 1\n")
    assert _workers() == 2
    assert _workers(DTRAIN_SIMULATE="0", DTRAIN_NNODES="1") == 1


@pytest.mark.parametrize("spelling", ["nproc-per-node", "nproc_per_node"])
def test_pyproject_may_hold_the_settings_in_both_spellings(folder: Path, spelling: str) -> None:
    (folder / "pyproject.toml").write_text(f"[project]\nname = 'x'\n[tool.ruff]\n[tool.dtrain]\n{spelling} = 3\n")
    assert _workers() == 3


def test_a_pyproject_without_settings_is_none_of_ours(folder: Path) -> None:
    (folder / "dtrain.toml").write_text("nproc_per_node = 2\n")
    for text in ("[project]\nname = 'x'\n", "[tool.ruff]\n", "tool = 3\n"):
        (folder / "pyproject.toml").write_text(text)
        assert read_config_file(folder, {"nproc_per_node"}).values == {"nproc_per_node": 2}


def test_hosts_in_a_file_are_text_or_a_list(folder: Path) -> None:
    for value in ('"a:1,b:2"', '["a:1", "b:2"]'):
        (folder / "dtrain.toml").write_text(f"hosts = {value}\n")
        assert _workers() == 3


# ---- both spellings on the command line ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ("--nproc-per-node", "2"),
        ("--nproc_per_node", "2"),
        ("--nproc_per_node=2",),
        ("--nproc_per-node=2",),
        ("--nproc-per-node=2",),
    ],
)
def test_options_are_spelled_with_dashes_or_underscores(folder: Path, args: tuple[str, ...]) -> None:
    assert _workers(*args) == 2


def test_an_underscore_in_a_value_stays(folder: Path) -> None:
    assert "'my_host_'" not in _refusal("--hosts=my_host")
    assert "my_host" in _refusal("--hosts=my_host")


def test_options_are_never_abbreviated(folder: Path) -> None:
    assert "--nproc" in _refusal("--nproc", "2")


# ---- what is the script's ------------------------------------------------------------------------------------


def test_everything_after_the_script_is_the_script_s(folder: Path) -> None:
    args = ("--help", "--nnodes", "7", "--nproc_per_node=x", "-m", "-x", "--", "-h", "--no_such_option", "")
    result = run_dtrain("run", "-q", "show.py", *args, cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.partition("] ")[2] == f"0 None {' '.join(args)}\n"


def test_help_before_the_script_is_ours(folder: Path) -> None:
    result = run_dtrain("run", "--help", "show.py", cwd=folder)
    assert result.returncode == 0
    assert "--nproc-per-node" in result.stdout
    assert "everything after it is passed to the script" in result.stdout.replace("\n  ", " ")


def test_options_come_from_the_environment_and_the_file_too(folder: Path) -> None:
    (folder / "dtrain.toml").write_text('export = ["GIVEN=a b=c"]\nonly-rank = [1]\ngrace_s = 1\n')
    result = run_dtrain("run", "-q", "show.py", cwd=folder, env={"DTRAIN_NPROC_PER_NODE": "2", "DTRAIN_RUN_ID": "mine"})
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.partition("] ")[2] == "1 a b=c\n"
    assert {file.name for file in (folder / "runs" / "mine" / "attempt_0").iterdir()} == {"0", "1", "times.log"}


# ---- what is wrong -------------------------------------------------------------------------------------------


WRONG_LINES = [
    "nproc-per-nod = 1",
    "exports = 1",
    "LogDir = 1",
    "as_json = 1",
    'nnodes = "x"',
    "nnodes = 1.5",
    "nnodes = true",
    "nnodes = [1, 2]",
    "nnodes = {a = 1}",
    "nnodes = 2026-01-01",
    "nnodes = 0",
    "simulate = 1",
    'simulate = "yes"',
    'start_timeout_s = "soon"',
    "log_dir = [1]",
    "export = true",
    "export = {A = 1}",
    "master-port = 'http'",
]


@pytest.mark.parametrize("line", WRONG_LINES)
def test_a_wrong_line_is_named(folder: Path, line: str, snapshot: SnapshotAssertion) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.dtrain]\n{line}\n")
    said = _refusal()
    if "; the keys are: " in said:
        said = said.partition("; the keys are: ")[0]
    assert said.replace(str(folder), "FOLDER") == snapshot


def test_a_wrong_value_is_refused_wherever_it_comes_from(folder: Path) -> None:
    assert "it must be a number from 1, or auto, gpu or cpu" in _refusal(DTRAIN_NPROC_PER_NODE="x")
    assert "--nnodes is -1" in _refusal("--nnodes", "-1")
    assert "--nnodes is 'two'" in _refusal(DTRAIN_NNODES="two")
    assert "'some' is not one of 'merge', 'all'" in _refusal(DTRAIN_LINES="some")


@pytest.mark.parametrize(
    ("own", "project", "complaint"),
    [
        ("nnodes = 1", "[tool.dtrain]\nnnodes = 1", "keep one of them"),
        ("", "[tool.dtrain]\n", "keep one of them"),
        ("nnodes = ", None, "dtrain.toml cannot be read: "),
        (None, "[tool.dtrain", "pyproject.toml cannot be read: "),
        (None, "[tool]\ndtrain = 3", "[tool.dtrain] in "),
        (None, "[[tool.dtrain]]\nnnodes = 1", "it must be a table of settings"),
        ("log-dir = 'a'\nlog_dir = 'b'", None, "'log_dir' is set twice, once with '-' and once with '_'"),
    ],
)
def test_files_that_cannot_be_meant_are_errors(
    tmp_path: Path, own: str | None, project: str | None, complaint: str
) -> None:
    for name, text in (("dtrain.toml", own), ("pyproject.toml", project)):
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as raised:
        read_config_file(tmp_path, {"nnodes", "log_dir"})
    assert complaint in str(raised.value)


@pytest.mark.parametrize("text", ["nnodes = ", "nnodez = 2", 'nnodes = "x"', "follow = true"])
def test_a_wrong_file_blocks_no_command_that_does_not_use_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.dtrain]\n{text}\n")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    for argv in (["ps"], ["history"], ["stop", "--help"], ["completion", "bash"]):
        output_of(*argv)
    with pytest.raises(DtrainError, match="you have no runs"):
        output_of("stop", "last")
    for argv in (["run", "show.py"], ["check", "show.py"], ["warm"]):
        with pytest.raises((UsageError, click.UsageError)) as refused:
            output_of(*argv)
        assert "pyproject.toml" in message_of(refused.value)


def test_a_file_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "dtrain.toml").write_bytes(b"log_dir = '\xff'\n")
    with pytest.raises(UsageError, match=r"dtrain\.toml cannot be read"):
        read_config_file(tmp_path, {"log_dir"})


def test_nothing_close_lists_all() -> None:
    assert nearest("qqq", {"b", "a"}) == "; the keys are: a, b"


def test_repeatable_options_take_one_value_or_a_quoted_list(folder: Path) -> None:
    def roles(**env: str) -> list[str]:
        return [row["role"] for row in json.loads(output_of("plan", "--json", "train.py", **env))]

    (folder / "dtrain.toml").write_text('role = "ps:2:serve.py --port 0"\n')
    assert roles().count("ps") == 2
    from_variable = roles(DTRAIN_ROLE="'ps:1:serve.py --port 0' data:3")
    assert [from_variable.count(name) for name in ("ps", "data")] == [1, 3]
    assert 'DTRAIN_ROLE is "\'ps:1", which cannot be split' in _refusal(DTRAIN_ROLE="'ps:1")
    shown = run_dtrain("run", "show.py", cwd=folder, env={"DTRAIN_EXPORT": "'GIVEN=x y' B=1", "DTRAIN_ROLE": "w"})
    assert "0 x y" in shown.stdout, shown


def test_a_typed_source_of_hosts_wins_over_an_inherited_rank(folder: Path) -> None:
    assert _workers("--hosts", "a:1,b:1", DTRAIN_NODE_RANK="0") == 2
