"""Sums over ranks by a fixed tree, and of a few numbers."""
