"""What a State refuses, and what it does where no launcher replaces processes."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddp
from ddp.errors import ArgumentError


@pytest.fixture
def parts() -> tuple[nn.Module, torch.optim.Optimizer, ddp.DistributedSampler]:
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.randn(12, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), ddp.DistributedSampler(data)


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


def test_an_optimizer_that_nobody_can_watch_is_refused(parts: tuple[nn.Module, ...]) -> None:
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
