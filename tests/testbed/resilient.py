"""Runs under dtrain in which ranks fail where the words of the script's arguments say, and what the ranks printed."""

from __future__ import annotations

import re
from pathlib import Path

from testbed.processes import Result, run_dtrain


def run(
    script: Path, folder: Path, *words: str, ranks: int = 2, restarts: int = 9, backend: str = "", code: int = 0
) -> Result:
    options = ("--nproc-per-node", str(ranks), "--max-restarts", str(restarts))
    result = run_dtrain("run", *options, script, *words, cwd=folder, env={"DTRAIN_BACKEND": backend})
    assert result.returncode == code, result
    return result


def said(result: Result, word: str) -> dict[int, str]:
    """What each rank printed last after `word`."""
    lines = re.findall(rf"^\[\S+:(\d+)\] {word} (.*)$", result.stdout, re.MULTILINE)
    return {int(rank): text for rank, text in lines}
