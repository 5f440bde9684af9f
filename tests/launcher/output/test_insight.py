"""What is said of a run's time fits a line and names what matters."""

from dataclasses import replace

from launcher.output.insight import goodput_line, status_line, straggler_line
from launcher.timeline.goodput import Parts
from launcher.timeline.stragglers import Crowded, Straggler

PARTS = Parts(
    start=5.0, training=80.0, waiting=3.0, checkpoints=2.0, failures=9.0, rest=1.0, repeated=4.0, is_measured=True
)
SLOW = Straggler(host="sim1", ranks=(3,), what="data", times=2.04, attempt=0, from_step=120, after_s=9.0)


def test_goodput_is_one_line_with_the_parts_that_there_are() -> None:
    assert goodput_line(PARTS) == (
        "goodput 80 % of 100.0 s: start 5.0 s, training 80.0 s, waiting for stragglers 3.0 s, checkpoints 2.0 s, "
        "failures (with 4.0 s of steps made twice) 9.0 s, rest 1.0 s"
    )
    quiet = Parts(
        start=5.0, training=15.0, waiting=0.01, checkpoints=0, failures=0, rest=0, repeated=0, is_measured=True
    )
    assert goodput_line(quiet) == "goodput 75 % of 20.0 s: start 5.0 s, training 15.0 s"
    unknown = Parts(
        start=5.0, training=0, waiting=0, checkpoints=0, failures=2, rest=93.0, repeated=0, is_measured=False
    )
    assert goodput_line(unknown) == "100.0 s: start 5.0 s, failures 2.0 s, running 93.0 s"


def test_a_straggler_is_one_line() -> None:
    assert straggler_line(SLOW) == "rank 3 on sim1 is slow since step 120 (data): 2 times the others' work"
    host = replace(SLOW, ranks=(4, 5, 6, 7), what="compute", times=1.37)
    assert straggler_line(host) == (
        "host sim1 (ranks 4-7) is slow since step 120 (compute): 1.4 times the others' work"
    )
    over = replace(host, to_step=300, for_s=12.3)
    assert straggler_line(over) == "host sim1 (ranks 4-7) is no longer slow, since step 300, after 12 s"
    network = replace(SLOW, host="", ranks=(), what="network")
    assert straggler_line(network) == (
        "the network is slow since step 120: all ranks wait, none works longer; a step takes 2 times as long"
    )


def test_a_host_whose_processors_are_shared_is_one_line() -> None:
    assert straggler_line(Crowded("vm", 0.337)) == (
        "the processors of vm have more threads to run than there are: a rank waited for one for 34 % of the time, so "
        "no slow rank is named"
    )


def test_the_status_line_names_the_more_important_first() -> None:
    known = {"step": 1200, "per_s": 12.345, "memory": (12 << 30, 62 << 30), "gpu_percent": 87.4, "workers": 4}
    text = status_line(slowest=(3, "node2", 1.42, "data"), **known)  # type: ignore[arg-type]
    assert text == "step 1200, 12.3 step/s, slowest rank 3 on node2 (1.4x, data), memory 12 GB of 62 GB, GPU 87 %"
    nobody = status_line(slowest=None, **{**known, "gpu_percent": None})  # type: ignore[arg-type]
    assert nobody == "step 1200, 12.3 step/s, memory 12 GB of 62 GB"
    early = {"step": 0, "per_s": None, "slowest": None, "gpu_percent": None, "workers": 1}
    assert status_line(memory=(1 << 30, 4 << 30), **early) == "1 worker, memory 1.0 GB of 4.0 GB"  # type: ignore[arg-type]
    assert status_line(memory=None, **early) == ""  # type: ignore[arg-type]
