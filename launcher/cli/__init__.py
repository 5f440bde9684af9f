"""The command line: from options to an exit code, one function per command. Start at main.py."""
