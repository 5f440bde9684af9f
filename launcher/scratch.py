"""The folder for workers' error files: made by the agent, removed by it or, if it was killed, by its guard."""

from __future__ import annotations

import os
import sys

__all__ = ["make_folder", "remove_folder"]


def make_folder(mark: str) -> str:
    """Make the folder of the agent with this mark where temporary files belong. Raises OSError where none can be."""
    problem: OSError = FileNotFoundError("no folder for temporary files")
    for path in _candidates(mark):
        try:
            os.mkdir(path, 0o700)
        except OSError as error:
            problem = error
        else:
            return path
    raise problem


def remove_folder(mark: str) -> None:
    """Remove the folder, if there is one, and the files in it."""
    for path in _candidates(mark):
        try:
            names = os.listdir(path)
        except FileNotFoundError:
            continue
        try:
            for name in names:
                os.unlink(os.path.join(path, name))
            os.rmdir(path)
        except OSError as error:  # a worker put something else there, or the disk went away
            print(f"dtrain agent: {path} is left: {error}", file=sys.stderr)


def _candidates(mark: str) -> list[str]:
    folders = [os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp"]
    return [f"{folder}/dtrain-{mark[:16]}" for folder in folders if os.path.isabs(folder)]
