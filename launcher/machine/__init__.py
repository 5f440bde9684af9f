"""What this machine is: processes, control groups, GPUs, processors, network. Knows nothing of runs."""
