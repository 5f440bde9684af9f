"""A model split into pieces, and the user's optimizer over them, for parameter servers and central storage."""
