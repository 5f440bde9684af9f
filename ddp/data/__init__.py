"""The samples of each rank, and metrics summed over the ranks."""
