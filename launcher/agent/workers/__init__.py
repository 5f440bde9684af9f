"""The workers of one host: started by exec or by fork, and restarted alone."""
