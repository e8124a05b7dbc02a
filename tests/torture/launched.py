"""A rank that only creates a world of the core: its messages are the first of the job."""

from __future__ import annotations

from compiled import core
from mpi4py import MPI

from .job import say

if __name__ == "__main__":
    core.init(MPI.COMM_WORLD.py2f(), {})
    core.shutdown()
    say(f"fine {MPI.COMM_WORLD.rank}")
