"""The commands for runs that have begun: which there are, what they write, how they are stopped and repeated."""
