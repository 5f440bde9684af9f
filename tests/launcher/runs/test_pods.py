"""Runs in stand-ins for pods of Kubernetes, where each pod's command is `dtrain run`. Not tried on a cluster."""

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from testbed.pods import NO_PASSWD, READ_ONLY, Pod, Pods
from testbed.processes import LEASE, wait_until
from testbed.terminal import dtrain_on_terminal
from testbed.training_seen import TrainingSeen

from launcher.machine import oom

TOKEN = {"DTRAIN_TOKEN": "one-token-of-all-pods-of-this-job"}
MASTER = "job-0.job"
ELASTIC = Path(__file__).parents[2] / "programs" / "elastic.py"
DTRAIN = (sys.executable, "-m", "launcher", "run")
# Goes on where the newest of its files ends.
RESUMES = """
import os, time
from pathlib import Path
rank, world = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
saved = Path(f"saved-{rank}")
step = int(saved.read_text()) if saved.exists() else 0
print("begins at", step, "of", world, flush=True)
while step < 4000 and not Path("end").exists():
    step += 1
    saved.with_suffix(".new").write_text(str(step))
    saved.with_suffix(".new").replace(saved)
    time.sleep(0.05)
print("done", world, flush=True)
"""


@contextlib.contextmanager
def _indexed(
    pods: Pods, index: int, *words: str, cwd: Path, nnodes: str = "2", special: str = "", group: Path | None = None,
    **env: str,
) -> Iterator[Pod]:  # fmt: skip
    """Start a pod of an Indexed Job, which has the name of its index whenever it starts."""
    command = [*DTRAIN, "--nnodes", nnodes, "--master-addr", MASTER, "--nproc-per-node", "1", *words]
    variables = {**TOKEN, "JOB_COMPLETION_INDEX": str(index), **env}
    with pods.pod(f"job-{index}", *command, cwd=cwd, env=variables, special=special, group=group) as pod:
        yield pod


@contextlib.contextmanager
def _both(pods: Pods, *argv: str, cwd: Path, nnodes: str = "2") -> Iterator[tuple[Pod, Pod]]:
    """Start both pods of a Job."""
    with _indexed(pods, 0, *argv, cwd=cwd, nnodes=nnodes) as first:
        pods.publish(MASTER, first.address)
        with _indexed(pods, 1, *argv, cwd=cwd, nnodes=nnodes) as second:
            yield first, second


def _end_well(*pods: Pod) -> list[str]:
    """Wait until pods have ended with 0; return what each wrote: to stdout, then to stderr."""
    ends = [pod.end() for pod in pods]
    assert [code for code, _, _ in ends] == [0] * len(pods), ends
    return [*(out for _, out, _ in ends), *(err for _, _, err in ends)]


