"""`dtrain check`: command.py on this machine, examiner.py on each host."""
