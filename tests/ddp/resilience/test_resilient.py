"""A rank fails in training under dtrain: it alone is replaced, and the run ends with the bits of an undisturbed one."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testbed.once import once
from testbed.processes import Result
from testbed.resilient import run as run_script
from testbed.resilient import said

pytestmark = pytest.mark.usefixtures("warm")
SCRIPT = Path(__file__).parents[2] / "programs" / "resilient.py"


def run(folder: Path, ranks: int, *failures: str, script: Path = SCRIPT, **options: Any) -> Result:
    return run_script(script, folder, *failures, ranks=ranks, **options)


Results = dict[int, str]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Results]:
    """Returns the results of a run without failures."""

    def results(ranks: int, backend: str) -> Results:
        def make() -> Results:
            return said(run(tmp_path_factory.mktemp("undisturbed"), ranks, backend=backend), "result")

        return once(tmp_path_factory, f"undisturbed {ranks} {backend}", make)

    return results


@pytest.mark.parametrize(
    ("ranks", "backend", "failures"),
    [
        (3, "", ("1.2.forward.kill", "0.4.backward.kill", "2.6.step.kill", "0.9.commit.raise", "1.11.load.exit",
                 "0.15.forward.raise", "2.15.forward.raise")),  # the last two at once
        (3, "gloo", ("1.0.load.kill", "0.4.step.kill", "2.5.commit.kill", "1.7.forward.raise", "1.24.end.kill")),
        # After these all ranks need the buckets that they had: with three ranks, gloo's order of sums depends on them.
        (3, "gloo", ("0.0.gradient.raise", "1.1.gradient.raise", "2.2.module.raise", "1.5.gradient.kill",
                     "0.8.gradient.raise", "2.13.gradient.raise")),
        (3, "gloo", ("2.0.module.raise", "2.1.gradient.kill", "0.2.gradient.raise", "1.6.module.raise")),
        (2, "", ("0.0.backward.kill", "0.12.load.kill", "1.24.commit.kill", "1.36.end.kill")),
        # Rank 2 dies when its gradients are on their way; rank 0 has stepped with them, rank 1 has not.
        (3, "", ("0.5.step.pass", "2.5.backward.kill", "1.5.backward.hear")),
    ],
)  # fmt: skip
def test_failures_change_no_bit(
    tmp_path: Path, undisturbed: Callable[[int, str], Results], ranks: int, backend: str, failures: tuple[str, ...]
) -> None:
    result = run(tmp_path, ranks, *failures, restarts=len(failures), backend=backend)
    assert {each.name for each in tmp_path.iterdir()} >= {*failures}, "each rank failed where it was to"
    assert said(result, "result") == undisturbed(ranks, backend)
    replaced = [failure for failure in failures if not failure.endswith((".hear", ".pass"))]
    assert result.stderr.count("only this worker restarts") == len(replaced), result.stderr
    assert said(result, "entered").keys() == {*range(ranks)}
    recorded = [path.read_text().count('"recovery"') for path in tmp_path.glob("runs/*/timeline.jsonl")]
    assert max(recorded) > 0


def test_the_backend_changes_no_bit(undisturbed: Callable[[int, str], Results]) -> None:
    """A resilient function adds by the tree, also with gloo."""
    assert undisturbed(3, "gloo") == undisturbed(3, "")


def test_a_failure_of_ones_own_is_not_recorded_as_a_recovery(tmp_path: Path) -> None:
    run(tmp_path, 1, "0.30.forward.raise", restarts=0, code=1)
    recorded = [path.read_text() for path in tmp_path.glob("runs/*/timeline.jsonl")]
    assert recorded
    assert not any('"recovery"' in text for text in recorded)


@pytest.mark.parametrize("backend", ["", "gloo"])
def test_a_rank_that_leaves_with_exit_code_0_is_replaced(
    tmp_path: Path, undisturbed: Callable[[int, str], Results], backend: str
) -> None:
    result = run(tmp_path, 3, "1.4.forward.leave", restarts=1, backend=backend)
    assert "it left @ddp.resilient early: the process ended with code 0" in result.stderr
    assert result.stderr.count("only this worker restarts") == 1, result.stderr
    assert said(result, "result") == undisturbed(3, backend)


def changed(folder: Path, *pairs: tuple[str, str]) -> Path:
    """A copy of the script with some of its lines changed."""
    text = SCRIPT.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    script = folder / "changed.py"
    script.write_text(text)
    return script


def test_collectives_before_the_function_let_all_start_again(tmp_path: Path) -> None:
    script = changed(tmp_path, ("entered = 0\n", "entered = 0\ndist.barrier()\n"))
    result = run(tmp_path, 2, "1.2.forward.kill", restarts=3, script=script)
    assert "barrier() before the function of @ddp.resilient: this process replaces rank 1" in result.stderr
    assert "attempt 1" in result.stderr
    assert said(result, "result").keys() == {0, 1}


def test_a_second_resilient_function_lets_all_start_again(tmp_path: Path) -> None:
    script = changed(tmp_path, ("said = train(state)\n", "train(state)\nstate.epoch = 0\nsaid = train(state)\n"))
    result = run(tmp_path, 2, "0.50.forward.kill", restarts=3, script=script)
    assert "comes to the first such function of the script only" in result.stderr


def test_a_model_that_the_state_does_not_hold_is_refused(tmp_path: Path) -> None:
    other = "other = ddp.DistributedDataParallel(nn.Linear(2, 2))\nentered = 0\n"
    result = run(tmp_path, 2, restarts=0, code=1, script=changed(tmp_path, ("entered = 0\n", other)))
    assert (
        "UnsupportedError: DistributedDataParallel: in a resilient function only what its ddp.State holds"
        in result.stderr
    )


def test_a_model_left_behind_never_trains_alone(tmp_path: Path) -> None:
    script = changed(
        tmp_path,
        ("entered = 0\n", "entered = 0\nother = []\n"),
        (
            "    entered += 1\n",
            "    entered += 1\n    other = other or [ddp.DistributedDataParallel(nn.Linear(6, 2))]\n",
        ),
        ("    global entered\n", "    global entered, other\n"),
        ('            fail("load")\n', '            fail("load")\n            other[0](x)\n'),
    )
    result = run(tmp_path, 2, "1.2.forward.kill", restarts=3, script=script)
    assert "ReplacementError: this model does not average gradients any more" in result.stderr, result
    assert "attempt 1 begins" in result.stderr


def test_a_failure_that_the_script_swallows_is_no_commit(
    tmp_path: Path, undisturbed: Callable[[int, str], Results]
) -> None:
    swallow = """            try:
                loss.backward()
            except RuntimeError:
                optimizer.zero_grad()
                state.commit()
                continue
