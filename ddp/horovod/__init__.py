"""Horovod's interface: collectives on tensors, an optimizer that averages gradients, broadcasts of state."""
