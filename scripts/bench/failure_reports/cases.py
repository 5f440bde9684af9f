"""The 15 cases: what each starts, what it does to the run, and what should be named or work."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from testbed.processes import wait_until
from testbed.sshd import SshHosts

from failure_reports.finding import Finding, Wanted, find_named, rank_pattern
from failure_reports.run import KEEP_ALIVE_S, Run, signalled

HERE = rf"\b{re.escape(socket.gethostname())}\b"
BOTH = ("dtrain", "torchrun")
ALL = (*BOTH, "mpirun")
EACH_HOST = ["--nnodes", "2", "--local-addr", "{address}"]  # torchrun names a host by the address that it is given


@dataclass(frozen=True)
class Case:
    """A report of the field. `see` makes the run, acts on it, and returns what it has shown."""

    name: str
    issues: str
    see: Callable[[Run], Finding]
    launchers: tuple[str, ...] = BOTH
    needs_root: bool = False  # for hosts with a network of their own
    debug: bool = True  # torch's debug level, under torchrun


def named_on_two_hosts(script: str, cause: str, rank: int, *words: str) -> Callable[[Run], Finding]:
    """Return a case in which a rank of two hosts with two ranks each fails by itself."""

    def see(run: Run) -> Finding:
        run.on_hosts(script, *words, hosts=(0, 1), workers=2, torchrun=EACH_HOST)
        run.end()
        return _finding(run, _failed_at(run), Wanted(cause, rank_pattern(rank), _host(run, rank // 2)))

    return see


def wrong_name(run: Run) -> Finding:
    """On each host the names of both mean 127.0.1.1, as the own name does on Debian."""
    run.on_hosts("joins.py", hosts=(0, 1), workers=1, torchrun=["--nnodes", "2"])
    run.end()
    works = [text for _, text in run.noted("joined")] == ["2", "2"]
    return _finding(run, run.began, works=works, found="the hosts met" if works else "the hosts did not meet")


def node_order(run: Run) -> Finding:
    """The second host is asked to be node 0. torchrun is started first on the first host, as node 1."""
    if run.launcher == "dtrain":
        run.on_hosts("node_order.py", hosts=(1, 0), workers=1)
    else:
        own = [*EACH_HOST, "--node-rank", "{from_last}"]
        run.on_hosts("node_order.py", hosts=(0, 1), workers=1, pause_s=2, torchrun=own)
    run.end()
    ranks = dict(text.split() for _, text in run.noted("node"))
    works = ranks == {run.addresses[1]: "0", run.addresses[0]: "1"}
    return _finding(run, run.began, works=works, found="as asked" if works else f"not as asked: {ranks}")


def port_in_use(run: Run) -> Finding:
    """The port that the command names is another program's."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        run.here("joins.py", workers=2, dtrain=options, torchrun=options, standalone=())
        run.end()
        cause = rf"{port}.*(in use|EADDRINUSE)|(in use|EADDRINUSE).*{port}"
        return _finding(run, run.began, Wanted(cause, None, rf"{HERE}|127\.0\.0\.1"))


def signals(run: Run) -> Finding:
    """USR1 and 12 s later TERM are sent to the launcher; 8 s are allowed to save, which takes 3."""
    torchs = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--shutdown-timeout", "8"]
    run.here("signals.py", workers=2, dtrain=["--grace-s", "8"], torchrun=torchs)
    run.wait("up", 2)
    sent_at = signalled(run.commands[0], signal.SIGUSR1)
    time.sleep(12)
    received = len(run.noted("usr1"))
    goes_on = sum(at > time.monotonic() - 3 for at, _ in run.noted("alive")) == 2 and not run.noted("term")
    if run.commands[0].poll() is None:
        sent_at = signalled(run.commands[0], signal.SIGTERM)
    run.end(60)
    saved = len({at for at, _ in run.noted("saved")})
    found = f"USR1 reached {received} of 2 ranks, {'which went on' if goes_on else 'and ended the run'}; {saved} saved"
    works = (received, goes_on, saved) == (2, True, 2)
    return _finding(run, sent_at, Wanted("SIGTERM|signal|[Ss]top", None, None), works=works, found=found)


