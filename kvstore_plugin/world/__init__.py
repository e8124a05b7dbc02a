"""This process as one rank: MPI, the core, settings, who is alive. Nothing in here imports MXNet."""
