"""Which rank hangs: where the ranks are by their stacks, how long a silence is normal, who is to blame. Pure."""
