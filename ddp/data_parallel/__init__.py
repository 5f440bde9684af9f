"""DistributedDataParallel: the wrapper, the reducer, and what the ranks tell each other in each step."""
