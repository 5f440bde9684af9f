"""The guides say what is there: links lead somewhere, code compiles, options exist, and marked commands run."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from testbed.imports import ROOT
from testbed.processes import run_program

from launcher.cli.main import cli

PAGES = [
    page
    for folder in ("", "launcher", "ddp", "scripts/bench", "scripts/examples", "tests")
    for page in sorted((ROOT / folder).glob("*.md"))
]
README_LINES = 150
LINE = 120
_FENCE = re.compile(
    r"^(?P<marks>(?:<!-- run -->\n)?)```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"(?<!`)\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _fences(page: Path, language: str) -> Iterator[tuple[str, str]]:
    """Yield the marks and the code of the page's blocks in a language."""
    for found in _FENCE.finditer(page.read_text(encoding="utf-8")):
        if found["language"] == language:
            yield found["marks"], found["code"]


def _prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives the headings of a page."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in _HEADING.findall(_prose(page))}


def _commands(page: Path) -> list[list[str]]:
    """Return what is typed in the page's blocks, in words, without what stands behind `#` or is piped on."""
    typed = []
    for language in ("console", ""):
        for _, code in _fences(page, language):
            lines = code.replace("\\\n", " ").splitlines()
            typed += [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]
    return typed


def test_the_front_page_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= README_LINES


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for found in _LINK.finditer(_prose(page)):
        path, _, anchor = found["target"].partition("#")
        if path.startswith(("http:", "https:")):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), found["target"]
        if anchor:
            assert anchor in _anchors(target), found["target"]


def test_the_tests_that_are_shown_are_there() -> None:
    page = (ROOT / "tests/README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^<!-- (\S+) -->\n```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == page.count("```python") > 5
    for file, code in shown:
        there = [line.strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
        wanted = [line.strip() for line in code.splitlines()]
        assert any(there[at : at + len(wanted)] == wanted for at in range(len(there))), f"{file} has no\n{code}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_lines_of_prose_are_short(page: Path) -> None:
    if page.name == "REFERENCE.md":  # written by scripts/reference.py
        return
    long = [line for line in _prose(page).splitlines() if len(line) > LINE and "|" not in line and "](" not in line]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_python_compiles_and_names_of_ddp_exist(page: Path) -> None:
    import ddp

    for _, code in _fences(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ddp":
                assert hasattr(ddp, node.attr), node.attr


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_have_the_options_that_they_are_typed_with(page: Path) -> None:
    for words in _commands(page):
        if words[:1] != ["dtrain"] or words[1:2] == ["sbatch"]:
            continue
        command = cli.commands[words[1]]
        options = {
            name: option for option in command.params if isinstance(option, click.Option) for name in option.opts
        }
        left = words[2:]
        while left and left[0].startswith("-"):
            name, _, value = left.pop(0).partition("=")
            assert name in options or name in ("-h", "--help"), words
            if not options[name].is_flag and not value:
                left.pop(0)


def _marked() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for marks, code in _fences(page, "console"):
            if "run" in marks:
                yield from ((_name(page), line[2:]) for line in code.splitlines() if line.startswith("$ "))


@pytest.mark.parametrize(("page", "line"), list(_marked()))
def test_marked_commands_run(page: str, line: str, tmp_path: Path) -> None:
    """In a folder with `scripts` and a `train.py` that does one all-reduce."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "train.py").write_text("import ddp, torch\nddp.init()\ntorch.distributed.all_reduce(torch.ones(1))\n")
    program, *words = shlex.split(line, comments=True)
    argv = {"dtrain": ["-m", "launcher"], "python": []}[program]
    result = run_program(sys.executable, *argv, *words, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_reference_and_the_man_page_are_as_the_help_is() -> None:
    result = run_program(sys.executable, ROOT / "scripts/reference.py", "--check")
    assert (result.returncode, result.stderr) == (0, "")
