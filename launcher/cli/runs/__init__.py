"""The commands for existing runs: they list, show, stop and repeat them."""
