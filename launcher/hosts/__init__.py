"""The hosts of a run: names, ranges, host files, filters, SLURM's allocation."""
