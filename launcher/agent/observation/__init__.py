"""What the agent sees of its workers: signs of life, steps, stacks, collectives."""
