"""Writes files of tests, and reads what workers have printed."""

import textwrap
from pathlib import Path


def write(folder: Path, name: str, text: str) -> Path:
    """Write a text without its common indentation to a file in a folder that may be missing; return the file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def lines_of_workers(output: str) -> list[str]:
    """Return what workers wrote, without the prefixes of the console and without lines of dtrain itself."""
    return [line.partition("] ")[2] for line in output.splitlines() if line.startswith("[")]
