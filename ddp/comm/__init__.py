"""Values between processes: objects, broadcasts, combined numbers, layouts that are compared, shared memory."""
