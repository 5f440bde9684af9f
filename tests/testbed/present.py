"""Takes a value that may be missing in the product's types, and that a test knows to be there."""

from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """Return a value that is not None; fail the test if it is."""
    assert value is not None, "a value is missing"
    return value
