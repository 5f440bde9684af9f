"""Training in which a rank that fails costs the others one step: `ddp.State` and `ddp.resilient`."""
