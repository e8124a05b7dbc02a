"""Benchmarks of mykv against its peers; each module named in docs/benchmarks.md runs as ``python -m benchmarks.NAME``."""
