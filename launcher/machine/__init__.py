"""This machine: processes, control groups, GPUs, processors, network. Knows nothing of runs."""
