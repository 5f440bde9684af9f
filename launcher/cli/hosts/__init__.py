"""The commands about hosts without a run: what they are, and what is kept there."""