"""
    script = changed(tmp_path, ("            loss.backward()\n", swallow))
    result = run(tmp_path, 3, "1.3.forward.kill", restarts=1, script=script)
    assert said(result, "result") == undisturbed(3, "")


def test_a_checkpoint_loaded_before_the_function_is_no_obstacle(tmp_path: Path) -> None:
    load = "assert ddp.Checkpoint('saved').load(model=model, optimizer=optimizer, sampler=sampler) is None\n"
    script = changed(tmp_path, ("entered = 0\n", load + "entered = 0\n"))
    result = run(tmp_path, 2, "1.2.forward.kill", restarts=1, script=script)
    assert "attempt 1 begins" not in result.stderr


@pytest.mark.parametrize("backend", ["", "gloo"])
def test_a_rank_lost_after_a_sum_keeps_its_random_numbers(
    tmp_path: Path, undisturbed: Callable[[int, str], Results], backend: str
) -> None:
    """Its page has the commit before: no gradients were sent since."""
    script = changed(
        tmp_path,
        ("torch's own, between two steps\n", '\n                fail("sum")\n                state.commit()\n'),
    )
    result = run(tmp_path, 3, "1.5.sum.kill", "2.20.sum.kill", restarts=2, backend=backend, script=script)
    assert said(result, "result") == undisturbed(3, backend)


FORGOTTEN = """\
from ddp.generation import connections


def receive():
    # gloo sometimes forgets a collective when its connections end. Here they do not.
    if world.rank == 0 and not Path("forgotten").exists():
        while not Path("kept").exists():
            time.sleep(0.01)
        Path("forgotten").touch()
        connections._break = lambda *_: None
        dist.broadcast(torch.ones(1), src=1)
    elif world.rank == 1 and not Path("forgotten").exists():
        kept.append(dist.group.WORLD)
        connections._break = lambda *_: None
        Path("kept").touch()
    elif world.rank == 2 and not Path("killed").exists():
        Path("killed").touch()
        while not Path("forgotten").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


