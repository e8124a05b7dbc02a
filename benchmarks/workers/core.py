"""The compiled core alone, on numpy arrays and on its own memory; MXNet is not imported."""

from __future__ import annotations

from typing import Any

import mykv_core
import numpy as np
from mpi4py import MPI

from .job import Job, Series, timed
from .meeting import Meeting

COMM = MPI.COMM_WORLD


def pushpull(case: dict[str, Any], meeting: Meeting) -> Series:
    """Seconds of one allreduce of 'nbytes' bytes of any numpy array, copied in and out."""
    array = np.zeros(case["nbytes"] // 4, np.float32)

    def work() -> None:
        mykv_core.submit_allreduce(case["id"], [array], [array]).wait()

    times = timed(case, meeting, lambda: array.fill(COMM.rank + 1), work)
    _check(array, case)
    yield "time", times


def in_place(case: dict[str, Any], meeting: Meeting) -> Series:
    """Seconds of one allreduce of 'nbytes' bytes in shared memory, where they lie."""
    buffer = mykv_core.allocate(case["nbytes"])
    array = np.frombuffer(buffer, np.float32)

    def work() -> None:
        mykv_core.submit_bucket(case["id"], buffer, 0, array.size, "float32").wait()

    times = timed(case, meeting, lambda: array.fill(COMM.rank + 1), work)
    _check(array, case)
    yield "time", times


def _check(array: Any, case: dict[str, Any]) -> None:
    expected = COMM.size * (COMM.size + 1) / 2
    if array[0] != expected or array[-1] != expected:
        raise ArithmeticError(f"{case['id']}: the result holds {array[0]} and {array[-1]}, not {expected}.")


if __name__ == "__main__":
    mykv_core.init(COMM.py2f())
    Job().run(COMM.rank, {"pushpull": pushpull, "in place": in_place})
    mykv_core.shutdown()
