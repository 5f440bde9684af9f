"""For modules that name this one; others import testbed.programs."""

from testbed.programs import follow

__all__ = ["follow"]
