"""Buckets of gradients: their contents, their order, and how they are reduced."""
