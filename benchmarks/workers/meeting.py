"""A barrier that treats all peers alike: ranks of one host agree on a common starting time.

A barrier of MPI, Horovod or a parameter server would favour its owner, or leave it spinning or asleep. Here each rank
marks itself as ready in a mapped file; rank 0 then writes a time in the near future, by the clock that all processes of
a host share, and all ranks sleep until shortly before it.
"""

from __future__ import annotations

import mmap
import os
import time

_SLOT = 8  # words of 8 bytes for each rank: one cache line
_SPIN_S = 0.0002  # a sleeper wakes up this late, so ranks wake earlier and spin if each has a core
_PATIENCE_S = 120.0


class Meeting:
    """One rank's access to the file.

    Parameters
    ----------
    path : str
        File of at least `Meeting.nbytes(size)` zeros.
    rank, size : int
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        self._rank, self._size, self._turn = rank, size, 0
        with open(path, "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), self.nbytes(size))).cast("q")
        self._pause = 0.00005 * size  # many waiting ranks must not fill the cores
        self._spins = size <= len(os.sched_getaffinity(0))

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes of the file for `size` ranks."""
        return 8 * _SLOT * (size + 1)

    def start(self) -> float:
        """Wait for all ranks, then for the common moment; returns time.perf_counter() now."""
        before = self._words[0]
        self._turn += 1
        self._words[_SLOT * (self._rank + 1)] = self._turn
        give_up = time.monotonic() + _PATIENCE_S
        if self._rank == 0:
            while any(self._words[_SLOT * (rank + 1)] != self._turn for rank in range(self._size)):
                self._sleep(give_up)
            self._words[0] = time.monotonic_ns() + int(1e9 * (4 * self._pause + 0.0005))
        else:
            while self._words[0] == before:
                self._sleep(give_up)
        moment = self.moment
        early = _SPIN_S if self._spins else 0.0
        time.sleep(max(0.0, moment - early - time.monotonic()))
        while time.monotonic() < moment:
            pass
        return time.perf_counter()

    @property
    def moment(self) -> float:
        """The common moment of the last start, as time.perf_counter() counts (Linux has one clock for both)."""
        return self._words[0] / 1e9

    def _sleep(self, give_up: float) -> None:
        if time.monotonic() > give_up:
            raise TimeoutError(f"Rank {self._rank} has waited {_PATIENCE_S:.0f} s for the others, turn {self._turn}.")
        time.sleep(self._pause)
