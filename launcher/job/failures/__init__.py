"""What a failure is, and which of several is the cause. Pure."""
