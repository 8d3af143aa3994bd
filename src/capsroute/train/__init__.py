"""Training: config, engine, checkpoints, several processes."""
