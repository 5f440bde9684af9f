"""What a State refuses, and what it does where no launcher replaces processes."""

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddp
from ddp.errors import ArgumentError
from ddp.generation import pending_group

Loader = DataLoader[tuple[torch.Tensor, ...]]
Parts = tuple[nn.Module, torch.optim.Optimizer, ddp.DistributedSampler]


@pytest.fixture
def parts(request: pytest.FixtureRequest) -> Parts:
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.randn(getattr(request, "param", 12), 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), ddp.DistributedSampler(data)


@pytest.fixture
def page(group_of_one: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher gives a rank of a resilient function, and a group."""
    (tmp_path / "page").touch()
    monkeypatch.setenv("DTRAIN_STATE_FILE", str(tmp_path / "page"))


def test_without_a_launcher_the_function_just_runs() -> None:
    state = ddp.State(epoch=1, best=None)

    @ddp.resilient
    def train(state: ddp.State, last: int) -> str:
        """Its own words."""
        for state.epoch in range(state.epoch, last):  # noqa: B020
            state.commit()
        state.best = [1.0]
        return "done"

    assert train(state, last=4) == "done"
    assert (state.epoch, state.best) == (3, [1.0])
    assert train.__doc__ == "Its own words."


def test_without_a_launcher_an_exception_is_raised() -> None:
    @ddp.resilient
    def train(state: ddp.State) -> None:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed"):
        train(ddp.State())


def test_the_first_argument_is_a_state() -> None:
    @ddp.resilient
    def train(state: object) -> None: ...

    with pytest.raises(ArgumentError, match=r"train\(dict\): its first argument must be a ddp.State"):
        train({})


def test_values_that_cannot_be_sent_and_own_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match="which cannot be sent"):
        ddp.State(lock=object())
    with pytest.raises(ArgumentError, match="commit is a name of"):
        ddp.State(commit=1)
    state = ddp.State(epoch=0)
    with pytest.raises(ArgumentError, match="which cannot be sent"):
        state.epoch = {1: object()}
    with pytest.raises(AttributeError, match=r"this State has no value 'step': give it to State\(step=...\)"):
        _ = state.step


def test_an_optimizer_that_no_one_can_watch_is_refused(parts: tuple[nn.Module, ...]) -> None:
    class Odd:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: object) -> None: ...

    with pytest.raises(ArgumentError, match="optimizer=Odd has no register_step_pre_hook"):
        ddp.State(model=parts[0], optimizer=Odd())  # type: ignore[arg-type]


def test_a_commit_advances_the_sampler_unless_the_script_does(parts: Parts) -> None:
    model, optimizer, sampler = parts
    state = ddp.State(model=model, optimizer=optimizer, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, _ in enumerate(DataLoader(sampler.dataset, batch_size=4, sampler=sampler)):
            state.commit()
            assert sampler.trained == 4 * (step + 1)
    sampler.set_epoch(2)
    for step, (x,) in enumerate(DataLoader(sampler.dataset, batch_size=5, sampler=sampler)):
        sampler.advance(len(x))
        state.commit()
        assert sampler.trained == min(5 * (step + 1), 12)


def test_a_commit_under_a_loader_with_workers_needs_advance(parts: Parts) -> None:
    model, optimizer, sampler = parts
    state = ddp.State(model=model, optimizer=optimizer, sampler=sampler)
    loader = iter(DataLoader(sampler.dataset, batch_size=4, sampler=sampler, num_workers=1))
    (x,) = next(loader)
    with pytest.raises(ArgumentError, match=r"call sampler.advance\(len\(batch\)\) before state.commit\(\)"):
        state.commit()
    sampler.advance(len(x))
    state.commit()


def drawn_in_a_thread(loader: Loader) -> Iterator[torch.Tensor]:
    batches: queue.Queue[torch.Tensor | None] = queue.Queue()

    def draw() -> None:
        for (x,) in loader:
            batches.put(x)
        batches.put(None)

    threading.Thread(target=draw, daemon=True).start()
    while (x := batches.get()) is not None:
        yield x


def drawn_ahead(loader: Loader) -> Iterator[torch.Tensor]:
    """One batch ahead, as loaders that copy to a device do."""
    batches = iter(loader)
    following = next(batches, None)
    while (now := following) is not None:
        following = next(batches, None)
        yield now[0]


def drawn_at_once(loader: Loader) -> Iterator[torch.Tensor]:
    indices = [*loader.sampler]
    for first in range(0, len(indices), 2):
        yield torch.stack([loader.dataset[index][0] for index in indices[first : first + 2]])


@pytest.mark.usefixtures("page")
@pytest.mark.parametrize(
    ("draw", "commits", "message"),
    [
        (drawn_in_a_thread, 0, "another thread draws samples ahead"),
        (drawn_ahead, 5, r"several commits on one batch, call sampler.advance\(0\) before each"),
        (drawn_at_once, 1, "nothing was drawn from the sampler since the last commit"),
    ],
)
def test_an_own_loader_that_draws_ahead_needs_advance(
    parts: Parts, draw: Callable[[Loader], Iterator[torch.Tensor]], commits: int, message: str
) -> None:
    """With it, the place in the epoch is that of the step. advance(0) is for a step without samples."""
    model, optimizer, sampler = parts
    state = ddp.State(model=model, optimizer=optimizer, sampler=sampler)
    state.commits.begin(has_state=True)
    loader = DataLoader(sampler.dataset, batch_size=2, sampler=sampler)

    def epoch(number: int, *, tells: bool) -> None:
        sampler.set_epoch(number)
        for step, x in enumerate(draw(loader)):
            model(x).sum().backward()
            optimizer.step()
            if tells and step == 1:
                sampler.advance(0)
                state.commit()
                assert sampler.state_dict()["position"] == 2, "after a failure the batch is drawn again"
                optimizer.step()
            if tells:
                sampler.advance(len(x))
            state.commit()
            assert sampler.state_dict()["position"] == 2 * (step + 1) or not tells
            if tells and step == 2:
                optimizer.step()
                sampler.advance(0)
                state.commit()

    epoch(0, tells=True)
    assert state.commits.number == 8
    with pytest.raises(ArgumentError, match=message):
        epoch(1, tells=False)
    assert state.commits.number == 8 + commits


@pytest.mark.usefixtures("page")
def test_what_comes_with_the_state_needs_no_broadcast(parts: Parts) -> None:
    model, optimizer, _ = parts
    pending_group.left_out.extend([*model.state_dict().values(), optimizer])  # as the broadcasts of ddp.horovod do
    state = ddp.State(model=model, optimizer=optimizer)
    state.commits.begin(has_state=False)
    assert pending_group.left_out == []
    state.commits.end()
