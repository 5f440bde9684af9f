"""Communication between processes: objects, broadcasts, reductions, comparison of layouts, shared memory."""
