"""Nodes on which somebody types the command: the door on node 0 (door.py), and the others (join.py)."""
