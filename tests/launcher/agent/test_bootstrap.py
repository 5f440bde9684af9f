"""A script under `dtrain run` finds the world that plain python would show it: both are run and compared."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from testbed import REPOSITORY
from testbed.processes import Result, run_dtrain, run_program
from testbed.write import lines_of_workers, write

BOOTSTRAP = REPOSITORY / "launcher/agent/workers/bootstrap.py"


def run_both(folder: Path, *argv: str) -> tuple[Result, Result]:
    """Run the same command line under plain python and as an agent starts a worker."""
    is_module = argv[0] == "-m"
    target = argv[is_module:]
    plain = run_program(sys.executable, *argv, cwd=folder)
    env = {"TORCHELASTIC_ERROR_FILE": str(folder / "0-0.json"), "RANK": "0"}
    kind = "module" if is_module else "script"
    return plain, run_program(sys.executable, "-u", BOOTSTRAP, kind, *target, cwd=folder, env=env)


WORLD = """\
    import __main__, inspect, json, sys
    class Here: pass
    import pickle
    world = {
        "name": __name__, "file": __file__, "doc": __doc__, "argv": sys.argv, "orig_argv": sys.orig_argv[1:],
        "path": sys.path, "spec": repr(getattr(__spec__, "name", None)), "package": __package__,
        "loader": type(__loader__).__name__, "main_is_this": __main__.__dict__ is globals(),
        "names": sorted(set(globals()) - {"__annotations__"}),
        "pickled": type(pickle.loads(pickle.dumps(Here()))) is Here,
        "module": Here.__module__, "source": inspect.getsource(Here), "executable": sys.executable,
        "hook": sys.excepthook is sys.__excepthook__, "path_hooks": len(sys.path_hooks),
        "finders": [
            getattr(f, "__name__", type(f).__name__) for f in sys.meta_path if type(f).__name__ != "_Imports"
        ],
        "modules": "launcher" in sys.modules,
    }
    print(json.dumps(world))
"""


@pytest.mark.parametrize(
    "argv",
    [
        ("probe.py", "--lr", "3e-4", "a b", "", "--help"),
        ("sub/probe.py",),
        ("-m", "package.probe", "-x"),
        ("-m", "package"),
        ("folder",),
    ],
    ids=lambda argv: " ".join(argv),
)
def test_script_sees_the_same_world(tmp_path: Path, argv: tuple[str, ...]) -> None:
    for name in ("probe.py", "sub/probe.py", "package/probe.py", "package/__main__.py", "folder/__main__.py"):
        write(tmp_path, name, WORLD)
    write(tmp_path, "package/__init__.py", "")
    plain, ours = run_both(tmp_path, *argv)
    assert plain.returncode == 0, plain.stderr
    assert ours.returncode == 0, ours.stderr
    assert json.loads(ours.stdout) == json.loads(plain.stdout)


RAISING = {
    "exception": "def f():\n    raise ValueError('bad batch')\nf()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
    "syntax error": "x = = 1",
    "own hook": "import sys\nsys.excepthook = lambda *a: print('mine', a[0].__name__, file=sys.stderr)\n1 / 0",
    "at exit": "import atexit\natexit.register(lambda: print('bye', flush=True))\nraise SystemExit(3)",
    "exit text": "import sys\nsys.exit('no data')",
    "exit none": "import sys\nsys.exit()",
    "interrupted": "raise KeyboardInterrupt",
    "thread": "import threading\nt = threading.Thread(target=lambda: print('t', flush=True))\nt.start()",
    "group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])" if sys.version_info >= (3, 11) else "1/0",
}


@pytest.mark.parametrize("program", RAISING.values(), ids=RAISING.keys())
def test_ends_and_prints_as_plain_python_does(tmp_path: Path, program: str) -> None:
    write(tmp_path, "script.py", program)
    plain, ours = run_both(tmp_path, "script.py")
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert "bootstrap" not in ours.stderr


def test_module_traceback_has_no_frame_of_ours(tmp_path: Path) -> None:
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/train.py", "import os\n1 / 0")
    plain, ours = run_both(tmp_path, "-m", "package.train")
    assert ours.stderr == plain.stderr


def test_multiprocessing_works(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        """
        import multiprocessing, sys
        def square(x): return x * x
        if __name__ == "__main__":
            for method in ("spawn", "fork", "forkserver"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(pool.map(square, [1, 2, 3]))
        """,
    )
    plain, ours = run_both(tmp_path, "script.py")
    assert plain.stdout == ours.stdout == "[1, 4, 9]\n" * 3, ours.stderr


def test_data_loader_workers_work(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        if __name__ == "__main__":
            data = TensorDataset(torch.arange(8))
            for context in ("fork", "spawn"):
                loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=context)
                print([b[0].tolist() for b in loader])
        """,
    )
    ours = run_dtrain("run", "--log-dir", tmp_path / "logs", "script.py", cwd=tmp_path)
    assert lines_of_workers(ours.stdout) == ["[[0, 1, 2, 3], [4, 5, 6, 7]]"] * 2, ours.stderr


