"""Target: trainings in which one rank makes a user's mistake, all catch the errors, and go on."""

from __future__ import annotations

from . import programs
from .tally import Budget, Tally

# Module, ranks, hosts, bytes of a part, programs in one job.
_JOBS = [
    ("torture.program_retry", 2, 1, 524288, 100),
    ("torture.program_retry", 3, 1, 4096, 100),
    ("torture.program_retry", 2, 2, 524288, 100),
    ("torture.program_retry", 3, 2, 4096, 100),
]


def run(budget: Budget, jobs: list[tuple] = _JOBS) -> Tally:
    """Run jobs in turn."""
    return programs.run(budget, jobs)