def test_the_name_of_the_first_pod_may_come_late(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    with _indexed(pods, 0, "show.py", cwd=tmp_path) as first, _indexed(pods, 1, "show.py", cwd=tmp_path) as second:
        time.sleep(5)  # as a Service takes some seconds: both must wait meanwhile
        assert first.program.poll() is None
        assert second.program.poll() is None
        pods.publish(MASTER, first.address)
        out, *_ = _end_well(first, second)
    assert sorted(re.findall("rank . of .", out)) == ["rank 0 of 2", "rank 1 of 2"]
    last = "all 2 workers finished successfully after"
    assert first.termination_message.startswith(last)
    assert second.termination_message.startswith(last)


def test_pods_of_a_pytorchjob_whose_first_is_localhost(pods: Pods, tmp_path: Path) -> None:
    """As older operators have it; the other pods get the first one's name. By dtrain-torchrun."""
    (tmp_path / "show.py").write_text("import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    torchrun = (sys.executable, "-c", "from launcher.__main__ import torchrun; torchrun()", "show.py")
    names, masters = ("job-master-0", "job-worker-0"), ("localhost", "job-master-0")
    with contextlib.ExitStack() as stack:
        running = []
        for rank, (name, master) in enumerate(zip(names, masters, strict=True)):
            env = {**TOKEN, "MASTER_ADDR": master, "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": str(rank)}
            running.append(stack.enter_context(pods.pod(name, *torchrun, cwd=tmp_path, env=env)))
        pods.publish("job-master-0", running[0].address)
        out, *_ = _end_well(*running)
    assert sorted(re.findall("rank . of .", out)) == ["rank 0 of 2", "rank 1 of 2"]


def _up(pod: Pod, text: bytes, times: int = 1) -> None:
    """Read until so many lines have had this text."""
    for _ in range(times):
        while text not in (line := pod.program.stdout.readline()):
            assert line, pod.end()


def test_an_elastic_run_goes_on_with_a_pod_that_replaces_another(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(RESUMES)
    argv = [*LEASE, "--max-restarts", "3", "--grow", "work.py"]
    with _indexed(pods, 0, *argv, cwd=tmp_path, nnodes="1:2") as first:
        pods.publish(MASTER, first.address)
        with _indexed(pods, 1, *argv, cwd=tmp_path, nnodes="1:2") as second:
            _up(first, b"of 2", times=2)
            second.init.kill()
            _up(first, b"of 1")
        with _indexed(pods, 1, *argv, cwd=tmp_path, nnodes="1:2") as replaced:
            assert replaced.address != second.address
            _up(first, b"of 2")
            (tmp_path / "end").touch()
            out, *_ = _end_well(first, replaced)
    assert out.count("done 2") == 2


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_of_all_pods_waits_for_a_replacement(pods: Pods, tmp_path: Path, how: signal.Signals) -> None:
    """As the manifests have it: with --max-restarts, and not elastic."""
    (tmp_path / "work.py").write_text(RESUMES)
    argv = [*LEASE, "--max-restarts", "3", "work.py"]
    with _indexed(pods, 0, *argv, cwd=tmp_path) as first:
        pods.publish(MASTER, first.address)
        with _indexed(pods, 1, *argv, cwd=tmp_path) as second:
            _up(first, b"begins at 0", times=2)
            wait_until(lambda: (tmp_path / "saved-1").exists(), "a checkpoint")
            second.init.send_signal(how)
            assert second.program.wait(60) == (143 if how is signal.SIGTERM else 1), "1: unshare's"
        time.sleep(3)  # until the next pod is there
        with _indexed(pods, 1, *argv, cwd=tmp_path) as replaced:
            _up(first, b"begins", times=2)
            (tmp_path / "end").touch()
            out, *_ = _end_well(first, replaced)
    assert out.count("done 2") == 2


def test_resilient_workers_go_on_with_a_replacement(pods: Pods, tmp_path: Path) -> None:
    argv = [*LEASE, str(ELASTIC), "2", "0.2"]
    with _indexed(pods, 0, *argv, cwd=tmp_path, nnodes="1:2") as first:
        pods.publish(MASTER, first.address)
        seen = TrainingSeen(first.program)
        with _indexed(pods, 1, *argv, cwd=tmp_path, nnodes="1:2") as second:
            seen.wait(lambda: len(seen.sized(2)) > 10)
            lost = time.monotonic()
            second.init.kill()
            seen.wait(lambda: len(seen.sized(1)) > 5)
        with _indexed(pods, 1, *argv, cwd=tmp_path, nnodes="1:2"):
            seen.wait(lambda: len(seen.sized(2, after=lost + 3)) > 10)
            (tmp_path / "quick").touch()
            stderr = seen.end_well()
    assert "attempt 1" not in stderr, stderr
    assert len({at.pid for at in seen.commits if at.host == "node0"}) == 1, "its process went on"


def test_the_others_join_a_first_pod_that_replaces_another(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(RESUMES)
    argv = [*LEASE, "work.py"]
    with _indexed(pods, 0, *argv, cwd=tmp_path) as first:
        pods.publish(MASTER, first.address)
        with _indexed(pods, 1, *argv, cwd=tmp_path) as second:
            _up(first, b"begins", times=2)
            wait_until(lambda: all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1)), "checkpoints")
            first.init.kill()
            first.program.wait(60)
            with _indexed(pods, 0, *argv, cwd=tmp_path) as replaced:
                time.sleep(1)  # its name still means the old address
                pods.publish(MASTER, replaced.address)
                _up(replaced, b"begins")
                (tmp_path / "end").touch()
                out, _, _, err1 = _end_well(replaced, second)
    assert "joined job-0 as node rank 1 again" in err1
    assert "begins at 0" not in out


@contextlib.contextmanager
def _sigterm_to_both(pods: Pods, grace_s: str, folder: Path) -> Iterator[tuple[Pod, Pod]]:
    """Start both pods of train.py, and send SIGTERM to each process 1 when both workers have printed "up"."""
    with _both(pods, "--grace-s", grace_s, "train.py", cwd=folder) as (first, second):
        _up(first, b"up", times=2)
        for pod in (first, second):
            pod.init.send_signal(signal.SIGTERM)
        yield first, second


def test_checkpoints_are_saved_when_all_pods_end(pods: Pods, tmp_path: Path) -> None:
    """Kubernetes sends SIGTERM to each process 1, and SIGKILL after terminationGracePeriodSeconds."""
    (tmp_path / "train.py").write_text(
        "import os, signal, sys, time\n"
        "def save(*_):\n    time.sleep(2)\n    open('checkpoint' + os.environ['RANK'], 'w').write('whole')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('up', flush=True)\ntime.sleep(60)"
    )
    with _sigterm_to_both(pods, "25", tmp_path) as (first, second):
        (code, _, err), (code1, _, err1) = first.end(), second.end()
    assert (code, code1) == (143, 143), (err, err1)
    assert [(tmp_path / f"checkpoint{rank}").read_text() for rank in (0, 1)] == ["whole", "whole"], (err, err1)
    assert first.termination_message.startswith("stopped by SIGTERM after")


def test_pods_killed_after_sigterm_resume_what_they_saved(pods: Pods, tmp_path: Path) -> None:
    """Of workers that do not end by themselves, when the pod's grace period ends before --grace-s."""
    (tmp_path / "train.py").write_text(
        "import os, signal, time\nfrom pathlib import Path\n"
        "saved = Path('saved-' + os.environ['RANK'])\n"
        "if saved.exists():\n    print('begins at', saved.read_text())\n    raise SystemExit\n"
        "def save(*_):\n    time.sleep(1)\n    saved.with_suffix('.new').write_text('7')\n"
        "    saved.with_suffix('.new').replace(saved)\n    time.sleep(600)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('up', flush=True)\ntime.sleep(600)"
    )
    with _sigterm_to_both(pods, "600", tmp_path) as (first, second):
        wait_until(lambda: all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1)), "checkpoints")
        assert (first.program.poll(), second.program.poll()) == (None, None), "they have not ended"
        for pod in (first, second):
            pod.init.kill()
            pod.init.wait(60)
            shutil.rmtree(pod.folder / "tmp")  # the files of a pod end with it
    with _both(pods, "--grace-s", "600", "train.py", cwd=tmp_path) as (first, second):
        out, *_ = _end_well(first, second)
    assert out.count("begins at 7") == 2, out


