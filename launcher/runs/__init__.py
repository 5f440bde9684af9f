"""The runs of this user: what is written of each, where they are listed, how one is asked and stopped."""
