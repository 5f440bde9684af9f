"""Reports of this process while it runs: its progress for the launcher, its position for other ranks."""
