"""Benchmarks of mykv against its peers; those named in docs/benchmarks.md run as ``python -m benchmarks.NAME``."""
