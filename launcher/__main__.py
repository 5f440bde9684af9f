"""The commands `dtrain`, which is also `python -m launcher`, and `dtrain-torchrun`. All they do is in cli/main.py."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main(*, as_torchrun: bool = False) -> NoReturn:
    """Run `dtrain`; entry point of the console script."""
    try:
        from launcher.cli.main import main

        main(as_torchrun=as_torchrun)
    except KeyboardInterrupt:  # during an import: no traceback then either
        os._exit(130)


def torchrun() -> NoReturn:
    """Run `dtrain-torchrun`; entry point of the console script."""
    main(as_torchrun=True)


if __name__ == "__main__":
    main()
