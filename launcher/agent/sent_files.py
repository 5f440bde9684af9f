"""Orders for a host that was sent the files of the run (`--sync`): their paths, as they are there.

Sent files lie below a folder, the tree, at the paths that they have on the controller's machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from launcher.frozen import replace
from launcher.protocol.commands import Prepare, StartWorker


def moved(path: str, tree: str) -> str:
    """Return where a path of the controller's machine is here; the same if it was not sent."""
    there = tree + path
    return there if tree and path.startswith("/") and os.path.lexists(there) else path


def moved_orders(message: Prepare, tree: str, env: Mapping[str, str]) -> Prepare:
    """Return the orders with the paths of sent files. Python's search path keeps what the receiver has put into it."""
    if not tree:
        return message
    export = dict(message.export)
    if "PYTHONPATH" in export:
        own = env.get("PYTHONPATH", "").split(os.pathsep)
        folders = [moved(path, tree) for path in export["PYTHONPATH"].split(os.pathsep)]
        export["PYTHONPATH"] = os.pathsep.join(filter(None, [*own, *folders]))
    return replace(
        message,
        workdir=moved(message.workdir, tree),
        script=None if message.script is None else moved(message.script, tree),
        program=None if message.program is None else moved(message.program, tree),
        target=moved(message.target, tree),
        export=export,
    )


def moved_start(message: StartWorker, tree: str) -> StartWorker:
    """Return the order to start a worker, with the paths of sent files in its arguments."""
    return replace(message, argv=[moved(arg, tree) for arg in message.argv]) if tree else message
