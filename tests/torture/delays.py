"""Target: results do not depend on timing. The same training, 20 times with the same seed, ends with the same bits,
whatever delays are planted between its phases on each rank, while from outside ranks are stopped for moments, bound to
other cores and given other priorities. The trainings are in training.py, each in a case or two.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from pathlib import Path

from harness.processes import send_signal

from .job import Job
from .tally import Budget, Tally

_START_S = 90.0
_LONGEST_JOB_S = 200.0
_LONGEST_SLEEP_S = 0.03  # of a delay within a rank
RUNS, STEPS = 20, 8
CASES = [
    ("buckets", 3, 1),
    ("store", 4, 2),
    ("stock on the store", 2, 1),
    ("stock", 4, 1),
    ("store", 2, 1),
    ("buckets", 4, 2),
    ("stock on the store", 3, 2),
    ("stock", 2, 2),
    ("sparse", 3, 1),
    ("sparse on the store", 4, 2),
    ("join", 3, 1),
    ("join", 4, 2),
    ("amp", 2, 1),
    ("compression", 4, 2),
]
_ENV = {"MYKV_COMPRESS_BYTES": "1"}  # compress these small weights too


def run(budget: Budget, cases: list[tuple] = CASES, runs: int = RUNS, steps: int = STEPS) -> Tally:
    """Train in one job after the other; each run of a training counts."""
    tally, number = Tally(), 0
    chance = random.Random(budget.seed)
    while budget.allows(tally):
        mode, ranks, hosts = cases[number % len(cases)]
        what = f"{mode}, {ranks} ranks on {hosts} hosts"
        with Job(ranks, "torture.delayed", mode, runs, steps, _LONGEST_SLEEP_S, hosts=hosts, env=_ENV) as job:
            disturbances = _disturb(job, chance, _LONGEST_JOB_S)
            ended = job.wait(_START_S)
        digests = re.findall(r"run (\d+) digest (\w+)", ended.text)
        different = {digest for _, digest in digests}
        tally.tried += runs - 1
        if ended.code != 0 or len(digests) != runs * ranks:
            tally.add(f"{what}: {'hung' if ended.hung else ended.code}, {len(digests)} digests\n{ended.tail}")
        else:
            tally.add(f"{what}: {len(different)} digests: {digests}" if len(different) > 1 else None)
        tally.notes.append(f"{what}: {runs} runs, {disturbances} disturbances, {ended.seconds:.0f} s")
        number += 1
    return tally


def _disturb(job: Job, chance: random.Random, seconds: float) -> int:
    """Stop, bind and slow down ranks until the job ends; returns how often."""
    end = time.monotonic() + seconds
    count = 0
    cores = sorted(os.sched_getaffinity(0))
    while not job.ended() and time.monotonic() < end:
        time.sleep(chance.uniform(0.01, 0.15))
        pids = list(job.pids().values())
        if len(pids) < job.ranks:
            continue
        pid = chance.choice(pids)
        count += 1
        kind = chance.choice(["stop", "stop", "bind", "nice"])
        if kind == "stop":
            send_signal(pid, signal.SIGSTOP)
            time.sleep(chance.random() ** 2 * 0.3)
            send_signal(pid, signal.SIGCONT)
            continue
        allowed = chance.sample(cores, chance.randint(1, len(cores)))
        priority = chance.choice([0, 5, 15])
        with contextlib.suppress(OSError):  # threads come and go
            for thread in Path(f"/proc/{pid}/task").iterdir():
                if kind == "bind":
                    os.sched_setaffinity(int(thread.name), allowed)
                else:
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), priority)
    return count
