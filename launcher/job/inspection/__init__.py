"""What commands of this user may see and do in a run that goes on: stacks of its ranks, and debuggers in them. Pure."""
