"""ddp names the device of every tensor that it makes: `torch.set_default_device` is the script's."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from ddp_worlds.default_device_cases import _CASES
from testbed.nursery import ROOT, Nursery
from torch.utils._device import _device_constructors

CONSTRUCTORS = {function.__name__ for function in _device_constructors()}


def unnamed(source: str) -> list[str]:
    """Return the calls of torch's constructors that do not say on which device."""
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in CONSTRUCTORS
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_every_constructor_of_a_tensor_names_its_device() -> None:
    files = [*(ROOT / "ddp").rglob("*.py")]
    found = {str(file.relative_to(ROOT)): unnamed(file.read_text(encoding="utf-8")) for file in files}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_the_rule_finds_a_call_without_a_device() -> None:
    assert unnamed("torch.zeros(3, dtype=x)") == ["1: torch.zeros(3, dtype=x)"]
    assert unnamed("torch.zeros(3, device=x)") == []


@pytest.mark.parametrize("group", ["gloo", "shm"])
@pytest.mark.parametrize("what", [*_CASES])
def test_training_on_the_cpu_works_with_another_default_device(
    nursery: Nursery, tmp_path: Path, what: str, group: str
) -> None:
    nursery.run(2, "ddp_worlds.default_device_cases:works", group=group, what=what, folder=tmp_path)
