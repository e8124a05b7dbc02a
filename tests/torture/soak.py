"""Target: a million small steps, as many as time allows, in which nothing grows.

Looked at are memory, descriptors, threads and mappings of the process, files in /dev/shm, and the names that the core
counts. Each step counts as one try; a job in which something grows as one failure.
"""

from __future__ import annotations

import ast
import re
import statistics

from .job import Job
from .tally import Budget, Tally

_START_S = 90.0
# By how much a value may grow; all others must not. MXNet's pools and the allocator's arenas move by less memory, and a
# leak of 16 bytes a step shows in 200 000. The table that the ranks of a host share is a ring of 3 MiB (kLogEvents in
# csrc/table/host_table.cpp), which is resident once it has been filled.
_GROWTH = {"own_kib": 2048, "shared_kib": 4096, "maps": 8}
_WARM = 0.4  # the share of samples in which caches and pools still fill
CASES = [("core", 2, 1, 0.3), ("trainer", 2, 1, 0.3), ("store", 2, 1, 0.15), ("core", 4, 2, 0.1), ("made", 2, 1, 0.15)]
_MOST = 1_000_000  # steps of one job


def run(budget: Budget, cases: list[tuple] = CASES) -> Tally:
    """One job for each case, each with its share of the time."""
    tally = Tally()
    whole = budget.left()
    for mode, ranks, hosts, share in cases:
        seconds = max(share * whole, 1.0)
        with Job(ranks, "torture.soaking", mode, seconds, budget.most or _MOST, hosts=hosts) as job:
            ended = job.wait(seconds + _START_S)
        steps = re.search(r"steps (\d+)", ended.text)
        what = f"{mode}, {ranks} ranks on {hosts} hosts"
        if ended.code != 0 or not steps:
            tally.add(f"{what}: {'hung' if ended.hung else ended.code}\n{ended.tail}")
            continue
        tally.tried += int(steps.group(1))
        grown, shown = _growth(ended.text, ranks)
        if grown:
            tally.failures.append(f"{what}: {'; '.join(grown)}")
        tally.notes.append(f"{what}: {steps.group(1)} steps in {ended.seconds:.0f} s; {shown}")
    return tally


def _growth(text: str, ranks: int) -> tuple[list[str], str]:
    """What has grown on which rank between the warm-up and the end, and the change of all memory."""
    grown, memory = [], []
    for rank in range(ranks):
        samples = [ast.literal_eval(one) for one in re.findall(rf"held {rank} \d+ (\{{.*?\}})", text)]
        warm = samples[int(len(samples) * _WARM) :]
        first, last = warm[: max(len(warm) // 3, 1)], warm[-max(len(warm) // 3, 1) :]
        for name in samples[0]:
            before = statistics.median(one[name] for one in first)
            after = statistics.median(one[name] for one in last)
            if after - before > _GROWTH.get(name, 0):
                grown.append(f"rank {rank}: {name} from {before:.0f} to {after:.0f}")
            if name == "own_kib":
                memory.append(f"{after - before:+.0f} KiB of {after:.0f}")
    return grown, "its own memory " + ", ".join(memory)
