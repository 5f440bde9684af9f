"""What a step costs on this link: the sizes of buckets that follow from it, and what `model.explain` says of it."""
