"""The ways to train behind `ddp.strategy`, one module each."""
