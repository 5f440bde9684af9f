"""What goes wrong with a GPU during a run stands beside the failure: by what NVML counts before and after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from testbed.nvml import build_nvml
from testbed.processes import run_dtrain

# Card 0 has had an error before; card 1 has two from the moment that there is a file `broken`, and is too hot.
COUNTING_NVML = """\
#include <unistd.h>
struct memory { unsigned long long total, free, used; };
static int broken(struct device *d) { return d->card == 1 && access(setting("FAKE_BROKEN"), F_OK) == 0; }
int nvmlDeviceGetMemoryInfo(struct device *d, struct memory *m) { m->total = 2; m->used = 1; m->free = 1; return OK; }
int nvmlDeviceGetTotalEccErrors(struct device *d, int type, int counter, unsigned long long *count) {
  *count = d->card == 0 ? 1 : broken(d) ? 2 : 0; return OK;
}
int nvmlDeviceGetRemappedRows(struct device *d, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed) {
  *c = 3; *u = broken(d) ? 1 : 0; *pending = *failed = 0; return OK;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *d, unsigned long long *reasons) {
  *reasons = broken(d) ? 0x40 | 0x4 : 0x4; return OK;
}
"""
# Fails at once, so that no regular measurement comes in between, but only once there has been a first one.
SCRIPT = """\
import os, pathlib, time
time.sleep(8)
if os.environ["RANK"] == "1":
    pathlib.Path("broken").touch()
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
time.sleep(600)
"""


@pytest.mark.parametrize("workers", [2, 1], ids=["others-run", "none-runs"])
def test_what_the_driver_has_counted_is_in_the_report(workers: int, own_runs: Path) -> None:
    build_nvml(own_runs, COUNTING_NVML)
    Path("script.py").write_text(SCRIPT.replace('"1"', f'"{workers - 1}"'))
    visible = "0,1" if workers == 2 else "1"
    env = {"LD_LIBRARY_PATH": str(own_runs), "FAKE_GPUS": "2", "FAKE_BROKEN": str(own_runs / "broken")}
    result = run_dtrain(
        *("run", "--error-json", "e.json", "--nproc-per-node", str(workers), "script.py"),
        env={**env, "CUDA_VISIBLE_DEVICES": visible},
    )
    facts = json.loads(Path("e.json").read_text())
    (line,) = facts["devices"]
    counted = "2 memory errors that could not be corrected, 1 rows of memory replaced, slowed down by heat"
    assert line == f"{facts['cause']['host']}: GPU 1 of rank {workers - 1}: {counted}"
    assert f"dtrain:   GPUs of {line}" in result.stderr
