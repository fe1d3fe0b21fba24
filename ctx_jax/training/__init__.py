"""Training: state, step, loop, and what they are made of (optimizers, schedules, checkpoints, metrics, FLOPs)."""
