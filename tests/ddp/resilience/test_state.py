"""What a State refuses, and what it does where no launcher replaces processes."""

import copy
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ddp
from ddp.errors import ArgumentError, BackwardError, UnsupportedError
from ddp.generation import pending_group
from ddp.resilience.global_batch import GlobalBatch

Loader = DataLoader[tuple[torch.Tensor, ...]]


@pytest.fixture
def parts(request: pytest.FixtureRequest) -> tuple[nn.Module, torch.optim.Optimizer, ddp.DistributedSampler]:
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


def test_values_that_cannot_be_sent_and_names_of_its_own_are_refused() -> None:
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


def test_a_commit_advances_the_sampler_unless_the_script_does(
    parts: tuple[nn.Module, torch.optim.Optimizer, ddp.DistributedSampler],
) -> None:
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


def test_a_commit_under_a_loader_with_workers_needs_advance(
    parts: tuple[nn.Module, torch.optim.Optimizer, ddp.DistributedSampler],
) -> None:
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
def test_a_loader_of_the_script_s_own_that_draws_ahead_needs_advance(
    parts: tuple[nn.Module, torch.optim.Optimizer, ddp.DistributedSampler],
    draw: Callable[[Loader], Iterator[torch.Tensor]],
    commits: int,
    message: str,
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


def kept(parts: tuple[nn.Module, torch.optim.Optimizer, ddp.DistributedSampler], **changed: Any) -> ddp.State:
    model, optimizer, sampler = parts
    given: dict[str, Any] = {"model": ddp.DistributedDataParallel(model), "optimizer": optimizer, "sampler": sampler}
    return ddp.State(**given | changed, keep_global_batch=True)


@pytest.mark.usefixtures("group_of_one")
def test_what_the_global_batch_cannot_be_kept_with_is_refused(
    parts: tuple[nn.Module, torch.optim.Optimizer, ddp.DistributedSampler],
) -> None:
    model, optimizer, sampler = parts
    data = sampler.dataset
    refused: dict[str, dict[str, Any]] = {
        r"takes a model in ddp.DistributedDataParallel, and there is model=Linear": {"model": model},
        r"and there is model=DistributedDataParallel": {"model": nn.parallel.DistributedDataParallel(nn.Linear(2, 1))},
        r"takes an optimizer, and there is none": {"optimizer": None},
        r"takes a ddp.DistributedSampler, and there is none": {"sampler": None},
        r"the loader of a strategy keeps": {"sampler": ddp.strategy("all_reduce").loader(data, global_batch_size=2)},
        r'with even="pad" or "drop"': {"sampler": ddp.DistributedSampler(data, even="exact")},
        r"scaler=GradScaler": {"scaler": torch.amp.GradScaler("cpu")},
        r"ema=AveragedModel": {"ema": torch.optim.swa_utils.AveragedModel(model)},
        r"second=SGD: it takes one model, one optimizer": {"second": torch.optim.SGD(model.parameters())},
        r"no optimizer of ddp.horovod": {
            "optimizer": ddp.horovod.DistributedOptimizer(torch.optim.SGD(model.parameters()))
        },
    }
    for message, changed in refused.items():
        with pytest.raises(ArgumentError, match=message):
            kept(parts, **changed)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert kept(parts, scheduler=schedule, scaler=torch.amp.GradScaler("cpu", enabled=False), epoch=0).commit()


@pytest.mark.usefixtures("group_of_one")
def test_a_commit_of_several_batches_is_refused_where_the_global_batch_is_kept(
    parts: tuple[nn.Module, torch.optim.Optimizer, ddp.DistributedSampler],
) -> None:
    state = kept(parts)
    for step, _ in enumerate(DataLoader(parts[2].dataset, batch_size=2, sampler=parts[2])):
        if step == 0:
            state.commit()
    with pytest.raises(ArgumentError, match="this commit is of 10 samples on this rank, in 1 batch, and a batch had 2"):
        state.commit()


@pytest.fixture
def of_two(
    parts: tuple[nn.Module, torch.optim.Optimizer, ddp.DistributedSampler], page: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ddp.State]:
    """A State on the one rank that is left of two, after a first commit."""
    monkeypatch.setattr(ddp.DistributedDataParallel, "_least_ranks", 1)
    model, optimizer, sampler = parts
    sampler.hand_out([0], 2, 0)
    sampler.load_state_dict(sampler.state_dict())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = kept((model, optimizer, sampler), schedule=schedule, step=0, begun=0, best=-1)
    part = state.commits.parts["sampler"]
    assert isinstance(part, GlobalBatch)
    sampler.num_replicas = 1
    state.commits.begin(has_state=True)
    sampler.num_replicas = 2
    part.receive({"position": sampler.state_dict(), "count": 2, "batch": 2})
    part.begin(None)
    yield state
    state.model._let_go()  # before the group ends


def commit_after(state: ddp.State, x: torch.Tensor) -> bool:
    one_pass(state, x)
    return state.commit()


def one_pass(state: ddp.State, x: torch.Tensor) -> None:
    state.model(x).sum().backward()
    state.optimizer.step()
    state.schedule.step()
    state.optimizer.zero_grad()
    state.step += 1


def test_a_step_of_two_batches_is_one_commit(of_two: ddp.State) -> None:
    """12 samples: three steps of twice two."""
    before = of_two.model.module.weight.detach().clone()
    done = []
    for (x,) in DataLoader(of_two.sampler.dataset, batch_size=2, sampler=of_two.sampler):
        one_pass(of_two, x)
        done.append(of_two.commit())
        assert torch.equal(before, of_two.model.module.weight) is (done == [False])
        assert of_two.step == of_two.schedule.last_epoch == sum(done)
        assert of_two.sampler.state_dict()["position"] == 4 * sum(done)
    assert done == [False, True] * 3


@pytest.mark.parametrize("parts", [14], indirect=True)
@pytest.mark.parametrize(("how", "most"), [("evaluates", 8), ("drops", 8), ("breaks", 6)])
def test_what_is_done_between_two_epochs_stays(of_two: ddp.State, how: str, most: int) -> None:
    """With an evaluation through the wrapper, a short batch that the DataLoader drops, a loop that is left early."""
    sampler = of_two.sampler
    rows = DataLoader(sampler.dataset, batch_size=2, sampler=sampler, drop_last=how == "drops")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for passes, (x,) in enumerate(rows):
            if passes == most:
                break
            one_pass(of_two, x)
            of_two.commit()
        assert (of_two.best, of_two.schedule.last_epoch - of_two.step) == (epoch - 1, epoch)
        if how == "evaluates":
            with torch.no_grad():
                of_two.model(torch.ones(1, 2))
        of_two.best = epoch
        of_two.schedule.step()
        if how == "evaluates":
            of_two.commit()


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_done_before_the_forward_and_behind_the_commit_of_a_step_counts_once(
    of_two: ddp.State, workers: int
) -> None:
    """Also at the end of an epoch, where the workers have drawn all batches."""
    rows = DataLoader(of_two.sampler.dataset, batch_size=2, sampler=of_two.sampler, num_workers=workers)
    for (x,) in rows:
        of_two.begun += 1
        one_pass(of_two, x)
        of_two.sampler.advance(len(x))
        if of_two.commit():
            of_two.best += 1
    assert (of_two.step, of_two.begun, of_two.best) == (3, 3, 2)


def test_a_checkpoint_around_the_wrapper_is_no_pass_of_its_own(of_two: ddp.State) -> None:
    alone = copy.deepcopy(of_two.model.module)
    rows = DataLoader(of_two.sampler.dataset, batch_size=2, sampler=of_two.sampler)
    for _, (x,) in zip(range(2), rows, strict=False):
        checkpoint(of_two.model, x, use_reentrant=False).square().mean().backward()
        (alone(x).square().mean() / 2).backward()
        of_two.commit()
    assert torch.allclose(of_two.model.module.weight.grad, alone.weight.grad)


def test_a_second_backward_pass_before_a_commit_is_an_error(of_two: ddp.State) -> None:
    of_two.model(torch.ones(2, 2)).sum().backward()
    with pytest.raises(BackwardError, match=r"there was no state.commit\(\) since the one before"):
        of_two.model(torch.ones(2, 2)).sum().backward()


def test_after_the_function_each_pass_is_a_step_and_a_second_one_goes_on(of_two: ddp.State) -> None:
    rows = DataLoader(of_two.sampler.dataset, batch_size=2, sampler=of_two.sampler)
    assert [commit_after(of_two, x) for (x,) in rows] == [False, True] * 3
    of_two.commits.end()
    for _ in range(2):
        before = of_two.model.module.weight.detach().clone()
        one_pass(of_two, torch.ones(2, 2))
        assert not torch.equal(before, of_two.model.module.weight)
    of_two.commits.begin(has_state=True)
    of_two.sampler.set_epoch(1)
    assert [commit_after(of_two, x) for (x,) in rows] == [False, True] * 3


def test_what_no_step_of_two_batches_can_be_made_of_is_an_error(of_two: ddp.State) -> None:
    model, rows = of_two.model, iter(DataLoader(of_two.sampler.dataset, batch_size=2, sampler=of_two.sampler))
    (x,) = next(rows)
    with model.no_sync():
        model(x).sum().backward()
    one_pass(of_two, x)
    with pytest.raises(ArgumentError, match=r"1 forward passes were in no_sync\(\)"):
        of_two.commit()
    of_two.commits.parts["sampler"].begin(None)  # type: ignore[attr-defined]  # as after a failure
    for (x,) in [next(iter(DataLoader(of_two.sampler.dataset, batch_size=2, sampler=of_two.sampler)))]:
        one_pass(of_two, x)
        with torch.no_grad():
            model.module.weight.add_(1)
    with pytest.raises(UnsupportedError, match="parameters have changed in a micro-batch"):
        of_two.commit()


def test_without_the_size_of_a_batch_all_start_again(of_two: ddp.State) -> None:
    part: Any = of_two.commits.parts["sampler"]
    part.receive({"position": of_two.sampler.state_dict(), "count": 2, "batch": 0})
    with pytest.raises(UnsupportedError, match="before a commit has shown the size of a batch"):
        part.begin(None)


@pytest.mark.usefixtures("page")
def test_what_came_with_no_broadcast_is_forgotten_once_it_comes_with_the_state(
    parts: tuple[nn.Module, torch.optim.Optimizer, ddp.DistributedSampler],
) -> None:
    model, optimizer, _ = parts
    pending_group.left_out.extend([*model.state_dict().values(), optimizer])  # as the broadcasts of ddp.horovod do
    state = ddp.State(model=model, optimizer=optimizer)
    state.commits.begin(has_state=False)
    assert pending_group.left_out == []
    state.commits.end()
