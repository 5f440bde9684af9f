"""Every public name has a docstring, and `scripts/docs` makes the API reference of them without a warning."""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from testbed.processes import run_program
from testbed.require import require

import ddp

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "scripts" / "docs"
MODULES = [
    *re.findall(r"^  (ddp[\w.]*)$", DOCS.read_text(), re.MULTILINE),
    *(f"ddp.{name}" for name in ("callbacks", "compression", "errors", "horovod")),
    "launcher",
]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_says_what_it_is(module: str) -> None:
    lacking = [name for name, text in _documented(importlib.import_module(module)) if not _is_sentence(text)]
    assert not lacking, f"without a docstring: {', '.join(lacking)}"


@pytest.mark.parametrize("module", ["ddp", "ddp.compression", "ddp.horovod"])
def test_a_function_of_a_group_says_which_ranks_call_it(module: str) -> None:
    collectives = {
        name: inspect.getdoc(value) or ""
        for name, value in _public(importlib.import_module(module))
        if inspect.isroutine(value) and {"group", "process_group"} & set(inspect.signature(value).parameters)
    }
    assert collectives
    silent = [
        name
        for name, text in collectives.items()
        if not re.search(r"[Ee]very rank|^Like `|^Start an? `|all ranks", text)
    ]
    assert not silent


def test_the_reference_is_made_without_a_warning(tmp_path: Path) -> None:
    require(find_spec("pdoc"), "pdoc", "pip install -e '.[dev]'")
    variables = {"PYTHON": sys.executable}
    result = run_program(DOCS, "--here", tmp_path / "reference", cwd=tmp_path, env=variables, timeout=200)
    assert result.returncode == 0, result
    page = (tmp_path / "reference" / "ddp.html").read_text()
    modules = {name for name, value in _public(ddp) if inspect.ismodule(value)}
    for name, _ in _public(ddp):
        assert (tmp_path / "reference" / "ddp" / f"{name}.html").exists() if name in modules else f'id="{name}"' in page


def _public(module: ModuleType) -> Iterator[tuple[str, object]]:
    for name in getattr(module, "__all__", ()):
        yield name, getattr(module, name)


def _documented(module: ModuleType) -> Iterator[tuple[str, str | None]]:
    """The docstrings of a module, of its public names, and of their public methods and properties."""
    yield module.__name__, module.__doc__
    for name, value in _public(module):
        if inspect.isclass(value):
            own = value.__doc__ or ""
            yield name, None if own.startswith(f"{value.__name__}(") else own  # a dataclass's is its signature
            for member, what in vars(value).items():
                if not member.startswith("_") and isinstance(what, _MEMBERS):
                    yield f"{name}.{member}", inspect.getdoc(getattr(value, member))
        elif inspect.isroutine(value) or inspect.ismodule(value):
            yield name, inspect.getdoc(value)


_MEMBERS = (property, cached_property, classmethod, staticmethod, type(_public))


def _is_sentence(text: str | None) -> bool:
    return text is not None and len(text.split()) >= 4 and text.lstrip()[0].isupper()
