"""The rendezvous store: torch's own TCPStore server, in a process of its own on the first host.

Started by the agent (rendezvous.py), which sends it a bound and listening socket for every attempt over its standard
input, a Unix socket: the port was bound before any worker started, and early clients wait in the socket's queue while
torch is imported here. A byte with a socket is the order to serve a new store on it, one without to close the last
store; each is answered with the same byte. Serves until its input ends or the agent kills it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    for signum in (signal.SIGUSR1, signal.SIGUSR2):  # SLURM sends them to every process of a step
        signal.signal(signum, signal.SIG_IGN)
    control = socket.socket(fileno=0)
    tcp_store = None
    store = None
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not order:
            os._exit(0)  # skip torch's teardown
        del store  # closes its port and its connections
        store = None
        if descriptors:
            tcp_store = tcp_store or _tcp_store()
            store = _serve(tcp_store, descriptors[0])
        control.send(order)


def _serve(tcp_store: Callable[..., Any], descriptor: int) -> object:
    listening = socket.socket(fileno=os.dup(descriptor))
    address, port = listening.getsockname()[:2]
    listening.close()
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": descriptor}
    try:
        return tcp_store(address, port, **options)
    except NotImplementedError:  # torch 2.4: only its older backend takes a socket
        return tcp_store(address, port, **options, use_libuv=False)


def _tcp_store() -> Callable[..., Any]:
    """Return torch's TCPStore class, from its extension module alone if that can be loaded.

    Importing all of torch takes 1.7 s of a processor, at the very moment when the workers do the same; the extension
    takes a third of that (measured with torch 2.13). If it needs more than its own libraries, as the CUDA builds from
    PyPI do, everything is imported.
    """
    if "torch" in sys.modules:  # forked from a process that has imported it
        from torch._C._distributed_c10d import TCPStore

        return TCPStore
    before = set(sys.modules)
    try:
        return _from_extension()
    except (ImportError, OSError, AttributeError):
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "torch":
                del sys.modules[name]
        from torch._C._distributed_c10d import TCPStore

        return TCPStore


def _from_extension() -> Callable[..., Any]:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ImportError("no torch here")
    folder = Path(spec.origin).parent
    stub, distributed = types.ModuleType("torch"), types.ModuleType("torch.distributed")
    stub.__path__ = [str(folder)]
    # The extension adds its classes to these modules; nothing else in them is used.
    sys.modules.update({"torch": stub, "torch.distributed": distributed})
    ctypes.CDLL(str(folder / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    extension = importlib.import_module("torch._C")
    extension._c10d_init()
    store: Callable[..., Any] = importlib.import_module("torch._C._distributed_c10d").TCPStore
    return store


if __name__ == "__main__":
    main()
