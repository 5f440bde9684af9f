"""Compositions of a run that goes on after a rank was lost: who announces them, and how ranks meet under a new one."""
