"""Messages between a parameter server and its clients, over ZeroMQ: authenticated, each at most once, in order."""
