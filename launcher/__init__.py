"""The launcher: `dtrain run`, `launch()` for Python programs, `step()` for scripts. README.md has the map.

Nothing here imports torch or ddp in the launcher's own processes; agent/store_process.py has a process of its own.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from launcher.agent.workers.step_counter import step
    from launcher.functions.launch import launch

__all__ = ["launch", "step"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `launch` or `step` when it is first used: agents and commands do without them."""
    if name == "launch":
        from launcher.functions.launch import launch

        globals()[name] = launch
    elif name == "step":
        from launcher.agent.workers.step_counter import step

        globals()[name] = step
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]
