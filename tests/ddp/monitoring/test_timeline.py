"""What a process records of its steps: where its time went, in a ring that the launcher reads from outside."""

from __future__ import annotations

import itertools
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp
from ddp import horovod
from ddp.monitoring import progress, timeline
from ddp.monitoring.timeline import PHASES

pytestmark = pytest.mark.usefixtures("group_of_one")
HEADER, RECORD = 16, 72
STEP, SPAN, DETAIL = 0, 1, 2
STRETCH_S = 0.02  # a phase that is made longer; nothing below asks for more than that it is at least so long


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "timeline"
    path.write_bytes(bytes(HEADER + 256 * RECORD))
    (tmp_path / "progress").write_bytes(bytes(72))
    monkeypatch.setenv("DTRAIN_TIMELINE_FILE", str(path))
    monkeypatch.setenv("DTRAIN_PROGRESS_FILE", str(tmp_path / "progress"))
    _forget()
    yield path
    _forget()


def _forget() -> None:
    progress._counters.cache_clear()
    if timeline._recorder is not None:
        timeline._recorder.record_step()
    timeline._recorder, timeline._is_looked_for = None, False
    timeline._trained.clear()
    timeline._known = None


def _read(path: Path, kind: int) -> list[tuple[float, ...]]:
    """The records of a kind, without what only pads them, by their number."""
    if timeline._recorder is not None:
        timeline._recorder.record_step()
    data = path.read_bytes()
    owner, written = struct.unpack_from("<QQ", data)
    assert owner == os.getpid()
    records = sorted(struct.iter_unpack("<q8d", data[HEADER:])) if written else []
    count = {STEP: 8, SPAN: 3, DETAIL: 5}[kind]
    return [tuple(values[:count]) for number, *values in records if number % 4 == kind and any(values)]


def _steps(path: Path, *numbers: int) -> list[dict[str, float]]:
    """Return the phases of the steps, which must have these numbers; they must add up to the wall time."""
    steps = _read(path, STEP)
    assert [step for step, *_ in steps] == [*numbers]
    for before, step in itertools.pairwise(steps):
        assert math.isclose(math.fsum(step[2:]), step[1] - before[1], abs_tol=1e-6)
    return [dict(zip(PHASES, step[2:], strict=True)) for step in steps]


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = ddp.DistributedDataParallel(torch.nn.Sequential(_Slow(), torch.nn.Linear(2, 2)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class _Slow(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(STRETCH_S)
        return x


def _closure(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2)).square().sum()
        loss.backward()
        return float(loss.detach())

    return closure


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()


def test_the_phases_of_a_step_add_up_to_its_wall_time(ring: Path) -> None:
    model, optimizer = _model()
    for _ in range(4):
        time.sleep(STRETCH_S)  # data
        _step(model, optimizer)
    first, *others = _steps(ring, 1, 2, 3, 4)
    assert first["data"] == 0.0  # what came before the first forward is no part of it
    for phases in others:
        assert phases["data"] >= STRETCH_S
        assert phases["forward"] >= STRETCH_S
        assert phases["backward"] > 0
        assert phases["optimizer"] > 0


def test_the_details_of_the_first_step_are_its_phases_in_order(ring: Path) -> None:
    model, optimizer = _model()
    for _ in range(2):
        _step(model, optimizer)
    details = [(PHASES[int(phase)], step) for phase, _, step, *_ in _read(ring, DETAIL)]
    assert [phase for phase, step in details if step == 1] == ["forward", "backward", "other", "optimizer"]
    times = [each[3:] for each in _read(ring, DETAIL)]
    assert all(began <= ended for began, ended in times)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(times))


def test_passes_that_only_accumulate_are_a_part_of_the_step(ring: Path) -> None:
    model, optimizer = _model()
    for _ in range(3):
        with model.no_sync():  # type: ignore[operator]  # torch's types know no methods of modules
            model(torch.ones(2)).sum().backward()
        time.sleep(STRETCH_S)  # the next part of the batch
        _step(model, optimizer)
    for phases in _steps(ring, 1, 2, 3):
        assert phases["forward"] >= 2 * STRETCH_S
        assert phases["data"] >= STRETCH_S


def test_two_optimizers_one_after_the_other_make_one_step(ring: Path) -> None:
    model, first = _model()
    second = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    for _ in range(3):
        _step(model, first)
        second.step()
    _steps(ring, 1, 2, 3)


@pytest.mark.parametrize(("kind", "passes"), [(torch.optim.SGD, 1), (torch.optim.LBFGS, 20)])
def test_a_step_has_the_passes_of_its_closure(ring: Path, kind: type[torch.optim.Optimizer], passes: int) -> None:
    model, _ = _model()
    optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]  # the base class has no lr
    for _ in range(3):
        time.sleep(STRETCH_S)  # data
        optimizer.step(_closure(model, optimizer))
    for phases in _steps(ring, passes, 2 * passes, 3 * passes)[1:]:
        assert phases["data"] >= STRETCH_S
        assert phases["forward"] >= STRETCH_S
        assert phases["optimizer"] > 0


