"""A training loop that is already written: fit, evaluate, predict, save, with callbacks."""
