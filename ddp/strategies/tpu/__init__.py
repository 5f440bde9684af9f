"""TPUs: one program over all devices of all hosts, compiled by torch_xla."""
