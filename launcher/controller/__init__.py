"""The one loop of a run, on the machine where the command was typed."""
