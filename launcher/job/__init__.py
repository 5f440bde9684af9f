"""The job, pure: events in, commands out; nothing here waits or touches a file. Start at job.py."""
