"""Imports that a script makes late: workers that follow the first are forked from a process that has made them too."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import selectors
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.fork_server import prepare_for
from testbed.processes import run_dtrain, wait_until

from launcher.agent.cleanup.run_tag import RunTag
from launcher.agent.workers import warm_start
from launcher.agent.workers.warm_start import ForkServer, Warmth
from launcher.agent.workers.worker import BOOTSTRAP, Files, spawn
from launcher.machine.processes import find
from launcher.protocol.commands import StartWorker

PR_SET_CHILD_SUBREAPER = 36
# One step, as every training makes it, and then the facts.
STEP = """
import torch
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.ones(1)
torch.optim.SGD([parameter], lr=0.1).step()
"""
SHOW = "\nimport os, sys\nfor name in ('late', 'other', 'bad'):\n" + (
    "    if name in sys.modules:\n        print(name, 'ahead' if sys.modules[name].pid != os.getpid() else 'here')\n"
)
ENDS = "\nimport os\nos._exit(0)\n"  # without the teardown of torch's modules, a second of CPU time
MODULE = "import os, sys\npid = os.getpid()\nhere = 'fork_server' not in sys.argv[0]\n"


class Host:
    """The fork server of an agent, and workers started from it one by one as an agent does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._selector = selectors.DefaultSelector()
        self.server = ForkServer(RunTag.new(), self._selector, Warmth())
        self._pids: set[int] = set()
        self._ranks = iter(range(100))
        self.by_exec: list[str] = []  # of each worker why it was not forked

    def prepare(self, script: str, *, through: str = "script") -> None:
        (self.folder / "script.py").write_text(textwrap.dedent(script) + ENDS)
        target = "script.py" if through == "script" else "script"
        self._through, self._target = through, target
        self.server.prepare(prepare_for(self.folder, target, through=through), 1)
        self.load()

    def load(self) -> None:
        """Wait until all imports are done, or given up."""
        deadline = time.monotonic() + 200
        while math.isfinite(self.server.pause_s(0.0)) or self.server.is_loading:
            assert time.monotonic() < deadline
            self._pids |= {server.pid for server in self.server.processes if server.pid is not None}
            for chosen, _ in self._selector.select(0.1):
                chosen.data()
            self.server.step(time.monotonic())

    def work(self, **variables: str) -> str:
        """Start a worker and return what it printed, once it has ended well."""
        rank = next(self._ranks)
        self.files = Files(str(self.folder), 0, rank)
        self.files.progress.write_bytes(bytes(72))
        env = {**self.server._env, **self.files.variables, "RANK": str(rank), **variables}
        order = StartWorker(rank, 0, self._through, [self._target], env, {})
        self.by_exec.append(self.server.why_not_for(order, env, ()))
        start = spawn if self.by_exec[-1] else self.server.fork
        read, write = os.pipe()
        argv = [sys.executable, "-u", str(BOOTSTRAP), self._through, self._target]
        pid = start(argv, env, cwd=str(self.folder), stdout=write, stderr=write)
        os.close(write)
        with os.fdopen(read) as stream:
            said = stream.read()
        assert os.waitpid(pid, 0)[1] == 0, said
        return said

    def learn(self) -> bool:
        """Take in what the newest worker has recorded, and return whether it has recorded anything."""
        if not self.files.imports.exists():
            return False
        self.server.learn([str(self.files.imports)])
        self.load()
        return True

    def close(self) -> None:
        self._pids.update(self.server.kill())
        for pid in self._pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


@pytest.fixture
def installed(installed: Path) -> Path:
    (installed / "late.py").write_text(MODULE)
    (installed / "other.py").write_text(MODULE)
    return installed


