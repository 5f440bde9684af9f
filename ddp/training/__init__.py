"""A ready-made training loop: fit, evaluate, predict, save, with callbacks."""
