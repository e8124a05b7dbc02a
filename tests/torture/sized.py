"""A rank with large arrays: ``sized BYTES CGROUP``, where BYTES is its share, and CGROUP '-' or a folder to enter.

It reduces an array in place and a bucket in shared memory of that size, one after the other. In a cgroup it then asks
for more shared memory than its limit leaves, which is an error, and goes on.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from compiled import core
from mpi4py import MPI

from .job import say


def _right(values: np.ndarray) -> bool:
    wanted = sum(range(1, core.size() + 1))
    return bool(values.min() == wanted == values.max())


def main() -> None:
    nbytes, cgroup = int(sys.argv[1]), sys.argv[2]
    if cgroup != "-":
        with open(f"{cgroup}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))
    comm = MPI.COMM_WORLD
    core.init(comm.py2f(), {})
    count = nbytes // 4
    values = np.full(count, core.rank() + 1, "float32")
    comm.Barrier()
    assert core.submit_allreduce("array", [values], [values], "sum").wait(300) and _right(values)
    del values
    comm.Barrier()
    buffer = core.allocate(4 * count)
    values = np.frombuffer(buffer, "float32")
    values.fill(core.rank() + 1)
    comm.Barrier()
    assert core.submit_bucket("bucket", buffer, 0, count, "float32").wait(300) and _right(values)
    comm.Barrier()
    if cgroup != "-":
        kept = []
        try:
            while True:
                kept.append(core.allocate(nbytes // 4))
        except RuntimeError as error:
            assert "of this container's limit of" in str(error), error
        comm.Barrier()
        del kept
        comm.Barrier()
        assert core.submit_bucket("bucket", buffer, 0, count, "float32", op="max").wait(300)
    say(f"right on {core.rank()}")
    comm.Barrier()
    core.shutdown()


if __name__ == "__main__":
    main()
