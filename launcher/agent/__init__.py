"""On each host: starts, watches and stops its workers, and reports; decides nothing. Start reading at main.py."""
