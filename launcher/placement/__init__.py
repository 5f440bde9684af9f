"""Pure: what was asked for and which hosts there are -> ranks, GPUs, processors, variables of workers."""
