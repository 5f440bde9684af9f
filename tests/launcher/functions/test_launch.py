"""launcher.launch(): a function of a Python program in all workers, and what it returned, or how it failed."""

import contextlib
import io
import json
import os
import pickle
import resource
import signal
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from testbed.left import nothing_left
from testbed.processes import run_dtrain, run_program, started, wait_until
from testbed.sshd import SshHosts
from testbed.typed import dtrain

import launcher
from launcher.agent.workers import call_function
from launcher.errors import HostError, LaunchError, UsageError, WorkerError
from launcher.functions import packing


def launch(*args: Any, **options: Any) -> list[Any]:
    with nothing_left("launch()"):
        found: list[Any] = launcher.launch(*args, **options)
        return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


class _NotedError(Exception):
    def __init__(self, text: str, note: int) -> None:
        super().__init__(text)
        self.note = note

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.note)


class _OnlyThere:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import os; assert 'RANK' in os.environ, 'only there'",)


def _rank() -> int:
    return int(os.environ["RANK"])


def _failure(function: Callable[..., Any], *args: Any, **options: Any) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        launch(function, *args, nproc_per_node=2, **options)
    return caught.value


PROGRAM = """
import os, sys
import launcher

class Found:
    def __init__(self, value):
        self.value = value

factor = 10

def train(offset, *, more):
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv)
    print("to stderr", file=sys.stderr)
    return Found(offset + more + factor * int(os.environ["RANK"]))

if __name__ == "__main__":
    import functools
    print("before")
    found = launcher.launch(functools.partial(train, more=1), 100, nproc_per_node=2, run_id="one")
    print([each.value for each in found], all(isinstance(each, Found) for each in found))
    print(launcher.launch(lambda: factor, nproc_per_node="1", quiet=True))
    launcher.launch(sys.exit, 3)
"""


def test_a_program_gets_what_each_rank_returns_and_prints(folder: Path) -> None:
    (folder / "program.py").write_text(PROGRAM)
    result = run_program(sys.executable, "program.py")
    host = os.uname().nodename
    shown = result.stdout.splitlines()
    assert shown[0] == "before"
    assert sorted(shown[1:3]) == [f"[{host}:{rank}] rank {rank} of 2 ['train']" for rank in (0, 1)]
    assert shown[3:] == ["[101, 111] True", "[10]"]
    assert f"[{host}:1] to stderr" in result.stderr.splitlines()
    assert "dtrain: all 2 workers finished successfully" in result.stderr
    assert result.returncode == 1
    assert f"launcher.errors.WorkerError: rank 0 on {host}" in result.stderr
    assert "exited with code 3" in result.stderr
    manifest = json.loads(Path("runs/one/run.json").read_text())
    assert manifest["state"] == "finished"
    assert manifest["command"]["words"] == ["--nproc-per-node", "2", "--run-id", "one", "--", "train"]
    assert "rank 1 of 2" in Path("runs/one/attempt_0/1/stdout.log").read_text()
    listed = json.loads(dtrain("ps", "--all", "--json").stdout)
    assert [(run["command"], run["state"], run["exit_code"]) for run in listed] == [
        ("exit", "failed", 3), ("<lambda>", "finished", 0), ("train", "finished", 0),
    ]  # fmt: skip
    again = run_dtrain("rerun", "one")
    assert (again.returncode, "call it there" in again.stderr) == (1, True), again


def test_a_worker_s_error_has_host_rank_and_traceback() -> None:
    def fails(number: int) -> None:
        if _rank() == 1:
            raise _NotedError("no way", number)

    error = _failure(fails, 7)
    assert (error.rank, error.host, error.exit_code) == (1, os.uname().nodename, 1)
    assert (error.type, error.message) == ("_NotedError", "no way")
    assert isinstance(error.__cause__, _NotedError)
    assert error.__cause__.note == 7
    last = error.traceback.splitlines()
    assert last[0] == "Traceback (most recent call last):"
    assert last[1].endswith("in fails"), "no frame of dtrain's own"
    assert "raise _NotedError" in error.traceback
    assert "raised an exception" in str(error)
    assert "its whole output: runs/" in str(error)


def test_an_exception_that_cannot_be_pickled_is_reported() -> None:
    def fails() -> None:
        error = ValueError("no way")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    error = _failure(fails)
    assert (error.type, error.message, error.__cause__) == ("ValueError", "no way", None)
    assert "raise error" in error.traceback


