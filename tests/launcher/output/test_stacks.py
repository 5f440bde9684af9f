"""Stacks of every Python and of py-spy are read alike; ranks at one place are one group; the odd ones are named."""

import dataclasses
import faulthandler
import tempfile
import threading

import pytest
from testbed import REPOSITORY

from launcher.hangs.positions import groups, odd_ranks, rank_position, ranks_outside
from launcher.output.stacks import odd_one_out, one_line, write_groups, write_out
from launcher.protocol.reports import Evidence

TORCH = "/home/me/.venv/lib/python3.12/site-packages/torch"
DDP = REPOSITORY / "ddp"
BOOTSTRAP = str(REPOSITORY / "launcher/agent/workers/bootstrap.py")


def evidence(rank: int, stack: str, *, state: str = "S", waits_in: str = "") -> Evidence:
    return Evidence(
        number=1, attempt=0, rank=rank, pid=800 + rank, state=state, waits_in=waits_in, rss_bytes=5 << 28, cpu_s=12.34,
        stack=stack,
    )  # fmt: skip


def stack(*frames: tuple[str, int, str]) -> str:
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
    return "\n".join(["Current thread 0x00007f0000000001 (most recent call first):", *lines, ""])


STEP = ("/home/me/train.py", 40, "step")
MAIN = ("/home/me/train.py", 60, "<module>")
ALL_REDUCE = (f"{TORCH}/distributed/distributed_c10d.py", 3010, "all_reduce")
WRAPPER = (f"{TORCH}/distributed/c10d_logger.py", 81, "wrapper")
BACKWARD = (f"{TORCH}/autograd/graph.py", 824, "_engine_run_backward")
IN_ALL_REDUCE = stack(ALL_REDUCE, WRAPPER, STEP, MAIN)
IN_BACKWARD = stack(BACKWARD, STEP, MAIN)
BROADCAST = (f"{TORCH}/nn/parallel/distributed.py", 2183, "_distributed_broadcast_coalesced")
IN_BROADCAST = stack(BROADCAST, (f"{TORCH}/nn/parallel/distributed.py", 1697, "forward"), STEP, MAIN)
LOADING = stack(("/home/me/data.py", 7, "load"), STEP, MAIN)

PYTHON_3_10 = """\
Thread 0x00007fbd08de66c0 (most recent call first):
  File "/usr/lib/python3.10/threading.py", line 320 in wait
  File "/usr/lib/python3.10/threading.py", line 973 in _bootstrap

Current thread 0x00007fbd097dab80 (most recent call first):
  File "/usr/lib/python3.10/threading.py", line 1116 in join
  File "/home/me/train.py", line 5 in main
  File "/home/me/train.py", line 9 in <module>
  File "/opt/dtrain/launcher/bootstrap.py", line 39 in main
"""
PYTHON_3_14 = """\
Thread 0x00007fbd08de66c0 [autograd] (most recent call first):
  <no Python frame>

Thread 0x00007fbd08de66c1 [Thread-1 (x) (most recent call first):] (most recent call first):
  Garbage-collecting
  File "/home/me/other.py", line 3 in other

Current thread 0x00007fbd097dab80 [python] (most recent call first):
  Garbage-collecting
  File "/usr/lib/python3.14/threading.py", line 1116 in join
  File "/home/me/train.py", line 5 in main
  File "/home/me/train.py", line 9 in <module>
"""
# Another thread took the signal, and so is the current one.
OTHER_IS_CURRENT = PYTHON_3_10.replace("Current thread", "Thread").replace("Thread", "Current thread", 1)
FREE_THREADED = """\
<Cannot show all threads while the GIL is disabled>
Stack (most recent call first):
  File "/usr/lib/python3.14t/threading.py", line 1116 in join
  File "/home/me/train.py", line 5 in main
"""
PY_SPY = """\
Process 812: python train.py --note
Thread 0x1 (most recent call first):
Python v3.11.7 (/usr/bin/python3.11)

Thread 812 (idle): "MainThread"
    join (/usr/lib/python3.11/threading.py:1116)
    main (/home/me/train.py:5)
    <module> (/home/me/train.py:9)
Thread 813 (active+gil): "my "own" (thread)"
    other (/home/me/other (1).py:3)
"""