def test_input_meets_a_closed_stdin(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "input('name? ')")
    ours = run_dtrain(
        "run", "--log-dir", tmp_path / "logs", "--stdin", "none", "script.py", cwd=tmp_path, stdin="nobody\n"
    )
    assert ours.returncode == 1
    assert "EOFError: EOF when reading a line" in ours.stderr
    assert "no one can answer rank 0: its standard input is empty" in ours.stderr


def test_script_named_like_our_modules_is_the_users(tmp_path: Path) -> None:
    """A folder `launcher` in the working directory is imported by the script, never by dtrain."""
    write(tmp_path, "launcher/__init__.py", "print('the users launcher')")
    write(tmp_path, "agent.py", "import launcher, worker")
    write(tmp_path, "worker.py", "print('the users worker')")
    ours = run_program(Path(sys.executable).with_name("dtrain"), "run", "--log-dir", "logs", "agent.py", cwd=tmp_path)
    assert lines_of_workers(ours.stdout) == ["the users launcher", "the users worker"], ours.stderr


def test_no_python_runs_any_program(tmp_path: Path) -> None:
    ours = run_dtrain(
        "run", "--log-dir", "logs", "--nproc-per-node", "2", "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE",
        cwd=tmp_path,
    )  # fmt: skip
    assert sorted(lines_of_workers(ours.stdout)) == ["0 of 2", "1 of 2"]


def test_segfault_shows_where_and_exits_139(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import ctypes\ndef crash():\n    ctypes.string_at(0)\ncrash()")
    ours = run_dtrain("run", "--log-dir", "logs", "script.py", cwd=tmp_path)
    assert ours.returncode == 128 + signal.SIGSEGV
    assert "was killed by SIGSEGV" in ours.stderr
    assert "line 3 in crash" in ours.stderr
    report = [line for line in ours.stderr.splitlines() if line.startswith("dtrain:")]
    assert any("line 3 in crash" in line for line in report)
    assert not any("bootstrap.py" in line for line in report), "no frames of dtrain's"
    assert "bootstrap.py" in Path(tmp_path, report[-1].rpartition("less ")[2]).read_text(), "the file has all"


def test_error_file_is_torch_elastics(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import os\nprint(os.environ['TORCHELASTIC_ERROR_FILE'])\nraise ValueError('é')")
    ours = run_dtrain("run", "--log-dir", "logs", "--run-id", "r", "script.py", cwd=tmp_path)
    error = json.loads((tmp_path / "logs/r/attempt_0/0/error.json").read_text())
    assert error["message"]["message"] == "ValueError: é"
    assert "line 3, in <module>" in error["message"]["extraInfo"]["py_callstack"]
    assert error["message"]["extraInfo"]["timestamp"].isdigit()
    assert not Path(lines_of_workers(ours.stdout)[0]).exists()


WHERE = {
    "in the library": ("import json\ndef f(): json.loads('{')\nf()", "script.py:2 in f", "raw_decode"),
    "in an own function": ("def f():\n    1 / 0\nf()", "script.py:2 in f", "f"),
    "in an installed package": ("import installed\ndef f(): installed.fail()\nf()", "script.py:2 in f", "fail"),
    "in our ddp": ("import ddp\ndef f(): ddp.init()\nf()", "script.py:2 in f", "init"),  # whatever checks it there
    "in our ddp, below torch": (
        "import functools, torch, ddp\nfrom ddp.data_parallel.backward_pass import EndOfBackward\n"
        "at_the_end = EndOfBackward(functools.partial(ddp.init, 'no backend'), lambda: None)\n"
        "y = torch.ones(1, requires_grad=True) * 2\n"
        "y.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(at_the_end))\n"
        "def f(): y.backward()\nf()",
        "script.py:6 in f",
        "backward",
    ),
    "in a function that our ddp calls": (
        "import os, torch, ddp; del os.environ['RANK']\n"
        "class Watch(ddp.callbacks.Callback):\n"
        "  def on_fit_begin(self): {}['x']\n"
        "net = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters())\n"
        "data = torch.utils.data.TensorDataset(torch.ones(2, 1), torch.ones(2, 1))\n"
        "ddp.Trainer(net, optimizer, torch.nn.MSELoss(), callbacks=[Watch()]).fit(data, epochs=1)",
        "script.py:3 in on_fit_begin",
        "on_fit_begin",
    ),
    "in a worker of a DataLoader": (
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "class Data(torch.utils.data.Dataset):\n"
        "  def __len__(self): return 1\n"
        "  def __getitem__(self, i):\n"
        "    try: {}[i]\n"
        "    except KeyError as e: raise ValueError('no\\nsample') from e\n"
        "next(iter(DataLoader(Data(), num_workers=1)))",
        "script.py:7 in __getitem__",
        "__getitem__",
    ),
    "at the exit": ("import sys\ndef f(): sys.exit('no data')\nf()", "script.py:2 in f", "f"),
    "in no function": ("x = = 1", "script.py:1", ""),
}


@pytest.mark.parametrize(("program", "where", "inside"), WHERE.values(), ids=WHERE.keys())
def test_facts_name_the_user_s_line_and_the_raising_function(
    tmp_path: Path, program: str, where: str, inside: str
) -> None:
    write(tmp_path, "script.py", program)
    write(tmp_path, "python/site-packages/installed.py", "def fail(): raise ValueError('x')")
    env = {
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "0-1.json"),
        "PYTHONPATH": str(tmp_path / "python/site-packages"),
        "RANK": "no number",
    }
    assert run_program(sys.executable, "-u", BOOTSTRAP, "script", "script.py", cwd=tmp_path, env=env).returncode == 1
    facts = json.loads((tmp_path / "0-1.json.facts").read_text())
    assert facts["where"] == f"{tmp_path}/{where}"
    assert facts["inside"] == inside


def test_worker_without_an_agent_writes_no_stacks(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "print([line for line in open('/proc/self/status') if line.startswith('SigCgt')])")
    env = {"TORCHELASTIC_ERROR_FILE": None}
    ours = run_program(sys.executable, BOOTSTRAP, "script", "script.py", cwd=tmp_path, env=env)
    assert not int(ours.stdout.partition("\\t")[2].partition("\\n")[0], 16) >> (51 - 1) & 1
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_worker_runs_where_no_stack_file_can_be_made(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "print('done')")
    env = {"TORCHELASTIC_ERROR_FILE": "/nowhere/0-1.json"}
    ours = run_program(sys.executable, BOOTSTRAP, "script", "script.py", cwd=tmp_path, env=env)
    assert (ours.returncode, ours.stdout) == (0, "done\n")
    assert ours.stderr.startswith("dtrain: stacks of this worker cannot be requested: ")


def test_record_of_torch_elastic_works(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        """
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise RuntimeError("from record")
        main()
        """,
    )
    ours = run_dtrain("run", "--log-dir", "logs", "--run-id", "r", "script.py", cwd=tmp_path)
    assert ours.returncode == 1
    error = json.loads((tmp_path / "logs/r/attempt_0/0/error.json").read_text())
    assert "from record" in error["message"]["message"]
    assert "RuntimeError: from record" in ours.stderr


def test_the_user_s_import_hook_sees_torch_on_every_rank(tmp_path: Path) -> None:
    hook = """\
        import os, sys

        class Hook:
            def find_spec(self, name, path=None, target=None):
                if name == "torch" and "RANK" in os.environ:
                    print(f"rank {os.environ['RANK']} imports torch", flush=True)

        sys.meta_path.insert(0, Hook())
    """
    write(tmp_path, "hooks/sitecustomize.py", hook)
    write(tmp_path, "torch.py", "")
    write(tmp_path, "train.py", "import torch")
    result = run_dtrain(
        "run", "--nproc-per-node", "2", "train.py", cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}/hooks"}
    )
    assert result.returncode == 0, result.stderr
    assert sorted(lines_of_workers(result.stdout)) == ["rank 0 imports torch", "rank 1 imports torch"]


