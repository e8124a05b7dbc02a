"""Target: random programs of operations, half of them with one disagreement planted between the ranks.

Each must end within its time, with numpy's numbers or with the error that names the operation, the ranks and what they
have, and the same processes go on with the next program. Jobs differ in the number of ranks and hosts, in the size of
parts, and in the face: the core on numpy arrays, or the Python package on MXNet's.
"""

from __future__ import annotations

import re

from .job import Job
from .tally import Budget, Tally

# Module, ranks, hosts, bytes of a part, programs in one job; the face of Python is slower and has fewer of them.
_JOBS = [
    ("torture.program_core", 4, 1, 4096, 1000),
    ("torture.program_mxnet", 3, 1, 4096, 100),
    ("torture.program_core", 4, 2, 524288, 1000),
    ("torture.program_core", 2, 1, 524288, 1000),
    ("torture.program_mxnet", 4, 2, 4096, 100),
    ("torture.program_core", 3, 2, 4096, 1000),
    ("torture.program_core", 2, 2, 4096, 1000),
    ("torture.program_core", 3, 1, 524288, 1000),
    ("torture.program_mxnet", 2, 2, 524288, 100),
]
_START_S = 60.0  # for mpirun, imports and the end, on a busy machine
_LONGEST_JOB_S = 120.0


def run(budget: Budget, jobs: list[tuple] = _JOBS, stall_abort_s: int = 10) -> Tally:
    """Run jobs in turn; a program that ends its job counts as one failure, and the next job begins behind it.

    Parameters
    ----------
    budget : Budget
    jobs : list of tuple
    stall_abort_s : int, optional
        MYKV_STALL_ABORT_S.
    """
    tally = Tally()
    first, number = budget.seed, 0
    while budget.allows(tally):
        module, ranks, hosts, part_bytes, count = jobs[number % len(jobs)]
        count = count if budget.most is None else min(count, budget.most - tally.tried)
        seconds = min(max(budget.left(), 1.0), _LONGEST_JOB_S)
        env = {"MYKV_PART_BYTES": str(part_bytes), "MYKV_STALL_ABORT_S": str(stall_abort_s), "MYKV_STALL_WARN_S": "0"}
        what = f"{module} {first} {count} {seconds:.0f} {part_bytes} {hosts} on {ranks} ranks"
        with Job(ranks, module, first, count, seconds, part_bytes, hosts, hosts=hosts, env=env) as job:
            ended = job.wait(seconds + _START_S)
        done = re.search(r"faults \d+ done (\d+) failed (\d+)", ended.text)
        if ended.hung or ended.code != 0 or not done:
            reached = re.findall(r"at (\d+)|FAILED .*?program (\d+)", ended.text)
            how = "hung" if ended.hung else f"ended with {ended.code}"
            last = max((int(one or other) for one, other in reached), default=first)
            tally.tried += last - first
            failed = re.findall(r"FAILED .*", ended.text)
            tally.add(f"{what} {how} after program {last}: {chr(10).join(failed)}\n{'' if failed else ended.tail}")
            first = last + 1 if failed else first + count
        else:
            tally.tried += int(done.group(1))
            failed = re.findall(r"FAILED (.*)", ended.text)
            tally.failures += [f"{what}: {one}" for one in failed[: int(done.group(2))]]
            first += count
        tally.notes.append(f"{what}: {done.group(0) if done else 'not done'} in {ended.seconds:.0f} s")
        number += 1
    return tally