def spare_host(run: Run) -> Finding:
    """Two of three hosts train; one of the two is killed, as by a crash, and the third should take its place."""
    restarts = ["--nnodes", "2", "--max-restarts", "3"]
    own, lease = [*restarts, "--local-addr", "{address}"], ["--heartbeat-timeout-s", str(KEEP_ALIVE_S)]
    run.on_hosts("lost_host.py", hosts=(0, 1, 2), workers=1, pause_s=1, dtrain=[*restarts, *lease], torchrun=own)
    run.wait("step", 2)
    used = [address for _, address in run.noted("step")]
    lost = next(i for i in (1, 2) if run.addresses[i] in used)
    with _host_off(run, lost) as lost_at:
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: len(run.noted("step")) >= 4, "two hosts train again", 60)
        again = [at for at, _ in run.noted("step")][3:]
        run.end(30)
    found = f"trained again after {again[0] - lost_at:.1f} s" if again else "did not train again"
    return _finding(run, lost_at, _lost(run, lost), works=bool(again), found=found)


def only_failed(run: Run) -> Finding:
    """One of four ranks is killed."""
    restarts = ["--max-restarts", "3"]
    run.here("only_failed.py", workers=4, dtrain=restarts, torchrun=restarts)
    run.wait("step", 4)
    (pid,) = (int(path.name.split(".")[2]) for path in run.folder.glob("process.2.*.noted"))
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    run.end(90)
    new = len(run.noted("process")) - 4
    again = [at for at, _ in run.noted("step")][4:]
    found = f"{new} processes started" + (f", went on after {again[0] - killed_at:.1f} s" if again else "")
    works = (new, run.codes) == (1, "0")
    return _finding(run, killed_at, Wanted("SIGKILL|Signal 9", rank_pattern(2), HERE), works=works, found=found)


def orphans(run: Run) -> Finding:
    """The launcher is killed by SIGKILL. Each of two ranks has four children."""
    run.here("orphans.py", workers=2)
    run.wait("up", 2)
    killed_at = signalled(run.commands[0], signal.SIGKILL)
    run.end()
    left = run.left()
    gone = f"all gone after {time.monotonic() - killed_at:.1f} s" if not left else f"{len(left)} left after 10 s"
    return Finding({}, None, "", run.codes, left, works=not left, found=gone)


def logs(run: Run) -> Finding:
    """Global rank 3, on the second host, writes a line: on the console and in a file."""
    run.on_hosts("logs.py", hosts=(0, 1), workers=2, torchrun=EACH_HOST)
    run.end()
    files = [path for path in run.folder.rglob("*.log") if "loss is nan" in path.read_text(errors="replace")]
    found = ", ".join(sorted(str(path.relative_to(run.folder)) for path in files)) or "in no file"
    return _finding(
        run, _failed_at(run), Wanted("loss is nan", rank_pattern(3), _host(run, 1), by_workers=True), found=found
    )


def exit_code(run: Run) -> Finding:
    found = named_on_two_hosts("exit_code.py", "41", 3)(run)
    return Finding(**{**vars(found), "works": run.codes == "41", "found": f"exit code {run.codes}"})


def elastic_samples(run: Run) -> Finding:
    """One of three hosts is lost in an epoch of 8 steps, and is not replaced."""
    elastic = ["--nnodes", "2:3", "--max-restarts", "3"]
    own, lease = [*elastic, "--local-addr", "{address}"], ["--heartbeat-timeout-s", str(KEEP_ALIVE_S)]
    run.on_hosts(
        "elastic_samples.py", run.launcher, hosts=(0, 1, 2), workers=1, dtrain=[*elastic, *lease], torchrun=own
    )
    run.wait("step", 3)
    time.sleep(2)
    with _host_off(run, 2) as lost_at:
        run.end(120)
    counted = [float(word) for _, text in run.noted("counted") for word in text.split()]
    wrong = sum(abs(value - 1) > 0.01 for value in counted)
    found = f"{wrong} of {len(counted)} samples did not count as one" if counted else "it did not end"
    return _finding(run, lost_at, _lost(run, 2), works=bool(counted) and not wrong, found=found)


