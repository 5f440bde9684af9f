"""Generations of a run that continues after a rank was lost: their announcement, and how the ranks meet again."""
