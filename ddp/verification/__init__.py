"""Compares distributed training of a model with training in one process."""
