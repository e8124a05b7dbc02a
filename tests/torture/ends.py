"""Target: a worker ends in one of many ways in one of many phases of its script, under mpirun or mykvrun.

The job ends within 15 s with a failure status, and its output names the worker. Some are not failures: an exception in
an exit handler is printed, and Python continues its exit.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import random
import re
import sys
import time
from typing import NamedTuple

from .job import Job
from .program_ends import KINDS, PHASES
from .tally import Budget, Tally

_LIMIT_S = 15.0  # from the worker's end to that of the job
_START_S = 120.0
_MOST_RANKS, _MOST_HOSTS = 4, 3
_PART_WITH_MXNET = 0.1  # of the jobs; the others do not import it, which takes seconds
_AT_ONCE = 4
# In an exit handler Python prints these and continues its exit.
_NO_END_AT_EXIT = {
    "exception",
    "out of memory",
    "interrupt",
    "sys.exit(0)",
    "sys.exit(3)",
    "sys.exit(text)",
    "SystemExit",
    "alarm",
    "thread interrupts",
    "SIGINT",
}


class Case(NamedTuple):
    """One job, and the way in which one of its workers ends."""

    kind: str
    phase: str
    ranks: int
    hosts: int
    victim: int
    uses_mykvrun: bool
    with_mxnet: bool
    delay: float  # of the whole time that the phase has, where it has any


def drawn(seed: int) -> Case:
    """The case with a number: consecutive numbers cover all kinds in all phases."""
    chance = random.Random(seed)
    both = [(kind, phase) for kind in KINDS for phase in PHASES]
    random.Random(seed // len(both)).shuffle(both)
    kind, phase = both[seed % len(both)]
    ranks = chance.randint(2, _MOST_RANKS)
    return Case(
        kind,
        phase,
        ranks,
        chance.randint(1, min(ranks, _MOST_HOSTS)),
        chance.randrange(ranks),
        chance.random() < 0.5,
        chance.random() < _PART_WITH_MXNET,
        chance.random(),
    )


def run(budget: Budget, cases: list[Case] | None = None, at_once: int = _AT_ONCE) -> Tally:
    """Run cases until the time is over."""
    tally, slowest = Tally(), 0.0
    counts: collections.Counter[str] = collections.Counter()
    following = iter(cases) if cases is not None else map(drawn, itertools.count(budget.seed))
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        while budget.allows(tally):
            most = at_once if budget.most is None else min(at_once, budget.most - tally.tried)
            some = list(itertools.islice(following, most))
            if not some:
                break
            for case, (problem, seconds) in zip(some, pool.map(_problem, some)):
                tally.add(problem and f"{case}: {problem}")
                slowest = max(slowest, seconds)
                counts[case.phase] += 1
    tally.notes.append(f"slowest end {slowest:.1f} s after the worker's; phases {dict(counts)}")
    return tally


def _problem(case: Case) -> tuple[str | None, float]:
    """The error of a job, and its time to end."""

    def by_mykvrun(program: list[str]) -> list[str]:
        return [sys.executable, "-m", "mykvrun", "-n", str(case.ranks), *program]

    arguments = (case.victim, case.kind, case.phase, case.delay, case.with_mxnet)
    command = by_mykvrun if case.uses_mykvrun else None
    with Job(case.ranks, "torture.program_ends", *arguments, hosts=case.hosts, command=command) as job:
        if not job.until("ending ", _START_S):
            return f"it never came to the phase:\n{job.wait(1.0).tail}", 0.0
        ended = job.wait(_LIMIT_S)
        stamp = re.search(r"ending (\d+\.\d+)", ended.text)
        seconds = time.monotonic() - float(stamp[1]) if stamp else 0.0
        problems = ["the job did not end"] if ended.hung else []
        is_end = case.phase != "exit" or case.kind not in _NO_END_AT_EXIT
        if is_end and not ended.hung:
            problems += ["its status is 0"] if ended.code == 0 else []
            problems += [] if _names(case.victim, ended.text) else [f"nothing names rank {case.victim}"]
        return ("; ".join(problems) + f"\n{ended.tail}" if problems else None), seconds


def _names(rank: int, text: str) -> bool:
    """Whether a text of mykv or of a launcher names a rank."""
    texts = (rf"\brank {rank}\b", rf"[@,]1,{rank}\]", rf"ranks [\d, ]*\b{rank}\b")
    return any(re.search(one, text) for one in texts)
