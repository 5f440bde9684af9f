"""`dtrain check`: command.py here, examiner.py on each host."""
