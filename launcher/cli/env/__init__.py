"""`dtrain env`: what a bug report needs to say of this machine. Start at report.py."""
