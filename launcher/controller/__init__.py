"""The controller of a run, on the machine where the command was typed: its only event loop."""
