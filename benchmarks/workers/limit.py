"""How fast two processes can do the loads and stores of an allreduce if nobody has to wait for anybody.

This process forks the ranks itself, over shared anonymous memory like the core's. Each rank writes its own array, all
start at one moment, and each sums one half of both arrays into both. See limit.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from typing import Any

import numpy as np

from .job import Job, Series, timed
from .meeting import Meeting

KERNELS = ("plain", "prefetching", "streaming", "blocks")
PAGES = ("normal pages", "huge pages where allowed")
RANKS = 2
_ALIGNMENT = 2 << 20  # of huge pages


class Limit:
    """One rank."""

    def __init__(self, rank: int, library: str, memory: dict[str, mmap.mmap]) -> None:
        self._rank = rank
        self._function = ctypes.CDLL(library).limit
        self._function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._memory = memory

    def limit(self, case: dict[str, Any], meeting: Meeting) -> Series:
        """Seconds of each kernel on each kind of pages, for arrays of 'nbytes' bytes."""
        half = case["nbytes"] // 2
        for pages, memory in self._memory.items():
            whole = np.frombuffer(memory, np.uint8)
            first = -whole.ctypes.data % _ALIGNMENT
            slots = [whole[first + r * case["nbytes"] :][: case["nbytes"]].view(np.float32) for r in range(RANKS)]
            mine = [slot.ctypes.data + self._rank * half for slot in slots]
            for number, kernel in enumerate(KERNELS):

                def prepare(slots: Any = slots) -> None:
                    slots[self._rank].fill(self._rank + 1)

                def work(number: int = number, mine: Any = mine) -> None:
                    self._function(number, *mine, half // 4)

                times = timed(case, meeting, prepare, work)
                meeting.start()
                if not all((slot == RANKS * (RANKS + 1) / 2).all() for slot in slots):
                    raise ArithmeticError(f"The kernel '{kernel}' sums wrongly.")
                meeting.start()
                yield f"{kernel}, {pages}", times


def allocate(nbytes: int) -> dict[str, mmap.mmap]:
    """Shared anonymous memory for one array per rank, once with and once without the wish for huge pages."""
    memory = {pages: mmap.mmap(-1, RANKS * nbytes + _ALIGNMENT) for pages in PAGES}
    with contextlib.suppress(AttributeError, OSError):  # Python 3.8 and later; a kernel without huge pages
        memory[PAGES[1]].madvise(mmap.MADV_HUGEPAGE)
    return memory


def main() -> int:
    """Fork the ranks and wait for them."""
    job = Job()
    memory = allocate(job.options["nbytes"])
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            job.run(rank, {"limit": Limit(rank, job.options["library"], memory).limit})
            os._exit(0)
        children.append(child)
    return int(any(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    sys.exit(main())