def test_worker_reads_as_its_script_in_ps(tmp_path: Path) -> None:
    write(tmp_path, "script.py", "import os\nprint(open('/proc/self/cmdline').read().split(chr(0)))")
    ours = run_dtrain("run", "--log-dir", "logs", "script.py", "--lr", "3", cwd=tmp_path)
    assert "'script.py', '--lr', '3'" in ours.stdout


def test_bootstrap_compiles_on_the_oldest_python() -> None:
    import ast

    source = BOOTSTRAP.read_text()
    ast.parse(source, feature_version=(3, 10))
    assert (
        subprocess.run([sys.executable, "-c", "import launcher.agent.workers.bootstrap"], check=False).returncode == 0
    )


def test_exception_that_cannot_be_shown_is_still_the_cause(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        """
        class Odd(Exception):
            def __str__(self): raise TypeError("no text")
        raise Odd
        """,
    )
    ours = run_dtrain("run", "script.py", cwd=tmp_path)
    assert ours.returncode == 1
    assert "dtrain:   Odd: <its text cannot be read: TypeError>" in ours.stderr
    assert "bootstrap" not in ours.stderr


def test_huge_message_and_deep_recursion_are_reported_in_short(tmp_path: Path) -> None:
    write(
        tmp_path,
        "script.py",
        "def f(): f()\ntry: f()\nexcept RecursionError as e: raise ValueError('x' * 3_000_000) from e",
    )
    ours = run_dtrain("run", "--run-id", "r", "script.py", cwd=tmp_path)
    assert "dtrain:   ValueError: xxx" in ours.stderr
    assert (tmp_path / "runs/r/attempt_0/0/error.json").stat().st_size < 300_000
