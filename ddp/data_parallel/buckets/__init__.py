"""Which gradients travel together, in which order, and how."""
