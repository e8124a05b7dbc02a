"""Integration with MXNet's own trainers and modules, AMP, and scripts for Horovod."""
