"""Target: a worker is stopped with SIGSTOP in the middle of a training. The others' warning names it, and after SIGCONT
the training continues and ends with the bits of an undisturbed training.
"""

from __future__ import annotations

import random
import re
import signal
import time

from harness.processes import send_signal

from .job import Job
from .tally import Budget, Tally

_START_S = 90.0
_WARNING_S = 40.0  # until the warning is there, on a machine that is busy; the watch warns after one second
_STEPS = 100
CASES = [("buckets", 2, 1), ("store", 4, 2), ("stock on the store", 3, 1), ("buckets", 4, 2), ("stock", 2, 2)]


def run(budget: Budget, cases: list[tuple] = CASES) -> Tally:
    """Stop one worker in each job, in the second run of its training."""
    tally = Tally()
    chance = random.Random(budget.seed)
    while budget.allows(tally):
        mode, ranks, hosts = cases[tally.tried % len(cases)]
        victim = chance.randrange(ranks)
        after = chance.uniform(0, 0.5)
        what = f"{mode}, {ranks} ranks on {hosts} hosts, rank {victim} stopped after {after:.2f} s"
        tally.add(_stop(mode, ranks, hosts, victim, after, what))
    return tally


def _stop(mode: str, ranks: int, hosts: int, victim: int, after: float, what: str) -> str | None:
    arguments = (mode, 2, _STEPS, 0.02)
    with Job(ranks, "torture.delayed", *arguments, hosts=hosts, env={"MYKV_STALL_WARN_S": "1"}) as job:
        if not job.until("run 0 digest", _START_S):
            return f"{what}: it never finished a run\n{job.wait(0).tail}"
        time.sleep(after)
        send_signal(job.pids()[victim], signal.SIGSTOP)
        # It may have been stopped in a moment in which it keeps the host's table locked.
        warning = re.compile(
            rf"waited for .* rank(s [\d, and]*)? ?{victim}[^\d].*(respond|do(es)? not answer)"
            rf"|kept locked by rank {victim}, which does not respond"
        )
        deadline = time.monotonic() + _WARNING_S
        while not warning.search(job.text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        warned = warning.search(job.text())
        send_signal(job.pids()[victim], signal.SIGCONT)
        ended = job.wait(_START_S)
    digests = re.findall(r"run \d+ digest (\w+)", ended.text)
    if ended.code != 0 or len(digests) != 2 * ranks:
        return f"{what}: {'hung' if ended.hung else ended.code}\n{ended.tail}"
    if len(set(digests)) != 1:
        return f"{what}: other weights than without it: {digests}"
    return None if warned else f"{what}: no warning names it\n{ended.tail}"
