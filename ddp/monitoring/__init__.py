"""What this process says of itself while it runs: its progress to the launcher, where it stands to other ranks."""
