"""The parameter server: its servers, its workers, and the connections between them."""
