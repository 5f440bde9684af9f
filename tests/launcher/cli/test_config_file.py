"""Where options come from: flag, then environment, then dtrain.toml or [tool.dtrain]. With the real command."""

import json
from pathlib import Path

import pytest
from testbed.processes import Result, run_dtrain

from launcher.cli.config_file import nearest, read_config_file
from launcher.errors import UsageError

SHOW = "import os, sys\nprint(os.environ['RANK'], os.environ.get('GIVEN'), *sys.argv[1:], flush=True)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "show.py").write_text(SHOW)
    return tmp_path


def _plan(folder: Path, *args: str, **env: str) -> Result:
    return run_dtrain("plan", "--json", *args, "show.py", cwd=folder, env=env)


def _workers(folder: Path, *args: str, **env: str) -> int:
    result = _plan(folder, *args, **env)
    assert (result.returncode, result.stderr) == (0, ""), result
    return len(json.loads(result.stdout))


def _refusal(folder: Path, *args: str, **env: str) -> str:
    result = _plan(folder, *args, **env)
    assert (result.returncode, result.stdout) == (2, ""), result
    assert "Traceback" not in result.stderr
    return result.stderr


# ---- precedence ----------------------------------------------------------------------------------------------


def test_a_flag_beats_the_environment_which_beats_the_file(folder: Path) -> None:
    assert _workers(folder) == 1
    (folder / "dtrain.toml").write_text("nproc-per-node = 2\n")
    assert _workers(folder) == 2
    assert _workers(folder, DTRAIN_NPROC_PER_NODE="3") == 3
    assert _workers(folder, "--nproc-per-node", "4", DTRAIN_NPROC_PER_NODE="3") == 4


def test_each_source_may_set_what_the_others_leave_open(folder: Path) -> None:
    (folder / "dtrain.toml").write_text("simulate = true\n")
    assert _workers(folder, "--nproc-per-node=2", DTRAIN_NNODES="3") == 6


def test_the_environment_switches_off_a_flag_of_the_file(folder: Path) -> None:
    (folder / "dtrain.toml").write_text("simulate = true\nnnodes = 2\nnproc-per-node = 1\n")
    assert _workers(folder) == 2
    assert _workers(folder, DTRAIN_SIMULATE="0", DTRAIN_NNODES="1") == 1


@pytest.mark.parametrize("spelling", ["nproc-per-node", "nproc_per_node"])
def test_pyproject_may_hold_the_settings_in_both_spellings(folder: Path, spelling: str) -> None:
    (folder / "pyproject.toml").write_text(f"[project]\nname = 'x'\n[tool.ruff]\n[tool.dtrain]\n{spelling} = 3\n")
    assert _workers(folder) == 3


def test_a_pyproject_without_settings_is_none_of_ours(folder: Path) -> None:
    (folder / "dtrain.toml").write_text("nproc_per_node = 2\n")
    for text in ("[project]\nname = 'x'\n", "[tool.ruff]\n", "tool = 3\n"):
        (folder / "pyproject.toml").write_text(text)
        assert read_config_file(folder, {"nproc_per_node"}).values == {"nproc_per_node": 2}


def test_hosts_in_a_file_are_text_or_a_list(folder: Path) -> None:
    for value in ('"a:1,b:2"', '["a:1", "b:2"]'):
        (folder / "dtrain.toml").write_text(f"hosts = {value}\n")
        assert _workers(folder) == 3


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
    assert _workers(folder, *args) == 2


def test_an_underscore_in_a_value_stays(folder: Path) -> None:
    assert "'my_host_'" not in _refusal(folder, "--hosts=my_host")
    assert "my_host" in _refusal(folder, "--hosts=my_host")


