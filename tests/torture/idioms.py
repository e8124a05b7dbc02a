"""Target: trainings drawn from what users write, on all workers against one process of plain gluon.Trainer."""

from __future__ import annotations

from . import programs
from .tally import Budget, Tally

# Module, ranks, hosts, bytes of a part, programs in one job.
_JOBS = [
    ("torture.program_idioms", 2, 1, 524288, 100),
    ("torture.program_idioms", 3, 1, 524288, 100),
    ("torture.program_idioms", 1, 1, 524288, 100),
]
_STALL_ABORT_S = 150  # a rank may be busy with a child that long, on a machine that does other work too


def run(budget: Budget, jobs: list[tuple] = _JOBS) -> Tally:
    """Run jobs in turn."""
    return programs.run(budget, jobs, _STALL_ABORT_S)
