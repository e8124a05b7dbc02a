"""Measures the loads and stores of an allreduce in processes that do not wait for each other.

This process forks the ranks itself, over shared anonymous memory like the core's. Each rank writes its own array, all
start at one moment, and each sums its part of all arrays into all of them. See limit.cpp.

Also measures a bare barrier.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import time
from typing import Any, Callable

import numpy as np

from .job import Job, Series, timed
from .meeting import Meeting

KERNELS = ("plain", "prefetching", "streaming", "blocks")
MANY_KERNELS = ("plain", "blocks")  # the kernels for more than two arrays
PAGES = ("normal pages", "huge pages where allowed")
_IN_A_ROW = 400
_ALIGNMENT = 2 << 20  # the size of a huge page


class Limit:
    """One rank."""

    def __init__(self, rank: int, ranks: int, library: str, memory: dict[str, mmap.mmap], words: mmap.mmap) -> None:
        self._rank, self._ranks = rank, ranks
        loaded = ctypes.CDLL(library)
        self._two, self._many, self._barrier = loaded.limit, loaded.limit_of_many, loaded.barrier
        self._two.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._many.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
        self._barrier.argtypes = [ctypes.c_void_p, ctypes.c_uint]
        self._memory = memory
        self._words = np.frombuffer(words, np.uint8).ctypes.data

    def limit(self, case: dict[str, Any], meeting: Meeting) -> Series:
        """Seconds of each kernel on each kind of pages, for arrays of 'nbytes' bytes."""
        part = case["nbytes"] // self._ranks
        for pages, memory in self._memory.items():
            whole = np.frombuffer(memory, np.uint8)
            first = -whole.ctypes.data % _ALIGNMENT
            slots = [whole[first + r * case["nbytes"] :][: case["nbytes"]].view(np.float32) for r in range(self._ranks)]
            mine = [slot.ctypes.data + self._rank * part for slot in slots]
            many = (ctypes.c_void_p * self._ranks)(*mine)
            for number, kernel in enumerate(KERNELS if self._ranks == 2 else MANY_KERNELS):

                def prepare(slots: Any = slots) -> None:
                    slots[self._rank].fill(self._rank + 1)

                def work(number: int = number, mine: Any = mine, many: Any = many) -> None:
                    if self._ranks == 2:
                        self._two(number, *mine, part // 4)
                    else:
                        self._many(number, many, self._ranks, part // 4)

                times = _until_all_are_done(case, meeting, prepare, work)
                meeting.start()
                if not all((slot == self._ranks * (self._ranks + 1) / 2).all() for slot in slots):
                    raise ArithmeticError(f"The kernel '{kernel}' sums wrongly.")
                meeting.start()
                yield f"{kernel}, {pages}", times

    def barrier(self, case: dict[str, Any], meeting: Meeting) -> Series:
        """Seconds that a barrier of all processes takes; each process sleeps until the last process has arrived."""
        yield "time", timed(case, meeting, lambda: None, lambda: self._barrier(self._words, self._ranks))
        meeting.start()
        begin = time.process_time()
        for _ in range(_IN_A_ROW):
            self._barrier(self._words, self._ranks)
        used = time.process_time() - begin
        meeting.start()
        yield "cpu of all ranks", [used / _IN_A_ROW]


def _until_all_are_done(
    case: dict[str, Any], meeting: Meeting, prepare: Callable[[], Any], work: Callable[[], Any]
) -> list[float]:
    """Seconds from the common start: processes that outnumber the cores begin one after another."""
    times = []
    for iteration in range(case["warmup"] + case["iterations"]):
        meeting.start()
        prepare()
        meeting.start()
        work()
        end = time.perf_counter()
        if iteration >= case["warmup"]:
            times.append(end - meeting.moment)
    return times


def allocate(nbytes: int, ranks: int) -> dict[str, mmap.mmap]:
    """Shared anonymous memory for one array per rank, with and without a request for huge pages."""
    memory = {pages: mmap.mmap(-1, ranks * nbytes + _ALIGNMENT) for pages in PAGES}
    with contextlib.suppress(AttributeError, OSError):  # Python 3.8 and later; a kernel without huge pages
        memory[PAGES[1]].madvise(mmap.MADV_HUGEPAGE)
    return memory


def main() -> int:
    """Fork the ranks and wait for them."""
    job = Job()
    memory, words = allocate(job.options["nbytes"], job.size), mmap.mmap(-1, mmap.PAGESIZE)
    children = []
    for rank in range(job.size):
        child = os.fork()
        if child == 0:
            mine = Limit(rank, job.size, job.options["library"], memory, words)
            job.run(rank, {"limit": mine.limit, "barrier": mine.barrier})
            os._exit(0)
        children.append(child)
    return int(any(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    sys.exit(main())
