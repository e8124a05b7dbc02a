"""Training that goes on when workers die."""