def debugger(run: Run) -> Finding:
    """dtrain: in a running rank that expects none. torchrun has it only at a breakpoint in the script."""
    if run.launcher == "dtrain":
        name = f"bench-{os.getpid()}-{run.folder.name}"
        run.here("debugger.py", "none", workers=2, dtrain=["--run-id", name])
        run.wait("up", 2)
        asked_at = time.monotonic()
        run.start([sys.executable, "-m", "launcher", "debug", name, "--rank", "1"])
    else:
        run.here("debugger.py", "breakpoint", workers=2)
        run.wait("failed", 1)
        asked_at = _failed_at(run)
    run.send("import os\np 'rank ' + os.environ['RANK']\nc\n")
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: "'rank 1'" in run.text, "the debugger's answer", 20)
    (run.folder / "stop").touch()
    run.end(60)
    works = "'rank 1'" in run.text and {process.returncode for process in run.commands} == {0}
    found = "at any line of a running rank" if run.launcher == "dtrain" else "at a breakpoint in the script"
    return _finding(run, asked_at, Wanted("'rank 1'", None, None, by_workers=True), works=works, found=found)


CASES = (
    Case("one rank raises, the others wait", "pytorch#17113, #76287",
         named_on_two_hosts("one_rank_raises.py", "ValueError: bad batch", 2), ALL),
    Case("the first failure ends last", "pytorch#91278",
         named_on_two_hosts("hidden_cause.py", "ValueError: bad label", 2), ALL),
    Case("host names resolve wrongly", "pytorch#73656, #69197", wrong_name, needs_root=True),
    Case("node ranks in the order asked for", "pytorch#99684", node_order),
    Case("a rank is missing in a collective", "nccl#1260, accelerate#3861",
         named_on_two_hosts("missing_rank.py", r"did not come|failed to pass monitoredBarrier in|is missing", 3)),
    Case("the port is in use", "pytorch#73320, #126510", port_in_use),
    Case("USR1, TERM and the time to save", "pytorch#119856, #154849", signals, ALL),
    Case("a spare host for a lost one", "pytorch#114097", spare_host),
    Case("only what failed restarts", "pytorch#147064, horovod#3264", only_failed, debug=False),
    Case("the launcher is killed", "sglang#23627, EgoVerse#682", orphans, ALL),
    Case("logs by host and global rank", "pytorch#60911, #75087", logs, ALL),
    Case("one command, its exit code", "DeepSpeed#1722, accelerate#2265", exit_code, ALL),
    Case("the same samples when hosts go", "torchft#292", elastic_samples, debug=False),
    Case("uneven data", "pytorch#33148, #38174",
         named_on_two_hosts("uneven_data.py", "did not come.*barrier|is missing", 3, "torch"), debug=False),
    Case("a debugger on one rank", "torchrunx#67, torchtitan#652", debugger),
)  # fmt: skip


@contextlib.contextmanager
def _host_off(run: Run, number: int):
    """Kill a host, and start it again at the end of the context; the value is when it was killed."""
    assert isinstance(run.lab, SshHosts)
    at = time.monotonic()
    run.lab.stop(number + 1)
    try:
        yield at
    finally:
        run.lab.start(number + 1)


def _failed_at(run: Run) -> float:
    """Return when the first rank noted that it fails; else the start, for a run that did not come so far."""
    return min([at for at, _ in run.noted("failed")], default=run.began)


def _lost(run: Run, number: int) -> Wanted:
    return Wanted(r"\blost\b|left the rendezvous|dead", None, _host(run, number))


def _host(run: Run, number: int) -> str:
    """A host's name, or its address. torchrun takes the machine's full name, which all hosts of this bench share."""
    name = rf"\b{run.lab.names[number]}\b|\b{re.escape(run.addresses[number])}\b"
    return rf"{name}|host +: {re.escape(socket.getfqdn())}" if run.launcher == "torchrun" else name


def _finding(
    run: Run, failed_at: float, wanted: Wanted | None = None, *, works: bool | None = None, found: str = ""
) -> Finding:
    named, seconds, first = find_named(run.launcher, run.lines, failed_at, wanted) if wanted else ({}, None, "")
    return Finding(named, seconds, first, run.codes, run.left(), works, found)