def test_a_killed_worker_is_named() -> None:
    def killed() -> None:
        if _rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)

    error = _failure(killed, grace_s=1)
    assert (error.rank, error.exit_code, error.type, error.traceback) == (1, 137, "", "")
    assert "was killed by SIGKILL" in error.message


def test_a_result_that_cannot_travel_names_the_rank() -> None:
    error = _failure(threading.Lock)
    assert error.type == "ResultError"
    assert error.message.startswith(f"the result of rank {error.rank}, of type lock, cannot be pickled: TypeError")

    with pytest.raises(WorkerError, match="the result of rank 0 cannot be read here: AssertionError: only there"):
        launch(_OnlyThere)


def test_a_result_that_is_too_large_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_function, "MAX_RESULT_BYTES", 3 << 20)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    for number, fits in ((3 << 20, False), (2 << 20, True)):
        (folder / "function").write_bytes(pickle.dumps({}) + pickle.dumps((bytes, (number,))))
        with contextlib.nullcontext() if fits else pytest.raises(call_function.ResultError, match="rank 3 is larger"):
            call_function.call_function("bytes", "function", "returned")
        assert {path.name for path in folder.iterdir()} == {"function", *(["returned"] if fits else [])}
    assert pickle.loads(Path("returned").read_bytes()) == (True, bytes(2 << 20), 3, 4)


def test_wrong_arguments_are_errors_before_a_host_is_reached(folder: Path) -> None:
    far = {"hosts": "no-such-host.invalid:1"}
    with pytest.raises(UsageError, match=r"and its arguments cannot be pickled: TypeError: cannot pickle"):
        launch(print, threading.Lock(), **far)
    with pytest.raises(UsageError, match=r"take 257 MB, at most 256 MB are sent; save the data to a file"):
        launch(print, bytes(257 << 20), **far)
    with pytest.raises(UsageError, match="launch\\(\\) needs a function, not int"):
        launch(3, **far)
    with pytest.raises(UsageError, match="launch\\(\\) has no option 'nprocs_per_node'; did you mean 'nproc_per_node'"):
        launch(print, nprocs_per_node=2, **far)
    with pytest.raises(UsageError, match="launch\\(\\) does not accept detach: "):
        launch(print, detach=True, **far)
    for wrong in (["--nproc-per-node", "none"], ["--grace-s", "soon"], ["--nnodes", "0"], ["--keep-runs", "0"]):
        typed = run_dtrain("run", "--hosts", "no-such-host.invalid", *wrong, "x.py")
        with pytest.raises(UsageError) as caught:
            launch(print, hosts=["no-such-host.invalid"], **{wrong[0][2:].replace("-", "_"): wrong[1]})
        assert str(caught.value) in typed.stderr, "the same words"
    assert not (folder / "runs").exists()
    with pytest.raises(HostError, match=r"no-such-host\.invalid"):
        launch(print, **far)


def test_options_come_from_environment_and_config_file_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "dtrain.toml").write_text("simulate = true\nnnodes = 3\n")
    monkeypatch.setenv("DTRAIN_NPROC_PER_NODE", "2")
    assert launch(_rank, nnodes=2) == [0, 1, 2, 3]
    assert launch(_rank, simulate=False, nnodes=1) == [0, 1], "the program is stronger than the file"
    assert launch(os.getenv, "SENT", nnodes=(1, 2), nproc_per_node=1, export={"SENT": "x"}) == ["x", "x"]
    monkeypatch.setenv("DTRAIN_NODE_RANK", "0")
    with pytest.raises(UsageError, match=r"launch\(\) does not accept node_rank \(DTRAIN_NODE_RANK\)"):
        launch(_rank)


def test_a_restart_calls_the_function_again() -> None:
    def fails_at_first() -> str:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and _rank() == 1:
            raise ValueError("at first")
        return os.environ["TORCHELASTIC_RESTART_COUNT"]

    assert launch(fails_at_first, nproc_per_node=2, max_restarts=1) == ["1", "1"]


def test_a_process_without_a_result_returns_none_or_fails() -> None:
    def leaves() -> None:
        sys.exit() if _rank() else os._exit(0)

    assert launch(leaves, nproc_per_node=2) == [None, None]


def test_output_goes_to_what_sys_stdout_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Notebook(io.StringIO):
        def fileno(self) -> int:  # of the terminal where the notebook was started
            return 1

    notebook, red = Notebook(), io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", notebook)
        patch.setattr(sys, "stderr", red)
        launch(print, "à la carte", nproc_per_node=1)
    assert notebook.getvalue() == f"[{os.uname().nodename}:0] à la carte\n"
    # Before it may stand what killed runs of other tests had left.
    assert red.getvalue().splitlines()[-1].startswith("dtrain: the worker finished successfully")


