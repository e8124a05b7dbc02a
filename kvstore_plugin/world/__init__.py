"""This process as one rank: MPI, the core, settings, the failure detector. No file here imports MXNet."""
