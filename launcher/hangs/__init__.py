"""Detection of hanging ranks: their positions from stacks, normal lengths of silence, the ranks to blame. Pure."""
