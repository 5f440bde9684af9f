"""Brings files that the workers wrote back from the hosts, after the run (`--fetch`), over a new stream to each."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import DtrainError, HostError
from launcher.frozen import dataclass
from launcher.hosts.host import Host
from launcher.output.text import count
from launcher.placement.job_spec import JobSpec
from launcher.sync.receiver import SyncError, check_path
from launcher.transport.connect import Connector
from launcher.transport.synced import RECEIVER, Exchange, give_up, message_block, outgoing_of

FOLDER = "fetched"  # in the run's
CONNECT_S = 30.0
_AT_ONCE = 16
_LOOK_S = 0.1


@dataclass(frozen=True)
class Fetched:
    """What came from one host; `problem` is why not all of it did."""

    host: str
    files: int = 0
    size: int = 0
    problem: str = ""


def fetch_files(
    spec: JobSpec, hosts: Sequence[Host], folder: Path, *, say: Callable[[str], None], given_up: Callable[[], bool]
) -> None:
    """Bring the files that match --fetch from the remote ones of `hosts` to `folder`, in a folder for each.

    Blocks, until `given_up` returns True.
    """
    left: queue.SimpleQueue[Host] = queue.SimpleQueue()
    results: queue.SimpleQueue[Fetched] = queue.SimpleQueue()
    hosts = [host for host in hosts if host.remote]
    for host in hosts:
        left.put(host)
    connector = Connector(spec)

    def work() -> None:
        try:
            while not given_up():
                host = left.get_nowait()
                results.put(_fetch(connector, spec, host, folder / FOLDER / host.name, given_up))
        except queue.Empty:
            pass

    threads = [threading.Thread(target=work, name="fetch", daemon=True) for _ in hosts[:_AT_ONCE]]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not given_up():
        time.sleep(_LOOK_S)
    connector.close()
    found = [results.get_nowait() for _ in range(results.qsize())]
    files, size = sum(one.files for one in found), sum(one.size for one in found)
    if files:
        from_hosts = sum(one.files > 0 for one in found)
        came = f"{count(files, 'file')} ({size / 1e6:.1f} MB) of {count(from_hosts, 'host')}"
        say(f"--fetch: {came} {'is' if files == 1 else 'are'} in {folder / FOLDER}")
    for one in sorted(found, key=lambda one: one.host):
        if one.problem:
            say(f"--fetch: {one.host}: {one.problem}")
    if missing := {host.name for host in hosts} - {one.host for one in found}:
        say(f"--fetch was given up; nothing more came from {', '.join(sorted(missing))}")


def _fetch(connector: Connector, spec: JobSpec, host: Host, folder: Path, given_up: Callable[[], bool]) -> Fetched:
    """Fetch from one host."""
    files = size = 0
    problem = ""
    tree = outgoing_of(spec).trees.get(host.name, "") if spec.sync else ""
    order = {"fetch": spec.fetch, "folder": str(spec.workdir), "tree": tree}
    try:
        with ordered(connector, spec, host, order) as exchange:
            while "done" not in (message := exchange.read_message()) and not given_up():
                if "skipped" in message:
                    problem = f"{message['skipped']} cannot be read: {message.get('why')}"
                    continue
                path = folder / check_path("/" + str(message["file"]).lstrip("/"))[1:]
                if not _write(path, exchange, int(message["size"])):
                    problem = f"{path} is there already; it was not overwritten"
                    continue
                files, size = files + 1, size + int(message["size"])
        if not files and not problem:
            problem = f"no file matches {' '.join(spec.fetch)} there"
    except (DtrainError, SyncError, OSError, LookupError, ValueError) as error:
        problem = error.reason if isinstance(error, HostError) else str(error)
    return Fetched(host.name, files, size, problem)


@contextlib.contextmanager
def ordered(connector: Connector, spec: JobSpec, host: Host, order: dict[str, Any]) -> Iterator[Exchange]:
    """Give an order to a receiver on a host; its answers are read from the exchange. Raises HostError."""
    stream = connector.open_receiver(host, time.monotonic() + CONNECT_S)
    exchange = Exchange(host, stream, spec)
    threading.Thread(target=exchange.watch, name=f"watch {host.name}", daemon=True).start()
    try:
        exchange.write(RECEIVER)
        exchange.write(message_block(json.dumps(order).encode()))
        yield exchange
    finally:
        exchange.over.set()
        give_up(stream)


def _write(path: Path, exchange: Exchange, size: int) -> bool:
    """Write a file as it comes, under its name once it is complete; return False if there is one of that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    with open(temporary, "wb") as file:
        for data in exchange.read_exactly(size):
            file.write(data)
    try:
        os.link(temporary, path)  # unlike a rename, it overwrites nothing
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True
