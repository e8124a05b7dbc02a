"""Target: ranks leave, raise, break down (a call of MPI fails, no memory, a damaged message) or are stopped for 1 to
12 s while operations between hosts are under way, alone and in pairs.

Each operation on each rank ends with its result or an error that names a rank that has gone; where one has gone, within
15 s after the last thing that happened. Hosts are virtual, or network namespaces if available. Jobs
sleep most of their time, so several run at once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import re
import threading
from typing import Any

from harness import launcher, several_hosts

from .job import Job
from .tally import Budget, Tally

# Ranks on each host; whether the hosts are network namespaces. Virtual hosts are divided so for their number.
JOBS = [((1, 1), False), ((1, 1, 1), False), ((2, 2), False), ((1, 1), True), ((2, 1), False), ((2, 2, 2), False)]
JOBS += [((1, 1, 1), True), ((3, 2), False), ((1, 1), False), ((1, 2), True), ((2, 1, 1), False)]
_PROGRAMS = 100  # in one job
_START_S = 90.0
_LONGEST_JOB_S = 900.0


class _Next:
    """The next job and its programs; thread-safe."""

    def __init__(self, budget: Budget, jobs: list[tuple]) -> None:
        self._budget, self._jobs = budget, jobs
        self._lock = threading.Lock()
        self._first, self._number, self._given = budget.seed, 0, 0

    def take(self) -> tuple | None:
        """A job, its first program and their number; None at the end."""
        with self._lock:
            most = self._budget.most
            count = _PROGRAMS if most is None else min(_PROGRAMS, most - self._given)
            if self._budget.left() <= 0 or count <= 0:
                return None
            job, first = self._jobs[self._number % len(self._jobs)], self._first
            self._first, self._number, self._given = first + count, self._number + 1, self._given + count
            return job, first, count


def run(budget: Budget, jobs: list[tuple] = JOBS, at_once: int = 4) -> Tally:
    """Run jobs, several at once."""
    tally = Tally()
    lock = threading.Lock()
    following = _Next(budget, jobs)
    with contextlib.ExitStack() as stack:
        network = _network(stack, max(len(per_host) for per_host, _ in jobs), tally)

        def work() -> None:
            for (per_host, is_network), first, count in iter(following.take, None):
                tried, failures, note = _job(per_host, network if is_network else None, first, count, budget.left())
                with lock:
                    tally.tried += tried
                    tally.failures += failures
                    tally.notes.append(note)

        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            for one in [pool.submit(work) for _ in range(at_once)]:
                one.result()
    return tally


def _network(stack: contextlib.ExitStack, hosts: int, tally: Tally) -> Any:
    """Network namespaces, or None with a note."""
    module = several_hosts.network_module()
    why = "only Open MPI's mpirun is told here how to reach them" if not launcher.is_open_mpi() else ""
    why = why or module.unavailable()
    if why:
        tally.notes.append(f"virtual hosts in the place of network namespaces: {why}")
        return None
    return stack.enter_context(module.Network(hosts))


def _job(per_host: tuple, network: Any, first: int, count: int, left: float) -> tuple[int, list[str], str]:
    """Run one job; returns the number of programs, the errors, and a note."""
    ranks, hosts = sum(per_host), len(per_host)
    seconds = min(max(left, 1.0), _LONGEST_JOB_S)
    virtual = 1 if network else hosts
    what = f"torture.program_leave {first} {count} {seconds:.0f} {hosts} {virtual} on hosts of {per_host} ranks"
    command = network and functools.partial(network.mpirun, launcher.mpirun_path(), per_host)
    with Job(ranks, "torture.program_leave", first, count, seconds, hosts, virtual, command=command) as job:
        ended = job.wait(seconds + _START_S)
    done = re.search(r"slowest \S+ done (\d+) failed (\d+)", ended.text)
    failures = [f"{what}: {one}" for one in re.findall(r"FAILED (.*)", ended.text)]
    if ended.hung or ended.code != 0 or not done:
        reached = [int(one) for one in re.findall(r"^at (\d+)", ended.text, re.MULTILINE)]
        how = f"{what}: {'hung' if ended.hung else f'ended with {ended.code}'} after program {reached[-1:]}"
        tried = max(reached) - first + 2 if reached else 1
        return tried, ["\n".join([how, *failures, ended.tail])], how
    return int(done.group(1)), failures, f"{what}: {done.group(0)} in {ended.seconds:.0f} s"