def test_process_1_reaps_orphans_and_leaves_nothing(pods: Pods, tmp_path: Path) -> None:
    """Those of its workers, and those that `kubectl exec` leaves, whose parent it becomes."""
    (tmp_path / "orphans.py").write_text(
        "import os, subprocess, time\n"
        "subprocess.run(['sh', '-c', '(setsid sleep 60 &) ; (sleep 0.1 &)'])\nprint('up', flush=True)\n"
        "while not os.path.exists('end'): time.sleep(0.05)"
    )
    with pods.pod("job", *DTRAIN, "orphans.py", cwd=tmp_path) as pod:
        _up(pod, b"up")
        before = {*pod.init.children()}
        script = "for i in 1 2 3 4 5; do (sleep 5 &) ; done"
        exec_ = ["nsenter", f"--target={pod.init.pid}", "--pid", "--mount", "--", "sh", "-c", script]
        assert psutil.Popen(exec_).wait(60) == 0
        orphans = {*pod.init.children()} - before
        assert orphans, "it is their parent now"
        wait_until(lambda: not any(map(psutil.Process.is_running, orphans)), "process 1 has reaped them")
        (tmp_path / "end").touch()
        code, _, err = pod.end()
    assert code == 0, err
    assert "removed" not in err
    assert "0 processes left" in err


@pytest.mark.usefixtures("pods")  # where there are none, no container can be made either
def test_ctrl_c_on_the_terminal_of_a_container_counts_once(tmp_path: Path) -> None:
    """As for `kubectl run -it`: process 1 and its child both get SIGINT of the terminal, and the second one kills."""
    (tmp_path / "train.py").write_text(
        "import time\ntry:\n    print('up', flush=True)\n    time.sleep(60)\n"
        "finally:\n    time.sleep(1)\n    print('saved')"
    )
    unshare = "import os, sys; os.execvp('unshare', ['unshare', '--pid', '--fork', '--mount-proc', *sys.argv[1:]])"
    with dtrain_on_terminal(*DTRAIN, "train.py", cwd=tmp_path, program=("-c", unshare)) as terminal:
        terminal.read_until("up")
        terminal.type("\x03")
        assert terminal.wait() == 130, terminal.shown
    assert "saved" in terminal.shown


