"""Central storage: one copy of the variables in the memory of one host, shared by its processes."""
