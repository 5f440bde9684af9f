"""Agents on hosts reached by SSH. Start at stream.py."""
