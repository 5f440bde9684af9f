"""The job, pure: events in, commands out; nothing here waits or touches a file. Start at job.py.

word         what it is
run          all from the command to the outcome: run.py
attempt      from the start of all workers to the end of all of them, numbered from 0: attempt.py
member       a host of an attempt; while it goes on, lost ones leave and others come: recovery/members.py
rank         a number in an attempt, with a host and a state: ranks.py
worker       the process of a rank; another may take its place: recovery/restarts.py
world        the ranks that run one command: those that meet each other
generation   a number within an attempt: the workers of a world meet once in each
"""
