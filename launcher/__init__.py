"""The launcher: `dtrain run`, and `launch()` for Python programs. Start at cli/main.py; README.md has the map.

Nothing here imports torch or ddp in the launcher's own processes; agent/store_process.py has a process of its own.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from launcher.functions.launch import launch

__all__ = ["launch"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `launch` when it is first used: agents and commands do without it."""
    if name != "launch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from launcher.functions.launch import launch

    globals()["launch"] = launch
    return launch
