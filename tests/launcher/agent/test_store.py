"""The rendezvous store and the environment: unmodified scripts of torch meet each other."""

import contextlib
import re
import shlex
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest
from testbed.ports import free_port
from testbed.processes import run_dtrain, started_dtrain, wait_until
from testbed.warm import HEADER

ALL_REDUCE = """\
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
print("sum", total.item(), "port", os.environ["MASTER_PORT"], flush=True)
dist.destroy_process_group()
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def listening_at(port: int) -> list[str]:
    """Return the addresses at which something listens."""
    found = psutil.net_connections("tcp")
    return [c.laddr.ip for c in found if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN]


def stores(pid: int) -> list[psutil.Process]:
    """Return the store processes of a run."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if "launcher.agent.store_process" in process.cmdline():
                found.append(process)
    return found


def test_unmodified_script_meets_its_peers(tmp_path: Path) -> None:
    script = write(tmp_path, ALL_REDUCE)
    result = run_dtrain("run", "--nproc-per-node", "2", script, cwd=tmp_path)
    assert result.stdout.count("sum 3.0") == 2, result.stderr
    times = r"(dtrain: [\d.]+ s: start .*\n)?"  # of a run that takes long, on a busy machine
    assert re.fullmatch(times + r"dtrain: all 2 workers finished successfully .*\n", result.stderr)


def test_other_port_is_taken_where_the_default_is_in_use(tmp_path: Path) -> None:
    script = write(tmp_path, "import os\nprint('port', os.environ['MASTER_PORT'])")
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def taken() -> bool:
            try:
                holder.bind(("127.0.0.1", 29500))
            except OSError:  # another test's run has it for a moment
                return False
            return True

        wait_until(taken, "the default port is ours")
        holder.listen()
        result = run_dtrain("run", script, cwd=tmp_path)
    assert result.returncode == 0
    assert re.search(r"port \d+", result.stdout)
    assert "port 29500" not in result.stdout


def test_store_serves_a_program_that_is_not_python(tmp_path: Path) -> None:
    """No bootstrap wakes the store then: the first connection does."""
    script = write(tmp_path, ALL_REDUCE)
    command = shlex.join(["exec", sys.executable, str(script)])
    result = run_dtrain("run", "--no-python", "sh", "-c", command, cwd=tmp_path)
    assert result.stdout.count("sum 1.0") == 1, result.stderr


def test_script_without_torch_costs_no_store_process(tmp_path: Path) -> None:
    script = write(tmp_path, "import time\nprint('up', flush=True)\ntime.sleep(600)")
    with started_dtrain("run", script, cwd=tmp_path) as process:
        process.stdout.readline()
        assert stores(process.pid) == []
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def test_store_listens_on_one_address_only(tmp_path: Path) -> None:
    script = write(tmp_path, "import os, time\nprint(os.environ['MASTER_PORT'], flush=True)\ntime.sleep(600)")
    port = free_port()  # for other runs may be at the default one now
    with started_dtrain("run", "--master-port", str(port), script, cwd=tmp_path) as process:
        assert int(process.stdout.readline().split()[-1]) == port
        assert listening_at(port) == ["127.0.0.1"]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    wait_until(lambda: not listening_at(port), "it is closed")


@pytest.mark.parametrize(("handling", "says"), [("3", "7 3 "), (None, "7 1 TORCH_NCCL_ASYNC_ERROR_HANDLING")])
def test_what_is_inherited_is_kept_and_what_is_not_is_named(tmp_path: Path, handling: str | None, says: str) -> None:
    names = ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "DTRAIN_DEFAULTS")
    script = write(tmp_path, f"import os\nprint(*(os.environ[name] for name in {names}))")
    env = {"OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": handling}
    assert run_dtrain("run", script, env=env, cwd=tmp_path).stdout.endswith(f"] {says}\n")


@pytest.mark.usefixtures("warm")
def test_torch_knows_that_a_launcher_started_it(tmp_path: Path) -> None:
    script = write(tmp_path, f"{HEADER}print(dist.is_torchelastic_launched())")
    assert run_dtrain("run", script, cwd=tmp_path).stdout.endswith("] True\n")


def test_what_torch_logs_in_the_store_holds_up_no_one(tmp_path: Path) -> None:
    """The process of the store logs each request, more than a pipe holds."""
    script = write(
        tmp_path,
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "store = dist.distributed_c10d._get_default_store()\n"
        "for _ in range(1000):\n    store.set('key', 'value')\n    store.get('key')\n"
        "print('done')\n",
    )
    env = {"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    result = run_dtrain("run", "--nproc-per-node", "2", script, cwd=tmp_path, env=env, timeout=60)
    assert result.stdout.count("done") == 2, result.stderr