def test_an_optimizer_of_other_parameters_makes_no_step(ring: Path) -> None:
    model, optimizer = _model()
    scaler = torch.amp.GradScaler("cpu")

    class Other(torch.optim.SGD):
        def __eq__(self, other: object) -> bool:  # so it has no hash
            return self is other

    unused = torch.nn.Parameter(torch.ones(1))
    other = Other([unused], lr=0.1)
    other.step(lambda: 1.0)
    time.sleep(STRETCH_S)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.ones(2)).sum()
        other.step()
        loss.backward()
        unused.grad = scaler.scale(torch.ones(1))
        scaler.step(other)
        scaler.update()
        timeline.wait_ended(timeline.wait_begins())
        optimizer.step()
        other.step(lambda: 1.0)
    assert _steps(ring, 1, 2)[0]["data"] == 0.0  # what came before the first forward is no part of it
    other.add_param_group({"params": list(model.parameters())})
    for _ in range(2):
        _step(model, other)
    _steps(ring, 1, 2, 3, 4)


def test_optimizers_of_master_copies_step_where_no_other_does(ring: Path) -> None:
    model, _ = _model()
    optimizer = torch.optim.SGD([each.detach().clone() for each in model.parameters()], lr=0.1)
    for _ in range(4):
        _step(model, optimizer)
    assert all(phases["optimizer"] > 0 for phases in _steps(ring, 1, 2, 3, 4)[1:])


def test_parameters_are_gone_through_once_for_all_optimizers(ring: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    through = timeline._parameters
    model, _ = _model()

    def noted(of: Any) -> Any:
        looks.append(of)
        return through(of)

    monkeypatch.setattr(timeline, "_parameters", noted)
    for parameter in model.parameters():
        torch.optim.SGD([parameter], lr=0.1).step()
    assert looks.count(model) == 1


def test_a_step_that_the_scaler_skips_is_a_step(ring: Path) -> None:
    model, optimizer = _model()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for loss in (1.0, math.inf, math.inf, 1.0):
        time.sleep(STRETCH_S)  # data
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2)).sum() * loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(phases["data"] >= STRETCH_S for phases in _steps(ring, 1, 2, 3, 4)[1:])


def test_steps_of_horovod_count_from_the_first_closure_on(ring: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = horovod.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.step(_closure(model, optimizer))
    assert len(_read(ring, STEP)) == 3


def test_a_wait_after_the_optimizer_s_step_is_of_the_next_step(ring: Path) -> None:
    model, optimizer = _model()
    for _ in range(3):
        _step(model, optimizer)
        recorded = timeline.wait_begins()
        time.sleep(STRETCH_S)
        timeline.wait_ended(recorded)
    assert _steps(ring, 1, 2, 3)[1]["wait"] >= STRETCH_S


def test_a_step_counted_in_another_thread_ends_no_recording(ring: Path) -> None:
    """As the engine's threads of devices do, under Horovod's interface."""
    thread = threading.Thread(target=timeline.counted)
    thread.start()
    thread.join()
    model, optimizer = _model()
    for _ in range(3):
        _step(model, optimizer)
    _steps(ring, 2, 3, 4)


def test_without_an_optimizer_a_step_ends_at_the_next_forward(ring: Path) -> None:
    model, _ = _model()
    for _ in range(4):
        model(torch.ones(2)).sum().backward()
    _steps(ring, 1, 2, 3)


def test_evaluations_and_saves_are_spans_of_their_own(ring: Path, tmp_path: Path) -> None:
    """No forward pass in them counts."""
    model, optimizer = _model()
    _step(model, optimizer)
    with progress.phase(progress.EVALUATION):
        model(torch.ones(2))
        with progress.phase(progress.SAVE):  # a part of it
            time.sleep(STRETCH_S)
    checkpoint = ddp.Checkpoint(tmp_path / "checkpoints", in_background=False)
    checkpoint.save(1, model=model)
    checkpoint.load(model=model)
    _step(model, optimizer)
    spans = [(timeline.SPANS[int(kind)], ended - began) for kind, began, ended in _read(ring, SPAN)]
    assert [kind for kind, _ in spans] == ["evaluation", "save", "load"]
    assert spans[0][1] >= 2 * STRETCH_S
    assert _steps(ring, 1, 2)[1]["other"] >= spans[0][1]


def test_a_forked_process_records_nothing(ring: Path) -> None:
    model, optimizer = _model()
    _step(model, optimizer)
    before = len(_read(ring, STEP))
    pid = os.fork()
    if pid == 0:
        try:
            _step(model, optimizer)
            _step(model, optimizer)
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(_read(ring, STEP)) == before
    _step(model, optimizer)
    _steps(ring, 1, 2)


def test_only_the_newest_records_are_kept(ring: Path) -> None:
    ring.write_bytes(bytes(HEADER + 4 * RECORD))
    timeline.counted()
    assert timeline._recorder is not None
    for step in range(10):
        timeline._recorder._put(STEP, float(step), 1.0 + step, *[0.0] * 6)
    assert [step for step, *_ in _read(ring, STEP)] == [6, 7, 8, 9]
    assert struct.unpack_from("<QQ", ring.read_bytes())[1] == 10


@pytest.mark.parametrize("content", [None, b"", bytes(40), struct.pack("<QQ", 1, 0) + bytes(RECORD)])
def test_a_file_that_cannot_be_used_is_no_error(ring: Path, content: bytes | None) -> None:
    if content is None:
        ring.unlink()
    else:
        ring.write_bytes(content)
    model, optimizer = _model()
    _step(model, optimizer)
    assert timeline._recorder is None
    assert content is None or ring.read_bytes() == content


def test_steps_without_a_forward_that_is_seen_are_known(ring: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(4):
        progress.count_step()  # as strategies do within their step
        parameter.grad = torch.ones(1)
        optimizer.step()
    _steps(ring, 2, 3, 4)
