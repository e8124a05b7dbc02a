"""Long runs that try to break mykv: random programs, killed and stopped workers, delays, a million steps.

``make torture MINUTES=10`` runs all targets within that time, and prints the numbers of tries, successes and failures
of each. Each target is a file with a function ``run(budget) -> Tally``; a line in `targets.py` registers it. The
workers' program is another file, which mpirun starts with ``python -m``. Short forms are in
tests/project/test_torture.py, and docs/reliability.md lists the findings.

All randomness comes from a seed that a failure shows: ``python -m torture --only programs --seed 17`` begins there.
"""