def test_a_read_only_root_and_a_user_without_a_name_or_home(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nprint('HOME', os.environ['HOME'], flush=True)")
    env = {**TOKEN, "HOME": "/", "JOB_COMPLETION_INDEX": "0"}
    with pods.pod("job", *DTRAIN, "train.py", cwd=tmp_path, env=env, special=NO_PASSWD + READ_ONLY) as pod:
        code, out, err = pod.end()
    assert (code, "HOME /" in out) == (0, True), err
    assert "Read-only file system" in err, "it says that no output is kept"
    assert "finished successfully" in pod.termination_message


def test_training_fits_into_the_shared_memory_of_a_pod(pods: Pods, tmp_path: Path) -> None:
    """64 MB in /dev/shm: buckets of two ranks that need more than that take another way, or fit."""
    (tmp_path / "train.py").write_text(
        "import ddp, torch\nworld = ddp.init()\n"
        "model = ddp.DistributedDataParallel(torch.nn.Linear(4096, 8192, bias=False))\n"
        "for step in range(2):\n    model(torch.ones(1, 4096)).sum().backward()\n"
        "print('trained', float(model.module.weight.grad[0, 0]), flush=True)"
    )
    with pods.pod("job", *DTRAIN, "--nproc-per-node", "2", "train.py", cwd=tmp_path) as pod:
        code, out, err = pod.end()
    assert code == 0, err
    assert out.count("trained 2.0") == 2, out


def test_an_oom_kill_under_the_limit_of_a_pod_is_named(pods: Pods, tmp_path: Path, memory_limit: Path) -> None:
    (tmp_path / "eat.py").write_text("eaten = []\nwhile True: eaten.append(bytearray(1 << 20))")
    with pods.pod("job", *DTRAIN, "eat.py", cwd=tmp_path, group=memory_limit) as pod:
        code, _, err = pod.end()
    assert code == 137, err
    assert "killed by SIGKILL (the out-of-memory killer" in pod.termination_message, err


def test_the_exit_code_is_that_of_the_first_failure_in_all_pods(pods: Pods, tmp_path: Path) -> None:
    """For podFailurePolicy, which decides by it."""
    (tmp_path / "fail.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': raise SystemExit(42)\ntime.sleep(60)"
    )
    with _both(pods, "fail.py", cwd=tmp_path) as (first, second):
        ends = [first.end(), second.end()]
    assert [code for code, _, _ in ends] == [42, 42], ends
    assert all(re.match(r"rank 1 on node1 .* exited with code 42", p.termination_message) for p in (first, second))


def test_a_pod_that_never_comes_is_in_the_termination_message(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with _indexed(pods, 0, "--start-timeout-s", "5", "train.py", cwd=tmp_path) as pod:
        code, _, err = pod.end()
    assert code == 1, err
    assert "node1: no node joined as node rank 1 at" in pod.termination_message


def test_an_exception_is_the_termination_message(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('bad batch')")
    with pods.pod("job", *DTRAIN, "train.py", cwd=tmp_path) as pod:
        code, _, err = pod.end()
    assert code == 1, err
    assert re.fullmatch(r"rank 0 on job .* raised an exception .*: ValueError: bad batch", pod.termination_message)


def test_what_contradicts_is_the_termination_message(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with _indexed(pods, 0, "--node-rank", "1", "train.py", cwd=tmp_path) as pod:
        code, _, err = pod.end()
    assert code == 2, err
    assert "--node-rank is 1, but JOB_COMPLETION_INDEX is 0 in this pod" in pod.termination_message


@pytest.fixture
def memory_limit() -> Iterator[Path]:
    """A memory control group of 400 MB, of either version; skips where none can be made."""
    own = oom._own_group()
    if own is None:
        pytest.skip("no memory cgroup can be seen here")
    folder = Path(own.mount, f"dtrain-test-pod-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / ("memory.max" if own.counts_below else "memory.limit_in_bytes")).write_text(str(400 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield folder
    wait_until(lambda: not (folder / "cgroup.procs").read_text(), "the group is empty")
    folder.rmdir()
