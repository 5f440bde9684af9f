"""Agents on hosts that are reached by SSH: stream.py is the entrance."""
