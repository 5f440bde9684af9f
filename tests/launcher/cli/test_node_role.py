"""Nodes started by hand: the same command typed on each, in any order; one run, with all that a run has."""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from testbed.ports import free_port
from testbed.processes import LEASE, Program, run_dtrain, started, started_dtrain, wait_until, wait_up

TOKEN = "correct horse battery staple"
SHOW = (
    "import os, time\n"
    "names = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'CUDA_VISIBLE_DEVICES']\n"
    "print('place', *(os.environ.get(name, '-') for name in names), flush=True)\n"
    "assert 'DTRAIN_TOKEN' not in os.environ and 'DTRAIN_AGENT_SLOTS' not in os.environ\n"
)


@pytest.fixture
def port() -> int:
    return free_port()


def _words(port: int, rank: int, *more: str, nnodes: str = "2", nproc: int = 2) -> list[str]:
    where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return ["run", "--nnodes", nnodes, "--node-rank", str(rank), *where, "--nproc-per-node", str(nproc), *more]


@contextlib.contextmanager
def _nodes(
    tmp_path: Path, port: int, ranks: list[int], *more: str, nnodes: str = "2", nproc: int = 1, **env: str
) -> Iterator[list[Program]]:
    """Start nodes one after the other, each in its own right."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(_started(*_words(port, rank, *more, nnodes=nnodes, nproc=nproc), cwd=tmp_path, env=env))
            for rank in ranks
        ]


def _started(*words: str, cwd: Path, env: dict[str, str]) -> AbstractContextManager[Program]:
    """Start by exec, as users do: what is forked from one process has one hash seed, and nodes have several."""
    return started(sys.executable, "-m", "launcher", *words, cwd=cwd, env=env)


def _ends(process: Program) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_typed_in_any_order_it_is_one_run(tmp_path: Path, port: int, order: list[int]) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    with contextlib.ExitStack() as stack:
        nodes = {}
        for rank in order:
            gpus = ["0,1,2,3", "4,5"][rank]
            nodes[rank] = stack.enter_context(
                _started(
                    *_words(port, rank, "show.py", nproc=[3, 2][rank]),
                    cwd=tmp_path,
                    env={"CUDA_VISIBLE_DEVICES": gpus, "DTRAIN_TOKEN": TOKEN},
                )
            )
            time.sleep(0.3)
        (code0, out, err), (code1, _, joined) = _ends(nodes[0]), _ends(nodes[1])
    assert (code0, code1) == (0, 0), (err, joined)
    places = sorted(line.partition("place ")[2] for line in out.splitlines())
    assert places == [
        "0 5 0 3 0 0,1,2,3",
        "1 5 1 3 0 0,1,2,3",
        "2 5 2 3 0 0,1,2,3",
        "3 5 0 2 1 4,5",
        "4 5 1 2 1 4,5",
    ]
    assert f"node 0 waits for 1 other node at 127.0.0.1:{port}" in err
    assert f"node1 is {socket.gethostname()} (127.0.0.1)" in err, "who it is that failed, if it does"
    assert "all 5 workers finished successfully" in err
    assert "all 5 workers finished successfully" in joined
    assert TOKEN not in out + err + joined


def test_on_one_machine_no_token_is_needed(tmp_path: Path, port: int) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    with _nodes(tmp_path, port, [1, 2, 0], "show.py", nnodes="3", HOME=str(tmp_path)) as nodes:
        assert [_ends(node)[0] for node in nodes] == [0, 0, 0]


def test_a_failure_on_one_node_is_reported_on_all_with_its_code(tmp_path: Path, port: int) -> None:
    (tmp_path / "fail.py").write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)")
    with _nodes(tmp_path, port, [0, 1], "fail.py", DTRAIN_TOKEN=TOKEN) as nodes:
        ends = [_ends(node) for node in nodes]
    assert [end[0] for end in ends] == [7, 7]
    assert all("rank 1 on node1" in end[2] for end in ends), ends
    assert "exited with code 7" in ends[1][2]


def test_restarts_work_as_over_ssh(tmp_path: Path, port: int) -> None:
    (tmp_path / "fail.py").write_text(
        "import os, sys\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('attempt', attempt, flush=True)\n"
        "sys.exit(3 if attempt == '0' and os.environ['RANK'] == '1' else 0)"
    )
    with _nodes(tmp_path, port, [0, 1], "--max-restarts", "2", "fail.py", DTRAIN_TOKEN=TOKEN) as nodes:
        (code0, out, err), (code1, _, _) = map(_ends, nodes)
    assert (code0, code1) == (0, 0), err
    assert out.count("attempt 1") == 2
    assert "1 restart" in err


def test_an_elastic_run_goes_on_without_a_node_that_is_killed(tmp_path: Path, port: int) -> None:
    (tmp_path / "work.py").write_text(
        "import os, time\nprint('up', flush=True)\n"
        "time.sleep(60 if os.environ['WORLD_SIZE'] == '3' else 0.2)\nprint('done', flush=True)"
    )
    with _nodes(tmp_path, port, [0, 1, 2], *LEASE, "work.py", nnodes="2:3", DTRAIN_TOKEN=TOKEN) as nodes:
        wait_up(nodes[0], 3)
        nodes[2].kill()
        (code0, out, err), (code1, _, _) = _ends(nodes[0]), _ends(nodes[1])
    assert (code0, code1) == (0, 0), err
    assert out.count("done") == 2
    assert "attempt 1 begins on 2 hosts, without node2" in err


def test_ctrl_c_on_node_0_ends_all_and_on_another_that_one(tmp_path: Path, port: int) -> None:
    (tmp_path / "wait.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(60)")
    with _nodes(tmp_path, port, [0, 1], "wait.py", DTRAIN_TOKEN=TOKEN) as nodes:
        wait_up(nodes[0], 2)
        nodes[0].send_signal(signal.SIGINT)
        ends = [_ends(node) for node in nodes]
    assert [end[0] for end in ends] == [130, 130], ends
    with _nodes(tmp_path, port, [0, 1], "wait.py", DTRAIN_TOKEN=TOKEN) as nodes:
        wait_up(nodes[0], 2)
        nodes[1].send_signal(signal.SIGTERM)
        ends = [_ends(node) for node in nodes]
    assert [end[0] for end in ends] == [1, 143], ends
    assert "host node1 was lost" in ends[0][2]


def test_each_node_says_for_itself_how_many_workers_it_takes(tmp_path: Path, port: int) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    cores = str(len(os.sched_getaffinity(0)))
    with contextlib.ExitStack() as stack:
        nodes = []
        for rank, count in enumerate(["cpu", "3"]):
            words = [*_words(port, rank, "--nproc-per-node", count, "show.py")]
            nodes.append(stack.enter_context(started_dtrain(*words, cwd=tmp_path, env={"DTRAIN_TOKEN": TOKEN})))
        (code, out, err), _ = map(_ends, nodes)
    assert code == 0, err
    sizes = [line.partition("place ")[2].split()[3:5] for line in out.splitlines()]
    assert [sizes.count([size, node]) for size, node in ((cores, "0"), ("3", "1"))] == [int(cores), 3]
    gpu = run_dtrain(*_words(port, 0, "--nproc-per-node", "gpu", "show.py", nnodes="1"), cwd=tmp_path)
    assert (gpu.returncode, "it has no GPU for a worker" in gpu.stderr) == (1, True), gpu


def test_each_node_has_its_own_folder_and_variables(tmp_path: Path, port: int) -> None:
    with contextlib.ExitStack() as stack:
        nodes = []
        for rank in (0, 1):
            folder = tmp_path / f"home{rank}"
            folder.mkdir()
            (folder / "show.py").write_text(f"import os\nprint('copy', {rank}, os.getcwd(), os.environ['OWN'])")
            words = _words(port, rank, "-x", f"OWN=o{rank}", "show.py", nproc=1)
            nodes.append(stack.enter_context(started_dtrain(*words, cwd=folder, env={"DTRAIN_TOKEN": TOKEN})))
        (code, out, err), (code1, _, _) = map(_ends, nodes)
    assert (code, code1) == (0, 0), err
    shown = sorted(line.partition("copy ")[2] for line in out.splitlines())
    assert shown == [f"{rank} {tmp_path / f'home{rank}'} o{rank}" for rank in (0, 1)]


def test_another_command_or_secret_on_a_node_is_found_and_named(tmp_path: Path, port: int) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    with started_dtrain(*_words(port, 0, "show.py", "--lr", "1"), cwd=tmp_path, env={"DTRAIN_TOKEN": TOKEN}) as lead:
        other = run_dtrain(*_words(port, 1, "show.py", "--lr", "2"), cwd=tmp_path, env={"DTRAIN_TOKEN": TOKEN})
        assert (other.returncode, "show.py --lr 1" in other.stderr, "show.py --lr 2" in other.stderr) == (1, True, True)
        restarts = _words(port, 1, "--max-restarts", "3", "show.py", "--lr", "1")
        option = run_dtrain(*restarts, cwd=tmp_path, env={"DTRAIN_TOKEN": TOKEN})
        assert (option.returncode, "--max-restarts" in option.stderr) == (1, True), option
        secret = run_dtrain(*_words(port, 1, "show.py", "--lr", "1"), cwd=tmp_path, env={"DTRAIN_TOKEN": "x" * 20})
        assert (secret.returncode, "token" in secret.stderr) == (1, True), secret
        good = run_dtrain(*_words(port, 1, "show.py", "--lr", "1"), cwd=tmp_path, env={"DTRAIN_TOKEN": TOKEN})
        assert good.returncode == 0, good
        code, _, err = _ends(lead)
    assert code == 0
    assert "show.py --lr 2" in err, "node 0 says it as well"
    assert TOKEN not in err + other.stderr + secret.stderr


def test_a_node_that_does_not_come_is_named_with_what_to_type(tmp_path: Path, port: int) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    words = _words(port, 0, "--start-timeout-s", "5", "show.py")
    result = run_dtrain(*words, cwd=tmp_path, env={"DTRAIN_TOKEN": TOKEN})
    assert result.returncode == 1
    assert f"node1: no node joined as node rank 1 at 127.0.0.1:{port}" in result.stderr
    assert "type the same command there, with --node-rank 1" in result.stderr
    words = _words(port, 0, "--start-timeout-s", "15", "show.py")
    with started_dtrain(*words, cwd=tmp_path, env={"DTRAIN_TOKEN": TOKEN}) as lead:
        run_dtrain(*_words(port, 1, "show.py", "other"), cwd=tmp_path, env={"DTRAIN_TOKEN": TOKEN})
        code, _, err = _ends(lead)
    assert code == 1
    assert "no node could join as node rank 1" in err, "the report says why"
    assert "show.py other" in err
    alone = run_dtrain(
        *_words(port, 1, "--start-timeout-s", "1.5", "show.py"), cwd=tmp_path, env={"DTRAIN_TOKEN": TOKEN}
    )
    assert alone.returncode == 1
    assert f"127.0.0.1:{port}" in alone.stderr


def test_nodes_of_one_machine_meet_by_its_loopback_name(tmp_path: Path, port: int) -> None:
    """As Debian has it in /etc/hosts: 127.0.1.1, at which node 0 does not listen, since no other machine reaches it."""
    (tmp_path / "show.py").write_text(SHOW)
    program = (
        "import socket, sys; find = socket.getaddrinfo\n"
        "socket.getaddrinfo = lambda name, *a, **k: find('127.0.1.1' if name == 'me.example' else name, *a, **k)\n"
        "from launcher.cli.main import main; main()"
    )
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--start-timeout-s", "30"]
    words += ["--master-addr", "me.example", "--master-port", str(port)]
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(
                started(
                    sys.executable, "-c", program, "run", "--node-rank", rank, *words, "show.py",
                    cwd=tmp_path, env={"DTRAIN_TOKEN": TOKEN},
                )
            )
            for rank in "01"
        ]  # fmt: skip
        ends = [_ends(node) for node in nodes]
    assert [end[0] for end in ends] == [0, 0], ends


def test_torchrun_s_c10d_endpoint_decides_who_is_node_0(tmp_path: Path, port: int) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "show.py"]
    env = {"DTRAIN_TOKEN": TOKEN, "DTRAIN_NPROC_PER_NODE": "1"}
    program = ["-c", "import sys; from launcher.__main__ import torchrun; torchrun()", *words]
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(started(sys.executable, *program, cwd=tmp_path, env=env)) for _ in range(2)]
        ends = [_ends(node) for node in nodes]
    assert [end[0] for end in ends] == [0, 0], ends
    assert "".join(end[1] for end in ends).count("place") == 2


@pytest.mark.parametrize(
    ("rank", "address", "message"),
    [
        ("0", "192.0.2.7", "is not this machine"),
        ("0", "0.0.0.0", "means all interfaces"),
        ("1", "192.0.2.7", "there is no token; nodes started by hand"),
    ],
)
def test_a_wrong_address_or_a_missing_token_is_an_error(tmp_path: Path, rank: str, address: str, message: str) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    env = {"HOME": str(tmp_path), "DTRAIN_TOKEN": None if "token" in message else TOKEN}
    options = ["--node-rank", rank, "--nnodes", "2", "--master-addr", address]
    result = run_dtrain("run", *options, "show.py", cwd=tmp_path, env=env)
    assert (result.returncode, message in result.stderr) == (2, True), result


def test_what_to_type_is_printed_and_does_what_it_says(tmp_path: Path, port: int) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    printed = run_dtrain("run", "--print-commands", *options, "-x", "A=b c", "show.py", "it's", cwd=tmp_path)
    assert printed.returncode == 0
    typed = [line for line in printed.stdout.splitlines() if line.startswith("cd ")]
    assert [re.findall(r"--node-rank (\d)", line) for line in typed] == [["0"], ["1"]]
    env = {"HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with ExitStack() as stack:
        running = [stack.enter_context(started("bash", "-c", line, env=env)) for line in typed]
        outputs = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs[0].count(b"place") == 2


def test_what_to_type_has_the_gpus_that_were_chosen(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    options = ["--hosts", "a:4,b:4,c:4", "--include", "a@b:1,3"]
    printed = run_dtrain("run", "--print-commands", *options, "show.py", cwd=tmp_path)
    a, b = (line.split(" && ")[1] for line in printed.stdout.splitlines() if line.startswith("cd "))
    assert a.startswith("dtrain run --node-rank 0 --master-addr a --nproc-per-node 4 ")
    assert b.startswith("CUDA_VISIBLE_DEVICES=1,3 dtrain run --node-rank 1 --master-addr a --nproc-per-node 2 ")


def test_what_to_type_names_node_0_by_what_others_know(tmp_path: Path) -> None:
    """Not by an alias of this user's ssh configuration."""
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "config").write_text("Host gpu\n  HostName 10.0.0.5\n")
    for hosts, address in (("gpu,b", "10.0.0.5"), ("b,gpu", "b")):
        options = ["--ssh-config", "config", "--hosts", hosts]
        printed = run_dtrain("run", "--print-commands", *options, "show.py", cwd=tmp_path)
        assert printed.returncode == 0, printed
        assert set(re.findall(r"--master-addr (\S+)", printed.stdout)) == {address}
        assert "--ssh-config" not in printed.stdout
    named = run_dtrain("run", "--print-commands", "--master-addr", "c", *options, "show.py", cwd=tmp_path)
    assert set(re.findall(r"--master-addr (\S+)", named.stdout)) == {"c"}


def test_no_one_else_hears_or_reaches_the_run(tmp_path: Path, port: int) -> None:
    import psutil

    (tmp_path / "wait.py").write_text(
        "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('end'): time.sleep(0.01)"
    )
    with _nodes(tmp_path, port, [0, 1], "wait.py", DTRAIN_TOKEN=TOKEN) as nodes:
        wait_up(nodes[0], 2)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as scanner:
            scanner.sendall(b"GET / HTTP/1.0\r\n\r\n")
            wait_until(lambda: scanner.recv(1024) == b"", "the scanner is sent away")
        family = [psutil.Process(nodes[0].pid), *psutil.Process(nodes[0].pid).children(recursive=True)]
        listening = {c.laddr[0] for p in family for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
        (tmp_path / "end").touch()
        assert [_ends(node)[0] for node in nodes] == [0, 0]
