"""Target: arrays and buckets that fill more than half of the memory, all ranks together.

Once of a container with a small limit, which it can then exceed, and once of this machine, if so much is free. Each job
counts as one try.
"""

from __future__ import annotations

import re
from pathlib import Path

from harness.cgroups import memory_cgroup

from .job import Job
from .tally import Budget, Tally

_RANKS = 2
_SHARE = 0.54  # of all memory, in the arrays of all ranks together
_LIMIT = 1 << 30  # bytes of the container
_START_S, _BYTES_PER_SECOND = 90.0, 100e6  # if memory is slow and the machine is busy


def run(budget: Budget) -> Tally:
    """Both jobs."""
    tally = Tally()
    with memory_cgroup() as made:
        if made is None:
            tally.notes.append("no memory cgroup can be made here")
        else:
            (made.folder / made.limit).write_text(str(_LIMIT))
            _run(tally, f"a container of {_LIMIT >> 20} MiB", int(_SHARE * _LIMIT), str(made.folder))
    memory = {line.split(":")[0]: int(line.split()[1]) << 10 for line in Path("/proc/meminfo").read_text().splitlines()}
    wanted = int(_SHARE * memory["MemTotal"])
    what = f"this machine of {memory['MemTotal'] >> 20} MiB"
    if memory["MemAvailable"] < 1.1 * wanted + (2 << 30):
        tally.notes.append(f"{what}: not tried, since only {memory['MemAvailable'] >> 20} MiB are free")
    elif budget.left() < _START_S:
        tally.notes.append(f"{what}: not tried, the time is over")
    else:
        _run(tally, what, wanted, "-")
    return tally


def _run(tally: Tally, what: str, nbytes: int, cgroup: str) -> None:
    with Job(_RANKS, "torture.sized", nbytes // _RANKS, cgroup) as job:
        ended = job.wait(_START_S + nbytes / _BYTES_PER_SECOND)
    right = len(re.findall(r"right on \d", ended.text)) == _RANKS and ended.code == 0
    tally.add(None if right else f"{what}: {'hung' if ended.hung else ended.code}\n{ended.tail}")
    tally.notes.append(f"{what}: {_RANKS} arrays of {nbytes // _RANKS >> 20} MiB in {ended.seconds:.0f} s")