def test_what_on_end_leaves_in_the_background_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = io.StringIO()
    command = "(while [ ! -e go ]; do sleep 0.1; done; echo later) & echo é at once"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", notebook)
        launcher.launch(_rank, nproc_per_node=1, on_end=command)
    assert notebook.getvalue() == "é at once\n"
    Path("go").touch()
    wait_until(lambda: notebook.getvalue() == "é at once\nlater\n", "what it writes is shown all the same")


def test_another_thread_may_launch() -> None:
    found: list[list[int]] = []
    before = signal.getsignal(signal.SIGINT)
    limits = sys.getswitchinterval(), resource.getrlimit(resource.RLIMIT_NOFILE)

    def run() -> None:
        found.append(launcher.launch(_rank, nproc_per_node=2))

    threads = [threading.Thread(target=run) for _ in range(2)]
    with nothing_left("launch() twice"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [[0, 1], [0, 1]]
    assert signal.getsignal(signal.SIGINT) is before
    assert (sys.getswitchinterval(), resource.getrlimit(resource.RLIMIT_NOFILE)) == limits


def test_the_limit_of_files_is_restored_after_the_last_run() -> None:
    program = """
import os, resource, threading, time
import launcher
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
def waits():
    open("up", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.05)
def ratio():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 2 // hard
thread = threading.Thread(target=launcher.launch, args=(waits,), kwargs={"nproc_per_node": 1})
thread.start()
while not os.path.exists("up"):
    time.sleep(0.05)
launcher.launch(int, nproc_per_node=1)
among = ratio()
open("go", "w").close()
thread.join()
print(among, ratio())
"""
    Path("program.py").write_text(program)
    result = run_program(sys.executable, "program.py")
    assert result.stdout == "2 1\n", result


def test_a_worker_may_not_launch() -> None:
    error = _failure(partial(launcher.launch, print))
    assert error.type == "UsageError"
    assert f"launch() was called in rank {error.rank} of a run" in error.message


INTERRUPTED = """
import pathlib, signal, time
import launcher

def waits(name):
    pathlib.Path(name).touch()
    time.sleep(300)

if __name__ == "__main__":
    try:
        launcher.launch(waits, "first", nproc_per_node=2, run_id="first")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    try:
        launcher.launch(waits, "second", run_id="second")
    except launcher.errors.LaunchError as error:
        print(error.exit_code, str(error).partition(" after")[0], flush=True)
    launcher.launch(waits, "third")
    print("never")
"""


def test_a_signal_ends_the_run_and_takes_effect_after_it(folder: Path) -> None:
    (folder / "program.py").write_text(INTERRUPTED)
    with started(sys.executable, "program.py") as program:
        wait_until(Path("first").exists, "the first runs")
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == b"interrupted\n"
        assert json.loads(Path("runs/first/run.json").read_text())["state"] == "stopped"
        wait_until(Path("second").exists, "the second runs")
        assert run_dtrain("stop", "second").returncode == 0
        assert program.stdout.readline() == b"143 stopped by SIGTERM\n", "which was not for the program"
        wait_until(Path("third").exists, "the third runs")
        program.send_signal(signal.SIGTERM)
        assert program.wait() == -signal.SIGTERM
        assert program.stdout.read() == b""


def test_functions_on_ssh_hosts_return_large_results(ssh_hosts: SshHosts) -> None:
    def large(data: bytes) -> tuple[str, bytes]:
        return os.environ["DTRAIN_TEST_HOST"], data * (_rank() + 2)

    data = os.urandom(3 << 20)
    found = launch(large, data, hosts=["node1", "node2"], nproc_per_node=1, ssh_config=ssh_hosts.ssh_config)
    assert found == [("node1", data * 2), ("node2", data * 3)]

    def fails() -> None:
        if _rank() == 1:
            raise ValueError("there")
        time.sleep(300)

    with pytest.raises(WorkerError) as caught:
        launch(fails, hosts="node1:1,node2:1", ssh_config=ssh_hosts.ssh_config, grace_s=1)
    assert (caught.value.host, caught.value.rank, caught.value.type) == ("node2", 1, "ValueError")


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ("launcher.agent.agent.sys.version_info = (3, 9, 1)", "is Python 3.9.1, here it is {}; name a Python {}"),
        (
            "launcher.agent.host_facts.importlib.machinery.PathFinder.find_spec = lambda _: None",
            "-m pip install cloudp",
        ),
    ],
)
def test_a_host_that_cannot_run_functions_says_why(change: str, reported: str, folder: Path) -> None:
    python = folder / "python"
    code = f"import launcher.agent.main, launcher.agent.host_facts\n{change}\nlauncher.agent.main.main()"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    python.chmod(0o755)
    here = "{}.{}.{}".format(*sys.version_info[:3])
    with pytest.raises(HostError) as caught:
        launch(_rank, python=python, nproc_per_node=1)
    assert reported.format(here, here.rpartition(".")[0]) in str(caught.value)


