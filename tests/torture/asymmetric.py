"""Target: trainings in which one worker does other local work end with the same bits as without it."""

from __future__ import annotations

from . import programs
from .tally import Budget, Tally

# Module, ranks, hosts, bytes of a part, programs in one job.
_JOBS = [
    ("torture.program_asymmetric", 2, 1, 524288, 100),
    ("torture.program_asymmetric", 3, 1, 524288, 100),
]
_STALL_ABORT_S = 150  # a rank may wait this long for a child on a busy machine


def run(budget: Budget, jobs: list[tuple] = _JOBS) -> Tally:
    """Run jobs in turn."""
    return programs.run(budget, jobs, _STALL_ABORT_S)
