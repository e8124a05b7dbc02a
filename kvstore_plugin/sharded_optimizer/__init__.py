"""MXNet's optimizers with work and states divided over the workers, and their files."""