def test_a_module_that_a_worker_has_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ghost = types.ModuleType("ghost")
    monkeypatch.setitem(sys.modules, "ghost", ghost)

    def uses() -> types.ModuleType:
        return ghost

    error = _failure(uses)
    assert error.type == "FunctionError"
    assert f"uses cannot be loaded on {error.host}: ModuleNotFoundError: No module named 'ghost'" in error.message


def test_modules_of_the_program_s_own_folders_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "own").mkdir()
    (folder / "own/found_there.py").write_text("def where(): return __file__\n")
    monkeypatch.syspath_prepend(folder / "own")
    import found_there  # type: ignore[import-not-found]  # written just now

    assert launch(found_there.where) == [str(folder / "own/found_there.py")]


def test_code_below_python_s_prefix_is_the_user_s_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(folder))
    before = packing._own_path()
    assert not any("site-packages" in path or path == sysconfig.get_path("stdlib") for path in before)
    monkeypatch.syspath_prepend(folder / "src/app")
    assert packing._own_path() == (str(folder / "src/app"), *before)


def test_editable_installations_are_imported_not_sent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "far").mkdir()
    for name in ("__init__", "inner"):
        (folder / f"far/{name}.py").write_text("")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if name != "edited":
                return None
            return spec_from_file_location(
                name, folder / "far/__init__.py", submodule_search_locations=[str(folder / "far")]
            )

    assert not packing._can_be_imported("edited.inner")
    monkeypatch.setattr(Finder, "__module__", "__editable___edited_finder")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert packing._can_be_imported("edited.inner")
    assert not packing._can_be_imported("edited.outer")
    monkeypatch.setattr(Finder, "__module__", "_pytest.assertion")
    assert not packing._can_be_imported("edited.inner")


def test_a_resilient_function_goes_on_without_a_restart(folder: Path) -> None:
    program = """
import os, signal, torch, ddp, launcher

@ddp.resilient
def train(state):
    while state.step < 6:
        if state.step == 3 and ddp.init().rank == 1 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        state.model(torch.ones(1, 1)).sum().backward()
        state.optimizer.step()
        state.step += 1
        state.commit()
    return state.step

def start():
    ddp.init()
    model = ddp.DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(ddp.State(model=model, optimizer=optimizer, step=0))
    return os.getpid(), float(model.module.weight)

found = launcher.launch(start, nproc_per_node=2, max_restarts=2)
print(len({pid for pid, _ in found}), len({weight for _, weight in found}))
"""
    (folder / "program.py").write_text(program)
    result = run_program(sys.executable, "program.py")
    assert (result.returncode, result.stdout) == (0, "2 1\n"), result
    assert "1 restart" in result.stderr
    assert (folder / "killed").exists()


def test_what_a_function_uses_is_imported_before_it_is_forked() -> None:
    program = """
import launcher
def total():
    import torch
    return float(torch.ones(3).sum())
print(launcher.launch(total, nproc_per_node=2, verbose=True))
"""
    Path("program.py").write_text(program)
    result = run_program(sys.executable, "program.py")
    assert (result.returncode, result.stdout) == (0, "[3.0, 3.0]\n"), result
    assert "2 workers were forked from processes that had imported their packages" in result.stderr


def test_the_loss_of_a_host_is_no_failure_of_a_worker() -> None:
    def loses_host() -> None:
        if _rank() == 1:
            os.kill(os.getppid(), signal.SIGKILL)  # its agent
        time.sleep(300)

    with pytest.raises(LaunchError, match="host sim1 was lost") as caught:
        launch(loses_host, nnodes=2, simulate=True, nproc_per_node=1, grace_s=1)
    assert not isinstance(caught.value, WorkerError)