@pytest.mark.parametrize(
    "text",
    [PYTHON_3_10, PYTHON_3_14, OTHER_IS_CURRENT, FREE_THREADED, PY_SPY],
    ids=["3.10", "3.14", "other", "free", "py-spy"],
)
def test_innermost_line_of_the_main_thread_s_own_code_is_found(text: str) -> None:
    found = rank_position(evidence(0, text))
    assert (found.where, found.inside) == ("/home/me/train.py:5 in main", "join")


LIB = "/usr/lib/python3.12"
CALLS = {
    "torch.utils.cpp_extension.load": [
        (f"{TORCH}/utils/file_baton.py", 51, "wait"),
        (f"{TORCH}/utils/cpp_extension.py", 2091, "_jit_compile"),
        (f"{TORCH}/utils/cpp_extension.py", 1681, "load"),
    ],
    "concurrent.futures._base.result": [
        (f"{LIB}/threading.py", 355, "wait"), (f"{LIB}/concurrent/futures/_base.py", 451, "result")
    ],
    "torch.utils.data.dataloader.__next__": [
        (f"{LIB}/selectors.py", 415, "wait"),
        (f"{TORCH}/utils/data/dataloader.py", 1285, "_get_data"),
        (f"{TORCH}/utils/data/dataloader.py", 733, "__next__"),
    ],
    "ddp.parallel.forward": [
        (f"{DDP}/reducer.py", 12, "wait"),
        (f"{DDP}/parallel.py", 12, "forward"),
        (f"{TORCH}/nn/modules/module.py", 1787, "_call_impl"),
        (f"{TORCH}/nn/modules/module.py", 1776, "_wrapped_call_impl"),
        (f"{TORCH}/utils/_contextlib.py", 116, "decorate_context"),
    ],
    "the import of torch": [
        (f"{TORCH}/_ops.py", 9, "wait"),
        ("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed"),
        (f"{TORCH}/__init__.py", 240, "<module>"),
        ("<frozen importlib._bootstrap>", 1360, "_find_and_load"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_what_was_called_of_a_library_is_named(call: str) -> None:
    (group,) = groups([evidence(0, stack(*CALLS[call], STEP, MAIN))])
    assert one_line(group) == f"rank 0 is at /home/me/train.py:40 in step, in {call}, inside wait"


IMPORT = [
    ("<frozen importlib._bootstrap>", 1140, "_find_spec"),
    ("<frozen importlib._bootstrap>", 1360, "_find_and_load"),
]
IMPORTS = {
    "an import": IMPORT,
    "an import, which wakes the store": [
        (f"{LIB}/socket.py", 850, "create_connection"), (BOOTSTRAP, 425, "find_spec"), *IMPORT
    ],
    "the import of torch": [
        (BOOTSTRAP, 425, "find_spec"), *IMPORT, (f"{TORCH}/__init__.py", 240, "<module>"), IMPORT[1]
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", IMPORTS)
def test_a_rank_that_imports_is_at_its_own_line(what: str) -> None:
    called_by = ("<frozen runpy>", 88, "_run_code"), (BOOTSTRAP, 76, "_run")
    (group,) = groups([evidence(0, stack(*IMPORTS[what], STEP, MAIN, *called_by))])
    assert one_line(group) == f"rank 0 is at /home/me/train.py:40 in step, in {what.partition(',')[0]}"


def dumped(*names: str) -> str:
    """Return what faulthandler writes while there are threads of these names."""
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait, name=name) for name in names]
    for thread in threads:
        thread.start()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read()
    stop.set()
    for thread in threads:
        thread.join()
    return text


def test_this_python_prints_what_is_understood() -> None:
    found = rank_position(evidence(0, dumped("a", 'b "(most recent call first):')))
    assert (found.where.startswith(f"{__file__}:"), found.where.endswith(" in dumped")) == (True, True)


def test_main_thread_that_was_cut_off_is_unknown() -> None:
    """Of over 100 threads faulthandler prints the newest 100."""
    assert rank_position(evidence(0, dumped(*map(str, range(105))))).where == ""


def test_name_that_is_not_ascii_is_shown_as_it_is() -> None:
    text = stack(("/home/j\\xfcrgen/\\u8bad\\u7ec3/\\U0001f525.py", 3, "gr\\xf6\\xdfe"), MAIN)
    assert rank_position(evidence(0, text)).where == "/home/jürgen/训练/🔥.py:3 in größe"
    half = stack(("/home/me/\\udcff.py", 3, "f"), MAIN)  # a byte that is no UTF-8
    assert rank_position(evidence(0, half)).where == "/home/me/\\udcff.py:3 in f"


@pytest.mark.parametrize(
    "library",
    [
        f"{TORCH}/nn/modules/module.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "/usr/lib/python3.12/socket.py",
        "/usr/lib64/python3.12/socket.py",
        "<frozen runpy>",
        str(DDP / "reducer.py"),
        str(REPOSITORY / "launcher/agent/debugging/in_worker.py"),
    ],
)
def test_library_is_not_the_users_own(library: str) -> None:
    found = rank_position(evidence(0, stack((library, 3, "f"), STEP, (library, 9, "g"))))
    assert (found.where, found.inside) == ("/home/me/train.py:40 in step", "f")
    assert rank_position(evidence(0, stack((library, 3, "f")))).where == f"{library}:3 in f"


def test_kernel_s_stack_is_no_place_in_a_program() -> None:
    stuck = evidence(3, "[<0>] io_schedule+0x46/0x80\n[<0>] nfs_wait+0x1/0x2\n", state="D", waits_in="io_schedule")
    assert rank_position(stuck).where == ""
    (group,) = groups([stuck])
    assert one_line(group) == (
        "rank 3: state D (waiting for a device or a network disk; cannot be killed), waits in io_schedule"
    )
    assert "[<0>] nfs_wait" in write_out([stuck])


def test_groups_come_by_size_then_rank() -> None:
    all_evidence = [evidence(rank, LOADING if rank in (1, 3) else IN_ALL_REDUCE) for rank in (5, 4, 3, 2, 1, 0)]
    all_evidence.append(evidence(6, ""))
    assert [one_line(group) for group in groups(all_evidence)] == [
        "ranks 0,2,4-5 are at /home/me/train.py:40 in step, inside all_reduce",
        "ranks 1,3 are at /home/me/data.py:7 in load",
        "rank 6: state S (sleeping)",
    ]
    assert groups([]) == []


def test_one_that_is_stopped_is_a_group_of_its_own() -> None:
    found = groups([evidence(0, IN_ALL_REDUCE), evidence(1, IN_ALL_REDUCE, state="T"), evidence(2, IN_ALL_REDUCE)])
    assert [group.ranks for group in found] == [(0, 2), (1,)]
    assert one_line(found[1]).endswith("inside all_reduce (state T (stopped by a signal))")


def test_written_out_is_everything_by_rank() -> None:
    text = write_out([evidence(1, LOADING, waits_in="futex_do_wait"), evidence(0, IN_ALL_REDUCE), evidence(2, "")])
    assert text.startswith("rank 0 is at /home/me/train.py:40 in step, inside all_reduce\n")
    header = "\n\nrank 1 (pid 801): state S (sleeping), waits in futex_do_wait, 1.2 GiB resident, 12.3 s of CPU\n"
    assert header + LOADING.rstrip() + "\n\n" in text
    assert text.index("rank 0 (pid") < text.index("rank 1 (pid") < text.index("rank 2 (pid")
    assert text.endswith("\nits stack could not be read: it is not a Python program, or it did not answer\n")
    assert write_out([]) == "no rank could be asked\n"


def test_groups_are_written_with_the_frames_of_their_first_rank() -> None:
    three = [evidence(0, IN_ALL_REDUCE), evidence(1, LOADING), evidence(2, IN_ALL_REDUCE)]
    first, second, odd = write_groups(three, whole=False).split("\n\n")
    assert first.splitlines()[:2] == [
        "ranks 0,2 are at /home/me/train.py:40 in step, inside all_reduce",
        "  of rank 0, state S (sleeping):",
    ]
    assert "train.py" in first.splitlines()[-1]
    assert second.startswith("rank 1 is at /home/me/data.py:7 in load\n")
    assert odd == odd_one_out(three) + "\n"
    assert write_groups(three, whole=True) == write_out(three)
    assert write_groups([], whole=False) == "no rank could be asked\n"


def test_native_frames_are_shown_in_the_place_of_pythons() -> None:
    native = dataclasses.replace(evidence(0, LOADING), native="  ncclAllReduce (libnccl.so)\n  load (data.py:7)\n")
    text = write_out([native])
    assert text.endswith(" s of CPU\n  ncclAllReduce (libnccl.so)\n  load (data.py:7)\n")
    assert "most recent call first" not in text
    assert "  ncclAllReduce (libnccl.so)\n" in write_groups([native], whole=False)


PS = DDP / "strategies/parameter_server"
SERVER_WAITS = (
    (str(PS / "transport/server_endpoint.py"), 105, "receive"),
    (str(PS / "server.py"), 137, "_receive_all"),
    (str(PS / "server.py"), 112, "serve"),
    MAIN,
)
ODD = {
    "one loads": ([IN_ALL_REDUCE, LOADING, IN_ALL_REDUCE], (1,)),
    "one is in another collective": ([IN_ALL_REDUCE, stack((ALL_REDUCE[0], 9, "barrier"), MAIN), IN_ALL_REDUCE], ()),
    "one cannot be asked": ([IN_ALL_REDUCE, IN_ALL_REDUCE, ""], (2,)),
    "torch's wrapper waits in backward": ([IN_BACKWARD, IN_BACKWARD, LOADING], (2,)),
    "torch's wrapper broadcasts buffers in forward": ([IN_BROADCAST, IN_BROADCAST, LOADING], (2,)),
    "one computes a gradient": ([IN_ALL_REDUCE, IN_ALL_REDUCE, IN_BACKWARD], (2,)),
    "our wrapper waits": ([stack((str(DDP / "reducer.py"), 9, "_wait"), BACKWARD, STEP)] * 2 + [LOADING], (2,)),
    "most wait for a device": (
        [
            stack((f"{TORCH}/cuda/__init__.py", 9, "synchronize"), STEP),
            stack((f"{TORCH}/accelerator/__init__.py", 9, "synchronize"), STEP),
            stack((str(DDP / "generation/device_collectives.py"), 9, "settle"), STEP),
            LOADING,
        ],
        (3,),
    ),
    "most meet again": ([stack((str(DDP / "generation/meeting.py"), 9, "meet"), STEP)] * 2 + [LOADING], (2,)),
    "most meet again, and one waits in a collective of the script's from before": (
        [IN_ALL_REDUCE] + [stack((str(DDP / "generation/meeting.py"), 9, "meet"), STEP)] * 2,
        (0,),
    ),
    "one takes what a commit has sent": (
        [IN_ALL_REDUCE] * 2
        + [
            stack(("/home/me/train.py", 20, "load_state_dict"), (str(DDP / "resilience/parts.py"), 63, "receive"), MAIN)
        ],
        (2,),
    ),
    "a server has nothing to do, since a worker hangs": (
        [stack((str(PS / "client.py"), 9, "_wait"), STEP), LOADING, stack(*SERVER_WAITS)],
        (1,),
    ),
    "a server hangs": ([stack((str(PS / "client.py"), 9, "_wait"), STEP)] * 2 + [stack(*SERVER_WAITS[1:])], (2,)),
    "half of them": ([IN_ALL_REDUCE, LOADING], (1,)),
    "nobody": ([LOADING, LOADING, LOADING], ()),
    "all": ([IN_ALL_REDUCE] * 3, ()),
    "a lock of the script's own": (
        [stack(("/usr/lib/python3.12/threading.py", 320, "wait"), STEP)] * 2 + [LOADING],
        (),
    ),
    "none": ([], ()),
}


@pytest.mark.parametrize(("stacks", "odd"), ODD.values(), ids=ODD.keys())
def test_odd_ranks_are_outside_of_what_most_wait_in(stacks: list[str], odd: tuple[int, ...]) -> None:
    assert odd_ranks([evidence(rank, text) for rank, text in enumerate(stacks)]) == odd


def test_ranks_outside_run_code_of_their_own_or_are_stopped() -> None:
    exits = stack(("/usr/lib/python3.12/threading.py", 1590, "_shutdown"))
    found = [evidence(rank, text) for rank, text in enumerate([LOADING, IN_ALL_REDUCE, exits, ""])]
    assert ranks_outside([*found, evidence(4, IN_ALL_REDUCE, state="T")]) == (0, 4)


def test_one_that_someone_stopped_is_odd_wherever_it_is() -> None:
    waiting = [evidence(rank, IN_ALL_REDUCE, state="T" if rank == 2 else "S") for rank in range(4)]
    assert odd_ranks(waiting) == (2,)
    assert odd_one_out(waiting) == "3 of 4 ranks wait for others: look at rank 2 first"
    assert odd_one_out(waiting[1:3]) == "1 of 2 ranks waits for others: look at rank 2 first"
    assert "look at rank 2 first" in write_out(waiting)
