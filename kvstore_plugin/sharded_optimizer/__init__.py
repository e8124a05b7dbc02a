"""MXNet's optimizers with work and states divided among the workers, and their files."""
