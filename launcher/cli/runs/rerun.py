"""`dtrain rerun`: starts the command of an earlier run again, in its folder and at the same commit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import RunError, UsageError
from launcher.runs.git import Git
from launcher.runs.record import read_manifest
from launcher.runs.registry import Entry
from launcher.runs.secrets import WITHHELD


@dataclass(frozen=True)
class Again:
    """The arguments of `dtrain run`, the variables that set options, and how the code differs; empty if it does not."""

    argv: tuple[str, ...]
    as_torchrun: bool
    variables: Mapping[str, str]
    code: str


def prepare_rerun(entry: Entry, more: Sequence[str], *, any_commit: bool, say: Callable[[str], None]) -> Again:
    """Change to the folder of a run and return its command with `more` options. Raises RunError, UsageError."""
    manifest = read_manifest(entry)
    if not manifest:
        raise RunError(f"the record of how run {entry.run_id} was started no longer exists: {entry.folder}/run.json")
    command: Mapping[str, Any] = manifest["command"]
    argv: list[str] = command["words"]
    if command.get("is_function"):
        raise RunError(
            f"run {entry.run_id} is of a function that a Python program gave to launcher.launch(); call it there"
        )
    if withheld := [arg for arg in argv if WITHHELD in arg]:
        before = argv[argv.index(withheld[0]) - 1 : argv.index(withheld[0])]
        shown = " ".join([*before, withheld[0]])
        raise UsageError(
            f"the command of run {entry.run_id} has secret values, which are not kept: {shown}; "
            "type it again, and give them by variables or files"
        )
    variables = _variables(entry.run_id, manifest)
    try:
        os.chdir(command["folder"])
    except OSError as error:
        raise RunError(f"the folder of run {entry.run_id}, {command['folder']}: {error.strerror}") from error
    os.environ["PWD"] = command["folder"]
    if code := _check_code(entry, manifest, any_commit=any_commit):
        say(code)
    first = len(argv) - command["script"]
    options = [arg for arg in argv[:first] if arg != "--"]
    return Again((*options, *more, "--", *argv[first:]), command["as_torchrun"], variables, code)


def _variables(run_id: str, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that set options then and are not set now. Raises UsageError for a secret one."""
    found = {}
    for option in manifest["options"].values():
        name, text = option["from"].partition(" or ")[0], option["text"]
        if text is None or name in os.environ:
            continue
        if text == WITHHELD:
            raise UsageError(f"run {run_id} had secret values in {name}, which are not kept; set {name} again")
        found[name] = text
    return found


def _check_code(entry: Entry, manifest: Mapping[str, Any], *, any_commit: bool) -> str:
    """Return how the code differs from the run's; empty if it does not. Raises UsageError for another commit."""
    git = manifest["git"]
    if git is None:
        return ""
    workdir = Path(manifest["workdir"])
    now = Git(workdir).look() if workdir.is_dir() else None
    commit = None if now is None else now.commit
    if now is None or commit != git["commit"]:
        is_now = "there is none now" if commit is None else f"now it is {commit[:12]}"
        text = f"run {entry.run_id} had commit {git['commit'][:12]} in {workdir}, {is_now}"
        if not any_commit:
            raise UsageError(f"{text}; git checkout {git['commit'][:12]}, or run it as it is: --any-commit")
        return text
    if git["clean"]:
        return "" if now.clean else f"{workdir} has changes that run {entry.run_id} did not have: git diff"
    if git["diff_file"] and now.diff == _kept(Path(entry.folder, git["diff_file"])):
        return ""
    kept = f"compare them: {git['diff_file']} in its folder" if git["diff_file"] else "they were not kept"
    return f"run {entry.run_id} had uncommitted changes; {kept}"


def _kept(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