@pytest.fixture
def host(installed: Path, tmp_path: Path) -> Iterator[Host]:
    """A fork server whose agent is this process: what it forks becomes a child of this one."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    host = Host(tmp_path)
    try:
        yield host
    finally:
        host.close()
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


PLACES = {
    "function": "import torch\ndef train():\n    import late\ntrain()" + STEP,
    "after a call": "import torch\ntorch.manual_seed(1)\nimport late" + STEP,
    "main": "def main():\n    import torch\n    import late\nif __name__ == '__main__':\n    main()\n" + STEP,
    "first statement": "print('begun')\nimport torch\nimport late" + STEP,
    "own module": "import torch\ntorch.manual_seed(1)\nimport mine" + STEP,
    "installed function": "import torch, other\nother.use()" + STEP,
}


@pytest.mark.parametrize("place", PLACES)
def test_late_imports_are_there_for_a_worker_that_follows(installed: Path, host: Host, place: str) -> None:
    (host.folder / "mine.py").write_text("import late")
    (installed / "other.py").write_text(MODULE + "def use():\n    import late\n")
    host.prepare(PLACES[place] + SHOW)
    assert "late here" in host.work()
    assert host.learn()
    assert "late ahead" in host.work()
    assert host.by_exec[-1] == ""


def test_so_they_are_of_a_module_that_is_run(host: Host) -> None:
    host.prepare(PLACES["after a call"] + SHOW, through="module")
    assert "late here" in host.work()
    assert host.learn()
    assert "late ahead" in host.work()


def test_after_late_imports_workers_have_the_same_files_open(host: Host) -> None:
    source = """
        import contextlib
        names = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                names.append(os.readlink(f"/proc/self/fd/{number}").partition(":")[0].rpartition("/")[2])
        print("open", sorted(names))
    """
    host.prepare(PLACES["after a call"] + SHOW + textwrap.dedent(source))
    first = host.work()
    assert host.learn()
    second = host.work()
    assert "late ahead" in second
    files = [re.sub(r"[0-9]+-[0-9]+", "", re.findall("open .*", said)[0]) for said in (first, second)]
    assert files[0] == files[1]


HINDERED = {
    "no folder": "os.mkdir('gone')\nos.chdir('gone')\nos.rmdir('../gone')",
    "stand-in": "sys.modules['multiprocessing.context'] = object()",
    "no file": "os.mkdir(os.environ['TORCHELASTIC_ERROR_FILE'] + '.imports.new')",
}


@pytest.mark.parametrize("how", HINDERED)
def test_a_worker_whose_imports_cannot_be_recorded_goes_on(host: Host, how: str) -> None:
    host.prepare(f"import torch, os, sys\nprint('begun')\n{HINDERED[how]}\nimport late{STEP}{SHOW}")
    said = host.work()
    assert "late here" in said
    assert ("could not be recorded" in said) == (how == "no file")
    assert not host.learn()


def test_without_late_imports_there_is_no_second_process(host: Host) -> None:
    host.prepare("import torch, late" + STEP + SHOW)
    assert "late ahead" in host.work()
    said = host.files.imports.read_text() if host.files.imports.exists() else "{}"
    assert "late" not in [name for name, *_ in json.loads(said).get("imports", [])]


# What the import does, and what the script does before it.
UNSAFE = {
    "reads its rank": ("rank = os.environ['RANK']", ""),
    "goes through all variables": ("kept = dict(os.environ)", ""),
    "starts a thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "",
    ),
    "opens a file": ("kept = open(__file__)", ""),
    "prints": ("print('imported')", ""),
    "fails": ("assert here", ""),
    "exits": ("here or sys.exit(3)", ""),
    "dies": ("here or os.kill(os.getpid(), 9)", ""),
    "draws after a seed": ("import random\nrandom.random()", "import random\nrandom.seed(1)"),
    "draws after a seed of torch": ("import torch\ntorch.rand(1)", "torch.manual_seed(1)"),
    "reads what the script made up": ("seen = os.environ.get('SETTING')", "os.environ['SETTING'] = str(os.getpid())"),
    "reads what was set by rank": (
        "seen = os.environ['SETTING']",
        "os.environ['SETTING'] = '12'[int('RANK' in os.environ)]",
    ),
    "finds another folder": ("", "os.mkdir('there')\nos.chdir('there')"),
    "finds other filters": ("", "import warnings\nwarnings.simplefilter('ignore')"),
    "finds an import hook": ("", "class Hook:\n    find_spec = lambda *_: None\nsys.meta_path.insert(0, Hook())"),
    "sets what the script has set": ("os.environ['SETTING'] = '2'", "os.environ['SETTING'] = '1'"),
    "finds a log": ("", "import logging\nlogging.basicConfig()"),
    "finds a start method": ("", "import multiprocessing\nmultiprocessing.set_start_method('spawn')"),
    "finds another dtype": ("", "torch.set_default_dtype(torch.float64)"),
    "takes in what the script has replaced": ("from torch import load", "def mine(): pass\ntorch.load = mine"),
    "does without a module": ("try:\n    import nope\nexcept ImportError:\n    pass", "sys.modules['nope'] = None"),
    "is the user's own": ("import mine", ""),
}


@pytest.mark.parametrize("what", UNSAFE)
def test_what_is_unsafe_to_import_ahead_workers_import(installed: Path, host: Host, what: str) -> None:
    source, before = UNSAFE[what]
    (installed / "bad.py").write_text(MODULE + source)
    (installed / "nope.py").write_text("")
    (host.folder / "mine.py").write_text("")
    last = "import torch\nprint('begun')\nimport late\nimport os, sys\n"
    host.prepare(f"{last}{before}\nimport bad{STEP}{SHOW}")
    first = host.work()
    assert "late here" in first
    assert "bad here" in first
    assert host.learn()
    if (there := host.folder / "there").exists():
        there.rmdir()
    follows = host.work()
    assert "bad here" in follows
    assert "late ahead" in follows or what == "dies"
    assert host.by_exec[-1] == ""


def test_imports_ahead_that_hang_are_given_up(installed: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "_LATE_S", 2.0)
    (installed / "late.py").write_text(MODULE + "import time\nhere or time.sleep(1000)")
    host.prepare(PLACES["after a call"] + SHOW)
    assert "late here" in host.work()
    assert host.learn()
    assert "late here" in host.work()
    assert host.by_exec == ["", ""]


def test_own_modules_are_read_again_with_imports_made_ahead(host: Host) -> None:
    (host.folder / "mine.py").write_text("import late\nprint('before')")
    host.prepare(PLACES["own module"] + SHOW)
    assert "before" in host.work()
    assert host.learn()
    (host.folder / "mine.py").write_text("import late\nprint('after')")
    said = host.work()
    assert "after" in said
    assert "late ahead" in said


def test_an_installed_module_comes_from_the_worker_s_folder(installed: Path, host: Host) -> None:
    vendored = host.folder / "vendored"
    vendored.mkdir()
    (vendored / "bad.py").write_text(MODULE + "print('vendored')")
    (installed / "bad.py").write_text(MODULE)
    host.prepare("import torch, sys\nsys.path.insert(0, 'vendored')\nimport bad\nimport late" + STEP + SHOW)
    host.work()
    assert host.learn()
    said = host.work()
    assert "vendored" in said
    assert "bad here" in said
    assert "late ahead" in said


SETS = {
    "constant": "import os\nos.environ['SETTING'] = '7'\nimport other, torch\nimport late" + STEP,
    "default": "import os\nos.environ.setdefault('SETTING', '7')\nimport other, torch\nimport late" + STEP,
    "late": "print('begun')\nimport os\nos.environ['SETTING'] = '7'\nimport torch, other\nimport late" + STEP,
}


@pytest.mark.parametrize("how", SETS)
def test_imports_find_variables_that_the_script_sets(installed: Path, host: Host, how: str) -> None:
    """The library reads its variable as C does, when it is loaded; another import has set one itself."""
    source = """
        import ctypes
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_char_p
        seen = libc.getenv(b'SETTING')
        os.environ.setdefault('MADE', '1')
    """
    (installed / "other.py").write_text(MODULE + textwrap.dedent(source))
    (installed / "late.py").write_text(MODULE + "seen = os.environ['MADE']")
    begin = "import os as _os\nprint('begins with', 'SETTING' in _os.environ)\n" if how == "late" else ""
    host.prepare(begin + SETS[how] + "print('seen', other.seen, late.seen, os.environ['SETTING'])\n" + SHOW)
    for _ in range(2):
        said = host.work()
        assert "seen b'7' 1 7" in said
        assert "begins with True" not in said
        assert (host.by_exec[-1] == "") == (how != "late" or len(host.by_exec) > 1)
        host.learn()
    assert "other ahead" in said


@pytest.mark.parametrize(
    "first", ["import time\nT0 = time.time()", "import os\nRANK = int(os.environ['RANK'])", "X = 1"]
)
def test_a_first_statement_that_only_looks_prevents_no_fork(host: Host, first: str) -> None:
    host.prepare(
        f"{first}\nimport late, torch{SHOW}\nprint([v for k, v in [*globals().items()] if k in ('T0', 'RANK')])"
    )
    said = [host.work() for _ in range(2)]
    assert host.by_exec == ["", ""]
    assert all("late ahead" in each for each in said)
    assert said[0] != said[1] or "X = 1" in first


def test_first_and_late_process_outlive_each_other(host: Host) -> None:
    host.prepare(PLACES["after a call"] + SHOW)
    host.work()
    assert host.learn()
    base, late = (server.pid for server in host.server.processes)
    assert base is not None
    assert late is not None
    os.kill(base, signal.SIGKILL)
    os.waitpid(base, 0)
    host.server.ended()
    host.load()
    assert "late ahead" in host.work()
    os.kill(late, signal.SIGKILL)
    os.waitid(os.P_PID, late, os.WEXITED | os.WNOWAIT)
    assert "late" in host.work()
    assert host.by_exec[-1] == ""


def test_a_worker_that_is_forked_when_its_agent_ends_ends_too(host: Host) -> None:
    host.prepare(PLACES["after a call"])
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)  # it is not adopted, as if this agent had ended
    pid = host.server.fork([sys.executable], {}, cwd="/", stdout=1, stderr=2)
    wait_until(lambda: find(pid) is None, "the worker ends", timeout=8)


def test_a_restart_finds_the_late_imports(installed: Path, tmp_path: Path) -> None:
    (installed / "late.py").write_text(MODULE + "here or open(os.environ['OUT'], 'w').close()")
    source = """
        import torch, os, time
        def train():
            import late
            return late.pid
        pid = train()
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("late", "here" if pid == os.getpid() else "ahead", flush=True)
        deadline = time.monotonic() + 90
        while pid == os.getpid() and not (os.path.exists(os.environ["OUT"]) and restart < 3):
            parameter.grad = torch.ones(1)
            optimizer.step()
            time.sleep(0.01)
            if time.monotonic() > deadline:
                raise SystemExit("no process has imported it ahead")
        if pid == os.getpid():
            time.sleep(1)
            raise SystemExit(3)
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    env = {"OUT": str(tmp_path / "imported")}
    result = run_dtrain("run", "-v", "--nproc-per-node", "2", "--max-restarts", "4", script, cwd=tmp_path, env=env)
    assert result.returncode == 0, result
    assert result.stdout.count("late ahead") == 2
    assert "0 processes left" in result.stderr
