"""Runs in the allocations of SLURM, and batch scripts for it."""
