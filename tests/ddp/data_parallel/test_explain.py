"""`model.explain()`: its figures add up, fit on a screen and into JSON, and one rank may ask alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from testbed.present import present
from testbed.training import assert_same_bits
from testbed.worlds import world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import ddp
from ddp.compression import PowerSGD
from ddp.compression.compressors import named
from ddp.compression.rehearsal import RehearsalGroup, bucket_like
from ddp.data_parallel.planning.link_cost import LinkCost
from ddp.data_parallel.planning.simulate import Bucket, CompressionCost, GradReady, StepRecord
from ddp.data_parallel.planning.step_report import StepReport, exchange_ratio, explain_step
from ddp.data_parallel.planning.step_timer import HostClock, StepTimer
from ddp.errors import DdpError, UnsupportedError

MB = 1_000_000
SLOW, FAST = LinkCost(2, 1e-3, 1e-7), LinkCost(2, 1e-5, 1e-11)
INT8 = CompressionCost("int8", 0.25, 2e-10)


def explained(cost: LinkCost, sizes_mb: tuple[float, ...] = (1, 1, 1, 1), **given: Any) -> StepReport:
    """A backward pass of 80 ms whose gradients are ready one after the other."""
    nbytes = [int(size * MB) for size in sizes_mb]
    ready = [0.08 * at / len(nbytes) for at in range(1, len(nbytes) + 1)]
    gradients = [GradReady(i, n, t) for i, (n, t) in enumerate(zip(nbytes, ready, strict=True))]
    arguments: dict[str, Any] = {
        "backend": "gloo",
        "step_times_s": [0.5, 0.6, 0.7],
        "compute_times_s": [0.1, 0.11, 0.12],
        "plans": {"one bucket": [Bucket(tuple(range(len(nbytes))), sum(nbytes))]},
        "compression": None,
        "compressed_buckets": [Bucket((i,), n) for i, n in enumerate(nbytes)],
        "compressions": [INT8],
    }
    return explain_step(
        StepRecord(tuple(gradients), forward_s=0.04, backward_s=0.08, other_s=0.01),
        cost,
        [Bucket((i,), n) for i, n in enumerate(nbytes)],
        **{**arguments, **given},
    )


def test_what_was_exposed_is_explained_to_the_last_second() -> None:
    report = explained(SLOW)
    causes = report.exposed
    assert causes.latency_s + causes.last_s + causes.queued_s == pytest.approx(report.step.exposed_s)
    assert causes.last_s == pytest.approx(0.1)  # 1 MB
    assert causes.queued_s == pytest.approx(0.24)  # of 300 ms for three, 60 ms passed beside backward
    assert causes.latency_s == pytest.approx(0.004)
    assert report.step.total_s == pytest.approx(0.13 + 0.344)


def test_a_fast_link_exposes_only_the_last_bucket() -> None:
    report = explained(LinkCost(2, 0.0, 1e-9))
    assert (report.exposed.last_s, report.exposed.queued_s) == pytest.approx((0.001, 0.0))


def test_the_measured_step_is_a_median() -> None:
    report = explained(SLOW)
    assert (report.measured_step_s, report.measured_steps) == (0.6, 3)
    assert report.behind_slowest_s == pytest.approx(0.13 - 0.11)


def test_compression_and_local_sgd_pay_on_slow_links() -> None:
    slow, fast = (
        {way.title: way for way in explained(cost, compressions=[CompressionCost("int8", 0.25, 2e-8)]).ways}
        for cost in (SLOW, FAST)
    )
    assert slow["int8"].gain > 0.4
    assert fast["int8"].gain < 0
    assert slow["LocalSGD, every=8"].step_s == pytest.approx(0.13 + (1e-3 + 0.4) / 8)
    assert 0 <= fast["LocalSGD, every=8"].gain < 0.01


def test_a_compressed_step_names_the_way_without_compression() -> None:
    report = explained(SLOW, compression=INT8)
    assert [way.title for way in report.ways] == ["no compression", "LocalSGD, every=8"]
    assert report.ways[0].gain < 0
    assert [way.pays for way in report.ways] == [False, report.ways[1].gain >= 0.1]
    assert "gloo, int8" in str(report)


def test_one_bucket_costs_what_cannot_overlap() -> None:
    (one,) = explained(SLOW).plans
    assert one.step_s == pytest.approx(0.13 + 0.401)
    assert one.gain < 0


@pytest.mark.parametrize("cost", [SLOW, FAST, LinkCost(512, 0.02, 3e-6, 1.5), LinkCost(2, 0.0, 0.0)])
@pytest.mark.parametrize("compression", [None, INT8])
def test_every_line_fits_the_screen(cost: LinkCost, compression: CompressionCost | None) -> None:
    plans = {title: [Bucket((0, 1, 2, 3), 400 * MB)] for title in ("one bucket", "torch's, 25 MiB", "quickest")}
    methods = [CompressionCost(name, 0.5, 2e-9) for name in ("bf16", "int8", "powersgd")]
    sizes = (0.001, 50, 50, 250, 0.1)
    report = explained(cost, sizes, compression=compression, compressions=methods, plans=plans)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80, report
    assert len(lines) <= 24, report
    json.dumps(report.as_dict(), allow_nan=False)


def test_what_the_model_does_not_explain_is_said() -> None:
    report = explained(SLOW)
    missing_ms = 1e3 * (report.measured_step_s - report.step.total_s)
    (line,) = [line for line in str(report).splitlines() if "unexplained" in line]
    assert f"{missing_ms:.1f} ms" in line
    assert "unexplained" not in str(explained(SLOW, step_times_s=[0.1]))


def test_steps_are_timed_and_pauses_are_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    clock = HostClock()
    monkeypatch.setattr(clock, "now", lambda: now)
    timer = StepTimer(clock)
    assert timer.recent_s() == ([], [])
    for end, wire_s in ((0.0, 0.0), (1.0, 0.25), (2.0, 0.25), (3.5, 0.5), (13.5, 0.5), (14.5, 0.5)):
        now = end - wire_s
        timer.mark("backward ended")
        now = end
        timer.mark("arrived")
        timer.end_step({})
    assert timer.recent_s() == ([1.0, 1.0, 1.5, 1.0], [0.75, 0.75, 1.0, 0.5])


@pytest.mark.parametrize(("name", "ratio"), [("bf16", 0.5), ("fp16", 0.5), ("int8", 0.252), ("powersgd", 0.0157)])
def test_a_rehearsal_counts_the_bytes_that_would_leave(name: str, ratio: float) -> None:
    class OneGradient:
        flat = torch.randn(128 * 128, generator=torch.Generator().manual_seed(0))
        index, is_last = staticmethod(lambda: 0), staticmethod(lambda: True)
        buffer = staticmethod(lambda: OneGradient.flat)
        gradients = parameters = staticmethod(lambda: [OneGradient.flat.view(128, 128)])

    method = PowerSGD() if name == "powersgd" else named(name)
    group, before = RehearsalGroup(4), OneGradient.flat.clone()
    compressor = method.compressor(group, None)
    compressor.rehearse(OneGradient())
    assert group.sent_bytes == pytest.approx(ratio * OneGradient.flat.nbytes, rel=0.02)
    assert not torch.equal(OneGradient.flat, before)  # it was compressed
    compressor.close()


def test_rows_cost_more_where_ranks_share_a_network() -> None:
    assert exchange_ratio("gloo", 8, 8) == 1
    assert exchange_ratio("gloo", 4, 1) == 1
    assert exchange_ratio("gloo", 8, 4) == pytest.approx(16 / 7)
    assert exchange_ratio("shm", 8, 4) == 4


def test_made_up_gradients_fit_the_bytes() -> None:
    before = torch.get_rng_state()
    parameters = [torch.zeros(3), torch.zeros(50257, 64), torch.zeros(40, 5), torch.zeros(0), torch.zeros(())]
    bucket = bucket_like(parameters, 10_000)
    assert [tuple(each.shape) for each in bucket.gradients()] == [(39, 64), (3,), (1,)]
    assert bucket.buffer().nbytes <= 10_000
    assert [tuple(each.shape) for each in bucket_like(parameters, 8).gradients()] == [(1, 64)]
    pairs = bucket_like([torch.zeros(4, 4, dtype=torch.complex64)], 1000)
    assert (pairs.buffer().dtype, pairs.buffer().numel()) == (torch.float32, 32)
    assert torch.equal(torch.get_rng_state(), before)


@world(1)
def test_a_world_of_one_has_nothing_to_explain() -> None:
    with pytest.raises(UnsupportedError, match="world of one"):
        ddp.DistributedDataParallel(nn.Linear(8, 8)).explain()


@world(2)
def test_what_is_lacking_is_said_to_the_rank_that_asks() -> None:
    """Each of these is an error at once, on the rank that asks, and the others train on."""
    rank = dist.get_rank()

    def refused(model: ddp.DistributedDataParallel, kind: type[Exception], match: str) -> None:
        if rank == 0:
            with pytest.raises(kind, match=match):
                model.explain()

    def trained(steps: int, model: ddp.DistributedDataParallel) -> ddp.DistributedDataParallel:
        for _ in range(steps):
            model(torch.randn(3, 8)).sum().backward()
        return model

    model = ddp.DistributedDataParallel(nn.Linear(8, 8))
    for _ in range(8):
        refused(model, DdpError, "after more steps")
        trained(1, model)
    trained(2, model)
    refused(trained(10, ddp.DistributedDataParallel(nn.Linear(8, 8), measure=False)), UnsupportedError, "measure=True")
    refused(trained(10, ddp.DistributedDataParallel(nn.Linear(8, 8), bucket_cap_mb=1)), UnsupportedError, "bucket_cap")
    hooked = ddp.DistributedDataParallel(nn.Linear(8, 8))
    hooked.register_comm_hook(None, allreduce_hook)
    refused(trained(10, hooked), UnsupportedError, "hook of your own")


METHODS: dict[str, Any] = {"none": None, "bf16": "bf16", "int8": "int8", "powersgd": PowerSGD(start_step=2)}


@pytest.mark.parametrize("method", METHODS)
@world(2)
def test_one_rank_asks_alone_and_gets_a_screen_and_json(method: str) -> None:
    """Neither its random numbers nor the others' steps notice."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 4))
    model = ddp.DistributedDataParallel(net, compression=METHODS[method])
    for step in range(12):
        model.zero_grad()
        model(torch.randn(4, 64)).sum().backward()
        if step != 10 or dist.get_rank():
            continue
        before = torch.get_rng_state()
        report = model.explain()
        assert torch.equal(torch.get_rng_state(), before)
        lines, found = str(report).splitlines(), report.as_dict()
        assert max(map(len, lines)) <= 80, report
        assert len(lines) <= 24, report
        json.dumps(found, allow_nan=False)
        assert found["compression"] == method
        assert found["step_s"] == pytest.approx(found["compute_s"] + found["delayed_s"] + found["exposed_s"])
        assert sum(found["exposed_by"].values()) == pytest.approx(found["exposed_s"])
        titles = {way["title"] for way in found["other_ways"]}
        assert titles >= {"LocalSGD, every=8"} | ({"bf16", "int8", "powersgd"} - {method})
    assert_same_bits([present(parameter.grad) for parameter in model.parameters()])
