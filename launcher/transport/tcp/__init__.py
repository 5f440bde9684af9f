"""Nodes on which somebody types the command: listener.py on node 0, dial.py on the others."""
