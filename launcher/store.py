"""The rendezvous store: torch's own TCPStore server, in a process of its own on the first host.

Started by the agent (rendezvous.py) with the bound and listening socket as an inherited descriptor, so the port was
taken before any worker started and early clients wait in the socket's queue while torch is imported here. Serves until
its standard input ends or the agent kills it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    descriptor = int(sys.argv[1])
    tcp_store = _tcp_store()
    listening = socket.socket(fileno=os.dup(descriptor))
    address, port = listening.getsockname()[:2]
    listening.close()
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": descriptor}
    try:
        store = tcp_store(address, port, **options)
    except NotImplementedError:  # torch 2.4: only its older backend takes a socket
        store = tcp_store(address, port, **options, use_libuv=False)
    os.read(0, 1)
    del store
    os._exit(0)  # torch's teardown has nothing to add


def _tcp_store() -> Callable[..., Any]:
    """Return torch's TCPStore class, by its extension module alone if that can be loaded so.

    All of torch takes 1.7 s of a processor to import, at the very moment when the workers do the same; the extension
    takes a third of that (measured with torch 2.13). Where it needs more than its own libraries, as the CUDA builds
    from PyPI do, everything is imported.
    """
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
    # The extension adds its classes to these modules; nothing else of them is used.
    sys.modules.update({"torch": stub, "torch.distributed": distributed})
    ctypes.CDLL(str(folder / "lib" / "libtorch_global_deps.so"), mode=ctypes.RTLD_GLOBAL)
    extension = importlib.import_module("torch._C")
    extension._c10d_init()
    store: Callable[..., Any] = importlib.import_module("torch._C._distributed_c10d").TCPStore
    return store


if __name__ == "__main__":
    main()
