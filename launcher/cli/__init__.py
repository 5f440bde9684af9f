"""What the user types: options in, one command of `dtrain`, an exit code. Start at main.py."""
