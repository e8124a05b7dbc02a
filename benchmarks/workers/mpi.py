"""MPI_Allreduce through mpi4py, in place on a numpy array; no MXNet."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from mpi4py import MPI

from .job import Job, Series, timed
from .meeting import Meeting

COMM = MPI.COMM_WORLD


def pushpull(case: dict[str, Any], meeting: Meeting) -> Series:
    """Seconds of one MPI_Allreduce of 'nbytes' bytes."""
    array = np.zeros(case["nbytes"] // 4, np.float32)
    times = timed(case, meeting, lambda: array.fill(COMM.rank + 1), lambda: COMM.Allreduce(MPI.IN_PLACE, array))
    expected = COMM.size * (COMM.size + 1) / 2
    if array[0] != expected or array[-1] != expected:
        raise ArithmeticError(f"{case['id']}: the result holds {array[0]} and {array[-1]}, not {expected}.")
    yield "time", times


def late(case: dict[str, Any], meeting: Meeting) -> Series:
    """Share of a core that rank 0 uses while it waits 'seconds' for the others."""
    array = np.ones(1024, np.float32)
    shares = []
    for _ in range(case["iterations"]):
        begin, cpu = meeting.start(), time.process_time()
        if COMM.rank != 0:
            time.sleep(case["seconds"])
        COMM.Allreduce(MPI.IN_PLACE, array)
        used = (time.process_time() - cpu) / (time.perf_counter() - begin)
        shares.append(used if COMM.rank == 0 else 0.0)
    yield "share", shares


if __name__ == "__main__":
    Job().run(COMM.rank, {"pushpull": pushpull, "late": late})
