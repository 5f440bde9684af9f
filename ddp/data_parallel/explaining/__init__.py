"""What `model.explain` says: where the time of a step goes, and what it would be in other worlds."""
