"""The folder for workers' files: errors, stacks, progress. Made by the agent; removed by it, by its guard if it was
killed, or else by the next agent here."""

from __future__ import annotations

import os
import stat
import sys

__all__ = ["clear", "make_folder", "remove_folder"]


def make_folder(run_tag: str) -> str:
    """Make the folder of the agent with this run tag where temporary files belong. Raises OSError where none can be."""
    problem: OSError = FileNotFoundError("no folder for temporary files")
    for path in _candidates(run_tag):
        try:
            os.mkdir(path, 0o700)
        except OSError as error:
            problem = error
        else:
            return path
    raise problem


def clear(folder: str, attempt: int) -> None:
    """Remove what the workers of an attempt have there: files whose names begin with its number."""
    try:
        for name in os.listdir(folder):
            if name.startswith(f"{attempt}-"):
                os.unlink(os.path.join(folder, name))
    except OSError as error:  # the disk went away, or a worker put a folder there: the end will see
        print(f"dtrain agent: {folder}: {error}", file=sys.stderr)


def remove_folder(run_tag: str) -> None:
    """Remove the folder with this run tag, if there is one of ours, and what is in it."""
    for path in _candidates(run_tag):
        try:
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            names = os.listdir(path)
        except OSError:
            continue
        try:
            for name in names:
                _remove(os.path.join(path, name))
            os.rmdir(path)
        except OSError as error:
            print(f"dtrain agent: cannot remove {path}: {error}", file=sys.stderr)


def _remove(path: str) -> None:
    if stat.S_ISDIR(os.lstat(path).st_mode):
        from shutil import rmtree  # slow to import, and only for what workers put there

        rmtree(path)
    else:
        os.unlink(path)


def _candidates(run_tag: str) -> list[str]:
    folders = [os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp"]
    return [f"{folder}/dtrain-{run_tag[:16]}" for folder in folders if os.path.isabs(folder)]
