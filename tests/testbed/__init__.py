"""Hosts, networks and clusters for the tests, made of real parts on one machine."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
EXHAUSTIVE = bool(os.environ.get("EXHAUSTIVE"))  # try all of what otherwise is a selection: `scripts/test --full`
