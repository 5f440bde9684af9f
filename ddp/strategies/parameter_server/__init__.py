"""The parameter server: what stands on the servers, what the workers do, and the way between them."""
