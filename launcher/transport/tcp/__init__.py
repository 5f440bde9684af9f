"""Nodes started by hand: listener.py on node 0, dial.py on the others."""
