"""Training: the step, the loop, metrics, checkpoints and recovery."""
