"""Agents on hosts that are reached by SSH. Start at stream.py."""
