"""Target: many launches of jobs that only create a world, since a job may crash in MPI's first message.

Alone and several at once, each with a temporary folder of its own and without. Each job counts as one try.
"""

from __future__ import annotations

import concurrent.futures

from .job import Job
from .tally import Budget, Tally

CASES = [(1, True), (1, False), (8, True), (8, False)]  # jobs at once, whether each has a temporary folder of its own
_RANKS = 2
_LONGEST_S = 120.0


def run(budget: Budget, cases: list[tuple] = CASES) -> Tally:
    """The cases in turn, `at_once` jobs of each, until the time is over."""
    tally = Tally()
    tried = dict.fromkeys(cases, 0)
    with concurrent.futures.ThreadPoolExecutor(max(at_once for at_once, _ in cases)) as pool:
        while budget.allows(tally):
            case = min(cases, key=tried.__getitem__)
            at_once, has_folder = case
            for failure in pool.map(_failure, [has_folder] * at_once):
                tried[case] += 1
                tally.add(failure and f"{_words(case)}: {failure}")
    tally.notes += [f"{_words(case)}: {count} jobs" for case, count in tried.items()]
    return tally


def _words(case: tuple) -> str:
    at_once, has_folder = case
    return f"{at_once} at once, {'a folder for each' if has_folder else 'one temporary folder'}"


def _failure(has_folder: bool) -> str | None:
    """The error of one job."""
    with Job(_RANKS, "torture.launched", has_folder=has_folder) as job:
        ended = job.wait(_LONGEST_S)
    if ended.code == 0 and all(f"fine {rank}" in ended.text for rank in range(_RANKS)):
        return None
    return f"{'hung' if ended.hung else ended.code}\n{ended.tail}"
