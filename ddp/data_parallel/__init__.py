"""DistributedDataParallel: the wrapper, the reducer, and the status that ranks exchange in each step."""
