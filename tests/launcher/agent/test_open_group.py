"""A script that leaves torch's process group open ends as under plain python, and never by the abort of a thread."""

import gzip
import re
import sys
import textwrap
from pathlib import Path

import pytest
from testbed import REPOSITORY
from testbed.processes import Result, run_dtrain, run_program

BOOTSTRAP = REPOSITORY / "launcher/agent/workers/bootstrap.py"

# Everything that is to happen at the end of a process. For torch, which takes seconds to import, stands what
# the bootstrap asks of it.
ENDING = """\
import atexit, gzip, multiprocessing.util, sys, threading, time, types

dist = sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
dist.is_initialized = lambda: True
dist.destroy_process_group = lambda: open("closed", "w").close()


class Dropped:
    def __del__(self):
        print("dropped by", time.__name__, flush=True)


def work():
    time.sleep(0.5)
    print("a thread has ended", flush=True)


dropped = Dropped()
dropped.itself = dropped
text = open("text", "w")
text.write("written")
packed = gzip.open("packed", "wb")
packed.write(b"packed")
sys.kept = open("kept", "w")
sys.kept.write("kept")
atexit.register(lambda: print("at exit, with a group:", dist.is_initialized(), flush=True))
finalizer = multiprocessing.util.Finalize(None, print, ("finalized",), {"flush": True}, exitpriority=1)
threading.Thread(target=work).start()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
sys.stdout = open(1, "w", closefd=False, buffering=1 << 16)
print("not flushed")
"""
HOW = {
    "the end": "",
    "a text": "sys.exit('no data')",
    "Ctrl-C": "raise KeyboardInterrupt",
    "an exception": "sys.excepthook = lambda *error: print('mine', error[1], file=sys.stderr)\n1 / 0",
}


@pytest.mark.parametrize("how", HOW)
def test_all_that_happens_at_the_end_of_a_process_happens(tmp_path: Path, how: str) -> None:
    ended: list[Result] = []
    for name, begin in (("plain", [sys.executable, "-u"]), ("ours", [sys.executable, "-u", BOOTSTRAP, "script"])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "script.py").write_text(ENDING + HOW[how])
        ended.append(run_program(*begin, "script.py", cwd=folder))
        assert (folder / "text").read_text() == "written"
        assert (folder / "kept").read_text() == "kept"
    if how == "the end":
        assert gzip.decompress((folder / "packed").read_bytes()) == b"packed"
    plain, ours = ended
    assert (folder / "closed").exists() is (plain.returncode == 0)
    assert (ours.returncode, sorted_lines(ours.stdout)) == (plain.returncode, sorted_lines(plain.stdout))
    assert re.sub("/(plain|ours)/", "/", ours.stderr) == re.sub("/(plain|ours)/", "/", plain.stderr)


def sorted_lines(text: str) -> list[str]:
    """Without what plain python drops only where no traceback refers to it."""
    return sorted(line for line in text.splitlines() if line != "dropped by time")


def test_profilers_modules_and_exit_handlers_end_as_usual(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import atexit, os\natexit.register(lambda: os.write(1, b'the first that was registered\\n'))"
    )
    (tmp_path / "train.py").write_text(ENDING)
    profiled = run_program(
        sys.executable, "-u", BOOTSTRAP, "module", "cProfile", "-o", "profile", "train.py",
        cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}/site"},
    )  # fmt: skip
    assert profiled.returncode == 0, profiled.stderr
    assert "the first that was registered" in profiled.stdout
    assert (tmp_path / "kept").read_text() == "kept"
    assert (tmp_path / "profile").stat().st_size > 1000


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ("1 / 0", "ZeroDivisionError True\n"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt True\n"),
        ("sys.exit(3)", "NoneType False\n"),
        ("", "NoneType False\n"),
    ],
)
def test_callbacks_at_exit_see_the_script_s_error(tmp_path: Path, how: str, seen: str) -> None:
    looks = (
        "def look():\n"
        "    error = getattr(sys, 'last_value', None)\n"
        "    is_whole = error is not None and getattr(sys, 'last_exc', error) is error\n"
        "    print(type(error).__name__, is_whole and sys.last_type is type(error) and bool(sys.last_traceback))\n"
        "atexit.register(look)\n"
    )
    is_open = "import types\ndist = sys.modules['torch.distributed'] = types.ModuleType('torch.distributed')\n"
    is_open += "dist.is_initialized = lambda: True\ndist.destroy_process_group = lambda: None\n"
    (tmp_path / "script.py").write_text("import atexit, sys\n" + is_open + looks + how)
    for begin in ([sys.executable], [sys.executable, BOOTSTRAP, "script"]):
        assert run_program(*begin, "script.py", cwd=tmp_path).stdout == seen


def test_a_group_closed_by_an_exit_handler_needs_no_teardown(tmp_path: Path) -> None:
    """As ddp's does. The teardown of torch's modules would take a second of CPU time."""
    freed = "class Freed:\n    def __del__(self, write=__import__('os').write):\n        write(1, b'teardown\\n')\n\n"
    closes = "sys.freed = Freed()\natexit.register(setattr, dist, 'is_initialized', lambda: False)\n"
    (tmp_path / "script.py").write_text(ENDING + freed + closes)
    begins = ([sys.executable, "-u"], [sys.executable, "-u", BOOTSTRAP, "script"])
    plain, ours = (run_program(*begin, "script.py", cwd=tmp_path) for begin in begins)
    assert sorted_lines(plain.stdout) == sorted([*sorted_lines(ours.stdout), "teardown"]), (plain, ours)
    assert (tmp_path / "kept").read_text() == "kept"


def test_ctrl_c_in_a_forked_process_does_not_end_its_parent(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys, types, _io, ctypes, gc\n"
        "dist = sys.modules['torch.distributed'] = types.ModuleType('torch.distributed')\n"
        "dist.is_initialized = lambda: True\n"
        "dist.destroy_process_group = lambda: None\n"
        "if (child := os.fork()) == 0:\n    raise KeyboardInterrupt\n"
        "print(os.waitpid(child, 0)[1])\n"
    )
    result = run_program(sys.executable, BOOTSTRAP, "script", "script.py", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "2\n"), result.stderr


# A thread of gloo wants to give tensors back and waits for the interpreter, which the script does not leave before its
# end. Plain python aborts in two of three runs of it, with torch 2.13 and Python 3.11.
ABORTS = textwrap.dedent("""\
    import sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    sys.setswitchinterval(1000)
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
    del works
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass
""")


@pytest.mark.parametrize("start_method", ["exec", "fork"])
def test_a_thread_of_gloo_does_not_abort_a_script_at_its_end(tmp_path: Path, start_method: str) -> None:
    (tmp_path / "script.py").write_text(ABORTS)
    result = run_dtrain("run", "--start-method", start_method, "script.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_a_rank_failing_in_a_collective_keeps_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys, time\nimport torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "if dist.get_rank() == 0:\n    dist.all_reduce(torch.ones(4), async_op=True)\n    sys.exit(3)\n"
        "time.sleep(600)"
    )
    result = run_dtrain("run", "--nproc-per-node", "2", "script.py", cwd=tmp_path)
    assert result.returncode == 3, result.stderr
