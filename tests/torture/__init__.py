"""Long runs that try to break mykv: random programs, killed and stopped workers, delays, a million steps.

``make torture MINUTES=10`` runs all targets within that time, and prints for each how often it was tried, survived and
failed. Each target is a file with a function ``run(budget) -> Tally``; a line in `targets.py` plugs it in. What the
workers of a target do is another file, which mpirun starts with ``python -m``. Short forms are in
tests/project/test_torture.py, and docs/reliability.md says what was found.

Whatever is random comes from a seed that a failure shows: ``python -m torture --only programs --seed 17`` begins there.
"""
