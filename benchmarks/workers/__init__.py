"""Code of the measured processes; started by benchmarks/run_worker.py, never imported by the runner."""
