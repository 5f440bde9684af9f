"""For modules that name this one; others import testbed.compressed and testbed.training."""

from testbed.compressed import Bucket, error
from testbed.training import assert_same_bits

__all__ = ["Bucket", "assert_same_bits", "error"]
