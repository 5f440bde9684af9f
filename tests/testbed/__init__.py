"""Hosts, networks and clusters for the tests, made of real parts on one machine."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
