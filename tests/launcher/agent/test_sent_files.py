"""The orders of a run whose files were sent to this host."""

from pathlib import Path

import pytest

from launcher.agent.sent_files import moved, moved_orders, moved_start
from launcher.protocol.commands import Prepare, StartWorker


@pytest.fixture
def tree(tmp_path: Path) -> str:
    (tmp_path / "tree/work/project").mkdir(parents=True)
    (tmp_path / "tree/work/project/train.py").touch()
    return str(tmp_path / "tree")


def prepare(workdir: str, script: str, **export: str) -> Prepare:
    return Prepare("r", workdir, script, None, export, 1.0, 0.0, [], 0, 1, [], target=script)


def test_what_was_sent_is_named_where_it_lies(tree: str) -> None:
    assert moved("/work/project/train.py", tree) == f"{tree}/work/project/train.py"
    assert moved("/work/data", tree) == "/work/data"
    assert moved("train.py", tree) == "train.py"
    assert moved("/work/project", "") == "/work/project"


def test_folder_script_and_search_path_are_those_of_the_tree(tree: str) -> None:
    message = prepare("/work/project", "/work/project/train.py", PYTHONPATH="/work/project:/opt/lib", NAME="x")
    found = moved_orders(message, tree, {"PYTHONPATH": "/sent/dtrain"})
    assert (found.workdir, found.script) == (f"{tree}/work/project", f"{tree}/work/project/train.py")
    assert found.export == {"PYTHONPATH": f"/sent/dtrain:{tree}/work/project:/opt/lib", "NAME": "x"}
    assert found.target == found.script


def test_a_worker_s_arguments_are_those_of_the_tree(tree: str) -> None:
    start = StartWorker(0, 0, "script", ["/work/project/train.py", "--lr", "1", "/work/project", "/data"], {}, {})
    assert moved_start(start, tree).argv[0] == f"{tree}/work/project/train.py"
    assert moved_start(start, tree).argv[1:] == ["--lr", "1", f"{tree}/work/project", "/data"]
    assert moved_start(start, "") is start
