"""Training that continues when workers die."""
