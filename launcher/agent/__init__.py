"""On each host: starts, watches and stops its workers, reports, and decides nothing. Start at main.py."""
