"""The cost of a step on this link: bucket sizes that follow from it, and the report of `model.explain`."""
