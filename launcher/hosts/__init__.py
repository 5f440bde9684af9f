"""Who the hosts of a run are: names, ranges, host files, filters, SLURM's allocation."""
