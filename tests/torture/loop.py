"""The loop of ranks that run programs one after the other: ``FIRST COUNT SECONDS``, and a line with the outcome."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Callable

import kvstore_plugin as mykv
from mpi4py import MPI

from .job import say


def loop(run: Callable[[int], tuple[list[str], bool]], limit: float) -> None:
    """Run programs until their number or the time is over.

    Parameters
    ----------
    run : callable
        Given the seed of a program, returns the errors, each line with "program SEED,", and whether a fault was
        planted.
    limit : float
        Seconds for one program; one that takes longer ends the job.
    """
    first, count, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    comm, rank = MPI.COMM_WORLD, mykv.rank()
    end = time.monotonic() + seconds
    problems: list[str] = []
    done = faults = 0
    for seed in range(first, first + count):
        if seed % 10 == 0:
            if not comm.bcast(time.monotonic() < end):
                break
            if rank == 0:
                say(f"at {seed}")
        watch = threading.Timer(limit, _hung, (comm, seed))
        watch.daemon = True
        watch.start()
        wrong, planted = run(seed)
        watch.cancel()
        problems += wrong
        done, faults = done + 1, faults + planted
    everybody = comm.gather(problems)
    if rank == 0:
        failed = [one for rank in everybody for one in rank]
        for one in failed[:20]:
            say("FAILED " + one.replace("\n", " "))
        say(f"faults {faults} done {done} failed {len({one.split('program ')[-1].split(',')[0] for one in failed})}")
    mykv.barrier()


def _hung(comm: Any, seed: int) -> None:
    say(f"FAILED hang: program {seed}")
    comm.Abort(3)
