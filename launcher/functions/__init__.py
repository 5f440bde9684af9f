"""`launcher.launch()`: calls a function of a Python program or notebook in all workers of a run."""
