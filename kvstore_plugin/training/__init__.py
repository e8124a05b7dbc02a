"""DistributedTrainer, and its helpers in a training loop."""
