"""Training in which a failed rank costs the others one step: `ddp.State` and `ddp.resilient`."""
