"""DistributedTrainer, and what goes with it in a training loop."""
