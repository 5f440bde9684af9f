"""Keeps torch.compile out of this package's own frames, as it keeps out of torch's; the wrapped module is compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType

from ddp.torch_internals import skip_when_compiling

__all__ = ["skip_package"]


def skip_package(name: str) -> None:
    """Mark all functions of the modules of package `name` that are imported now. Does not import torch._dynamo."""
    for module in [module for key, module in sys.modules.items() if key.startswith(f"{name}.")]:
        for code in _codes_of(module):
            skip_when_compiling(code)


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions made in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
