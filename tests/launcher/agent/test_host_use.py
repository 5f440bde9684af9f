"""What an agent says of memory."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from testbed.processes import kill_tree

from launcher.agent.host_use import LOOK_S, HostUseWatch

CHILD = "import time; held = bytearray(64 << 20); print('up', flush=True); time.sleep(600)"
HOLDS = f"import subprocess, sys; held = bytearray(64 << 20); subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_the_memory_of_a_worker_is_that_of_its_children_too() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        worker: Any = SimpleNamespace(rank=3, pid=process.pid, own_pid=process.pid)
        gone: Any = SimpleNamespace(rank=4, pid=2**22 + 1, own_pid=2**22 + 1)
        watch = HostUseWatch(2)
        use = watch.look([worker, gone], {}, 100.0)
        assert use is not None
        assert watch.look([worker], {}, 100.0 + LOOK_S / 2) is None
        assert watch.look([worker], {}, 100.0 + LOOK_S) is not None
        kill_tree(process.pid)
    assert (use.attempt, use.gpus) == (2, {})
    assert 128 << 20 < use.resident_bytes["3"] < 400 << 20
    assert use.resident_bytes["4"] == 0
    assert 0 < use.memory_bytes < use.memory_limit_bytes
