"""A worker that has failed but whose process does not end: its failure counts at once, and holds no one up."""

import json
from pathlib import Path
from typing import Any

import pytest
from testbed.processes import run_dtrain
from testbed.warm import HEADER

HELD = {
    "by a thread": "import threading; threading.Thread(target=time.sleep, args=(600,)).start()",
    "by what runs at exit": "import atexit; atexit.register(time.sleep, 600)",
}
FAILED = {"raise ValueError('the cause')": (1, "raised"), "sys.exit(3)": (3, "exited")}


def run(folder: Path, script: str, *options: str) -> tuple[Any, dict[str, Any]]:
    """Run two workers, of which rank 1 does what `script` says; return the result and how the run ended."""
    begin = "import os, sys, time\nif os.environ['RANK'] == '0':\n    time.sleep(600)\n    sys.exit()\n"
    (folder / "script.py").write_text(begin + script)
    result = run_dtrain("run", "--nproc-per-node", "2", "--error-json", "e.json", *options, "script.py", cwd=folder)
    return result, json.loads((folder / "e.json").read_text())


@pytest.mark.parametrize("how", FAILED)
@pytest.mark.parametrize("held", HELD)
def test_a_failed_worker_that_does_not_end_is_killed(tmp_path: Path, held: str, how: str) -> None:
    code, kind = FAILED[how]
    result, ended = run(tmp_path, f"{HELD[held]}\n{how}\n", "--grace-s", "1")
    assert result.returncode == code, result.stderr
    cause = ended["cause"]
    assert (cause["kind"], cause["rank"]) == (kind, 1)
    assert ended["secondary_failures"]["count"] == 0
    assert ended["stopped"] == 1, "rank 0"


def test_a_failed_worker_ends_undisturbed(tmp_path: Path) -> None:
    script = (
        "import atexit, pathlib\natexit.register(pathlib.Path('whole').touch)\natexit.register(time.sleep, 5)\n"
        "raise ValueError('the cause')\n"
    )
    result, ended = run(tmp_path, script, "--grace-s", "600")
    assert result.returncode == 1, result.stderr
    assert (tmp_path / "whole").exists()
    assert ended["cause"]["after_s"] <= ended["duration_s"] - 5
    assert ended["cause"]["exit_status"] == 1
    assert ended["secondary_failures"]["count"] == 0


def test_a_caught_exception_or_a_child_s_is_no_failure(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        "try:\n    raise ValueError('caught')\nexcept ValueError:\n    pass\n"
        "pid = os.fork()\nif not pid:\n    raise ValueError('of a child')\n"
        "os.waitpid(pid, 0)\ntime.sleep(3)\nprint('well')"
    )
    result = run_dtrain("run", script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "well" in result.stdout


def test_a_worker_alone_that_does_not_end_is_restarted(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import mmap, os, threading, time\n"
        "with open(os.environ['DTRAIN_PROGRESS_FILE'], 'r+b') as file:\n"
        "    mmap.mmap(file.fileno(), 24)[16] = 2\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n    raise ValueError('once')\n"
    )
    result = run_dtrain("run", "--grace-s", "1", "--max-restarts", "1", script, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "raised ValueError" in result.stderr
    assert "only this worker restarts" in result.stderr


RAISES_IN = {
    "backward": (1, "loss = model(torch.ones(1, 2)).sum(); rank == 1 and loss.register_hook(fail); loss.backward()"),
    "a save": (
        0,
        "files.write = fail if rank == 0 else None; ddp.Checkpoint('s', in_background=False).save(1, model=model)",
    ),
}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("where", RAISES_IN)
def test_the_rank_that_an_error_of_ddp_tells_of_is_the_cause(tmp_path: Path, where: str) -> None:
    raises, statement = RAISES_IN[where]
    script = tmp_path / "script.py"
    script.write_text(
        HEADER + "import time\nimport ddp.checkpoint.file as files\nrank = ddp.init('gloo').rank\n"
        "def fail(*_):\n    raise ValueError('the cause')\n"
        "model = ddp.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        f"try:\n    {statement}\n"
        f"except Exception:\n    time.sleep(0.5 if rank == {raises} else 0)  # its peers end first\n    raise\n"
    )
    result = run_dtrain("run", "--nproc-per-node", "3", "--error-json", "e.json", script, cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    assert json.loads((tmp_path / "e.json").read_text())["cause"]["rank"] == raises, result.stderr