kept = []
"""


def test_a_collective_that_gloo_has_forgotten_ends_too(
    tmp_path: Path, undisturbed: Callable[[int, str], Results]
) -> None:
    """Else rank 0 would wait for rank 1, which meets the others, until the timeout of the group: half an hour."""
    script = changed(
        tmp_path,
        ("entered = 0\n", FORGOTTEN + "entered = 0\n"),
        ('            fail("load")\n', '            fail("load")\n            receive()\n'),
    )
    result = run(tmp_path, 3, restarts=1, backend="gloo", script=script)
    assert result.stderr.count("only this worker restarts") == 1, result.stderr
    assert said(result, "result") == undisturbed(3, "gloo")


INTERRUPTED_WHILE_IT_CONNECTS = """\
from ddp import world as ddp_world


def interrupted(*_):
    raise RuntimeError("a signal's handler raises")


def connect(member, store):
    if member.joining > 0 and world.rank == 0 and not Path("interrupted").exists():
        Path("interrupted").touch()
        signal.raise_signal(signal.SIGUSR2)
    really_connect(member, store)


signal.signal(signal.SIGUSR2, interrupted)
really_connect, ddp_world._connect = ddp_world._connect, connect
"""


def test_a_handler_that_raises_while_ranks_connect_is_a_failure(
    tmp_path: Path, undisturbed: Callable[[int, str], Results]
) -> None:
    """Else it would wait for a minute for the loss of another rank."""
    script = changed(tmp_path, ("entered = 0\n", INTERRUPTED_WHILE_IT_CONNECTS + "entered = 0\n"))
    result = run(tmp_path, 3, "1.2.forward.kill", restarts=2, script=script)
    assert "rank 0 on " in result.stderr
    assert "raised RuntimeError" in result.stderr, result.stderr
    killed, raised = (
        max(map(float, re.findall(rf"{what} after ([\d.]+) s", result.stderr)))
        for what in ("killed by SIGKILL", "raised RuntimeError")
    )
    assert raised - killed < 50
    assert said(result, "result") == undisturbed(3, "")


DIES_WHILE_IT_MEETS_THE_OTHERS = """\
from ddp import world as ddp_world
from ddp.resilience import loop


def is_first(name):
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def wait_until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def dies(name, *others):
    # once the others are where they are to be then
    if not Path(name).exists():
        wait_until(lambda: all(Path(other).exists() for other in others))
        if is_first(name):
            os.kill(os.getpid(), signal.SIGKILL)


def meet(*arguments):
    if world.rank == 1 and Path("1.2.forward.kill").exists():
        dies("before it is at the store")
    have_met = really_meet(*arguments)
    if have_met and world.rank == 2 and Path("while it connects").exists() and is_first("rank 2 has met"):
        # What it hears now breaks no connection that it makes from here on.
        wait_until(lambda: broken and broken[-1] > loop._loop_of_process()._joining)
    return have_met


def connect(member, store):
    if member.joining > 0:
        Path(f"rank {world.rank} connects in {member.joining}").touch()
    if member.joining > 0 and world.rank == 1:
        dies("while it connects", *(f"rank {rank} connects in {member.joining}" for rank in (0, 2)))
        dies("while it connects again", f"rank 0 connects in {member.joining}", "rank 2 has met")
    if member.joining > 0 and world.rank == 0 and is_first("rank 0 waits"):
        time.sleep(600)  # as gloo waits for a rank that has given its address, and whose host is off now
    really_connect(member, store)


def break_connections():
    really_break()
    broken.append(loop._loop_of_process()._announcements.newest)


broken = []
really_meet, ddp_world.meet = ddp_world.meet, meet
really_connect, ddp_world._connect = ddp_world._connect, connect
really_break, loop.break_connections = loop.break_connections, break_connections
"""


def test_a_rank_that_dies_while_it_meets_the_others_is_replaced(
    tmp_path: Path, undisturbed: Callable[[int, str], Results]
) -> None:
    """Rank 0 waits for what no one can break, until it ends by itself. Rank 2 has the state meanwhile.

    The last time, rank 2 hears that rank 1 is gone just before it makes its first connection.
    """
    script = changed(tmp_path, ("entered = 0\n", DIES_WHILE_IT_MEETS_THE_OTHERS + "entered = 0\n"))
    result = run(tmp_path, 3, "1.2.forward.kill", restarts=5, backend="gloo", script=script)
    died = {"before it is at the store", "while it connects", "rank 2 has met", "while it connects again"}
    assert {each.name for each in tmp_path.iterdir()} >= died
    assert "rank 0 waits for a rank that is gone, and ends" in result.stderr + result.stdout
    assert result.stderr.count("only this worker restarts") == 5, result.stderr
    assert said(result, "result") == undisturbed(3, "gloo")
