"""Steps that the bootstrap of a worker counts by itself: those of torch's optimizers, and calls of `launcher.step`."""

import struct
import sys
import textwrap
import time
from pathlib import Path

import pytest
from testbed import REPOSITORY
from testbed.processes import run_dtrain, run_program

BOOTSTRAP = REPOSITORY / "launcher/agent/workers/bootstrap.py"
PROGRESS = struct.Struct("<9Q")

# `counted()`: how many steps the optimizers made, and how many calls there were.
READER = """\
import os, struct
def counted():
    with open(os.environ["DTRAIN_PROGRESS_FILE"], "rb") as file:
        return struct.unpack("<9Q", file.read())[5:7]
"""


def run_worker(folder: Path, text: str, *, size_bytes: int = PROGRESS.size) -> list[str]:
    """Run a script as the bootstrap does; return its lines."""
    progress, script = folder / "progress", folder / "script.py"
    progress.write_bytes(bytes(size_bytes))
    script.write_text(READER + textwrap.dedent(text))
    env = {"DTRAIN_PROGRESS_FILE": str(progress), "PYTHONPATH": str(REPOSITORY)}
    result = run_program(sys.executable, "-u", BOOTSTRAP, "script", script, cwd=folder, env=env)
    assert result.returncode == 0, result
    return result.stdout.splitlines()


def test_a_step_is_counted_when_an_optimizer_steps_again(tmp_path: Path) -> None:
    """Several that step one after the other make one step; forked processes, and compiled steps, none."""
    lines = run_worker(
        tmp_path,
        """\
        import torch

        class Plain(torch.optim.Optimizer):  # which can be compiled as a whole
            def step(self):
                self.param_groups[0]["params"][0].grad.add_(1)

        def optimizer(kind=torch.optim.SGD, **options):
            parameter = torch.nn.Parameter(torch.zeros(1))
            parameter.grad = torch.ones(1)
            return kind([parameter], **options)

        def train(*optimizers, steps):
            before = counted()[0]
            for _ in range(steps):
                for each in optimizers:
                    each.step()
            print(counted()[0] - before)

        a, b, c = (optimizer(lr=0.1) for _ in range(3))
        train(a, steps=5)
        train(a, b, c, steps=5)
        train(b, steps=5)  # the first one is not used any more
        train(c, a, a, a, steps=5)  # a critic that steps more often
        if not (pid := os.fork()):
            a.step()
            os._exit(0)
        os.waitpid(pid, 0)
        print(counted()[0])
        plain = optimizer(Plain, defaults={})
        train(plain, steps=3)
        compiled = torch.compile(plain.step, fullgraph=True, backend="eager")
        compiled(), compiled()
        print(plain.param_groups[0]["params"][0].grad.item())
        print(counted()[0])
        """,
    )
    alone, together, other, critic = map(int, lines[:4])
    assert (alone, together, other) == (5, 5, 5)
    assert 14 <= critic <= 15  # the first round has no step before it
    before_fork, plain, gradient, at_the_end = int(lines[4]), int(lines[5]), float(lines[6]), int(lines[7])
    assert before_fork == alone + together + other + critic
    assert plain in (2, 3)  # the first of a new optimizer may belong to the last step of another
    assert gradient == 1 + 3 + 2
    assert at_the_end == before_fork + plain


def test_from_the_first_call_on_calls_count_not_optimizers(tmp_path: Path) -> None:
    lines = run_worker(
        tmp_path,
        """\
        import launcher, torch
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for steps in (3, 4):
            for _ in range(steps):
                optimizer.step()
            print(*counted())
            launcher.step()
            print(*counted())
        """,
    )
    assert lines == ["3 0", "3 1", "3 1", "3 2"]


def test_a_call_counts_without_torch_and_costs_next_to_nothing(tmp_path: Path) -> None:
    before_ns = time.monotonic_ns()
    lines = run_worker(
        tmp_path,
        """\
        import sys
        from launcher import step
        for _ in range(3):
            step()
        print(*counted(), "torch" in sys.modules)
        """,
    )
    assert lines == ["0 3 False"]
    ended_ns = PROGRESS.unpack((tmp_path / "progress").read_bytes())[7]
    assert before_ns < ended_ns < time.monotonic_ns()


@pytest.mark.parametrize("file", ["short", "missing", "none"])
def test_a_call_does_nothing_where_there_is_no_file_for_it(tmp_path: Path, file: str) -> None:
    path = tmp_path / "progress"
    if file == "short":
        path.write_bytes(bytes(40))
    env = {"PYTHONPATH": str(REPOSITORY), **({} if file == "none" else {"DTRAIN_PROGRESS_FILE": str(path)})}
    result = run_program(sys.executable, "-c", "import launcher; launcher.step(); launcher.step()", env=env)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not path.exists() or path.read_bytes() == bytes(40)


@pytest.mark.usefixtures("warm")
def test_where_ddp_counts_nothing_else_does(tmp_path: Path) -> None:
    text = """\
        import torch
        import ddp
        import launcher
        ddp.init()
        model = ddp.DistributedDataParallel(torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            launcher.step()
        with open(os.environ["DTRAIN_PROGRESS_FILE"], "rb") as file:
            print(struct.unpack("<9Q", file.read()))
        """
    (tmp_path / "script.py").write_text("import os, struct\n" + textwrap.dedent(text))
    result = run_dtrain("run", "--nproc-per-node", "2", "script.py", cwd=tmp_path)
    assert result.returncode == 0, result
    assert result.stdout.count("(5, 0, 0, 0, 0, 0, 0, 0, 0)") == 2