def test_options_are_never_abbreviated(folder: Path) -> None:
    assert "--nproc" in _refusal(folder, "--nproc", "2")


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


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("nproc-per-nod", "unknown key 'nproc-per-nod'; did you mean 'nproc_per_node'?"),
        ("exports", "unknown key 'exports'; did you mean 'export'?"),
        ("LogDir", "unknown key 'LogDir'; did you mean 'log_dir'?"),
        ("zzz", "unknown key 'zzz'; the keys are: accept_new_host_keys, "),
        ("as_json", "unknown key 'as_json'"),
    ],
)
def test_an_unknown_key_names_the_nearest_right_one(folder: Path, key: str, complaint: str) -> None:
    (folder / "dtrain.toml").write_text(f"{key} = 1\n")
    refusal = _refusal(folder)
    assert complaint in refusal
    assert "dtrain.toml" in refusal


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('nnodes = "x"', "nnodes"),
        ("nnodes = 1.5", "nnodes"),
        ("nnodes = true", "nnodes"),
        ("nnodes = [1, 2]", "nnodes"),
        ("nnodes = {a = 1}", "nnodes"),
        ("nnodes = 2026-01-01", "nnodes"),
        ("simulate = 1", "simulate"),
        ('simulate = "yes"', "simulate"),
        ('start_timeout_s = "soon"', "start_timeout_s"),
        ("log_dir = [1]", "log_dir"),
        ("export = true", "export"),
        ("export = {A = 1}", "export"),
        ("master-port = 'http'", "master_port"),
    ],
)
def test_a_value_of_the_wrong_type_names_file_and_key(folder: Path, line: str, key: str) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.dtrain]\n{line}\n")
    refusal = _refusal(folder)
    assert "[tool.dtrain] in " in refusal
    assert f"pyproject.toml: {key}: " in refusal


@pytest.mark.parametrize(
    ("args", "env"),
    [(("--nproc-per-node", "0"), {}), (("--nproc-per-node=-1",), {}), ((), {"DTRAIN_NPROC_PER_NODE": "x"})],
)
def test_a_wrong_number_of_workers_is_a_usage_error(folder: Path, args: tuple[str, ...], env: dict[str, str]) -> None:
    assert "it must be a number from 1, or auto, gpu or cpu" in _refusal(folder, *args, **env)


def test_a_value_out_of_range_is_refused_wherever_it_comes_from(folder: Path) -> None:
    assert "--nnodes is -1" in _refusal(folder, "--nnodes", "-1")
    assert "--nnodes is 'two'" in _refusal(folder, DTRAIN_NNODES="two")
    (folder / "dtrain.toml").write_text("nnodes = 0\n")
    assert "--nnodes is 0; it must be 1 or more" in _refusal(folder)


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
def test_a_wrong_file_blocks_no_command_that_does_not_use_it(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.dtrain]\n{text}\n")
    env = {"XDG_STATE_HOME": str(folder / "state")}
    for words in (["ps"], ["history"], ["stop", "--help"], ["completion", "bash"]):
        result = run_dtrain(*words, cwd=folder, env=env)
        assert result.returncode == 0, result
    stopped = run_dtrain("stop", "last", cwd=folder, env=env)
    assert "you have no runs" in stopped.stderr
    for words in (["run", "show.py"], ["check", "show.py"], ["warm"]):
        refused = run_dtrain(*words, cwd=folder, env=env)
        assert (refused.returncode, "pyproject.toml" in refused.stderr) == (2, True), refused


def test_a_file_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "dtrain.toml").write_bytes(b"log_dir = '\xff'\n")
    with pytest.raises(UsageError, match=r"dtrain\.toml cannot be read"):
        read_config_file(tmp_path, {"log_dir"})


def test_nothing_close_lists_all() -> None:
    assert nearest("qqq", {"b", "a"}) == "; the keys are: a, b"


def test_repeatable_options_take_one_value_or_a_quoted_list(tmp_path: Path) -> None:
    (tmp_path / "dtrain.toml").write_text('role = "ps:2:serve.py --port 0"\n')
    from_file = run_dtrain("plan", "--json", "train.py", cwd=tmp_path)
    assert from_file.stdout.count('"role": "ps"') == 2, from_file
    env = {"DTRAIN_ROLE": "'ps:1:serve.py --port 0' data:3"}
    from_variable = run_dtrain("plan", "--json", "train.py", cwd=tmp_path, env=env)
    assert [from_variable.stdout.count(f'"role": "{name}"') for name in ("ps", "data")] == [1, 3], from_variable
    (tmp_path / "show.py").write_text("import os\nprint(os.environ['A'], os.environ['B'])")
    shown = run_dtrain("run", "show.py", cwd=tmp_path, env={"DTRAIN_EXPORT": "'A=x y' B=1", "DTRAIN_ROLE": "w"})
    assert "x y 1" in shown.stdout, shown
    broken = run_dtrain("plan", "train.py", cwd=tmp_path, env={"DTRAIN_ROLE": "'ps:1"})
    assert (broken.returncode, 'DTRAIN_ROLE is "\'ps:1", which cannot be split' in broken.stderr) == (2, True), broken


def test_a_typed_source_of_hosts_wins_over_an_inherited_rank(tmp_path: Path) -> None:
    result = run_dtrain("plan", "--hosts", "a:1,b:1", "train.py", cwd=tmp_path, env={"DTRAIN_NODE_RANK": "0"})
    assert result.returncode == 0, result
