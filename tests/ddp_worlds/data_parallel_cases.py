"""For the modules here; tests import testbed.training."""

from testbed.training import Conv, Mlp, Odd, assert_replicas_equal, batch, build, loss_of

__all__ = ["Conv", "Mlp", "Odd", "assert_replicas_equal", "batch", "build", "loss_of"]
