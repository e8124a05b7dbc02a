"""Target: workers of an elastic job are killed one after another, at random moments of the training and while the
others begin again after the one before: with -9, or with a segmentation fault. The others notice, continue from one
state, and end with the weights of a training in one process with the same steps: no step is missing, counted twice or
half applied.

The workers are those of tests/programs/elastic_digits.py, and harness/elastic_outcome.py checks their output. With the
optimizer on the store, a worker may die together with the keeper of its copy before the others have recovered: then the
job must end with that message.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time

from harness import elastic_outcome
from harness.processes import send_signal

from .job import Job
from .tally import Budget, Tally

_START_S = 90.0
_END_S = 120.0  # from the last kill: the rest of the training, and the same in one process
_EPOCHS = 4  # of 29 steps or more
_LAST_STEP = 70  # steps with a kill
_GONE_S = 3.0
_MOST_LATE = 5  # allowed jobs that a busy machine cannot start in that time
_SOON_S = 0.3  # time of a recovery
_TOGETHER_S = 10.0
_CRASHES = 0.4  # of the deaths
# Workers, hosts, whether the optimizer is on the store, steps from commit to commit.
CASES = [(4, 1, False, 1), (4, 2, True, 1), (3, 2, False, 3), (4, 1, True, 2), (5, 2, False, 1), (3, 1, True, 1)]
_LOST = re.compile(r"optimizer states of rank \d+ of \d+ are lost, since rank \d+, which kept their copy")


def run(budget: Budget, cases: list[tuple] = CASES) -> Tally:
    """One job after the other."""
    tally, chance = Tally(), random.Random(budget.seed)
    late = lost = kills = soon = 0
    while budget.allows(tally):
        case = cases[(tally.tried + late) % len(cases)]
        with _start(*case) as job:
            if not _all_train(job, _START_S, case[0]):
                if not job.ended() and late < _MOST_LATE:
                    late += 1
                    continue
                tally.add(f"{case}: it does not start\n{job.wait(0).tail}")
                continue
            died, quick = _kill_some(job, chance)
            ended = job.wait(_END_S)
            what = f"{case}: killed {died}, {quick} of them before the others were together"
            problem = None
            if ended.hung:
                problem = "it hung"
            elif case[2] and quick and _LOST.search(ended.text):
                lost += 1
            else:
                try:
                    elastic_outcome.survivors(job.ranks, died, ended.text)
                except AssertionError as error:
                    problem = str(error)
            problem = problem or _left(job)
            tally.add(problem and f"{what}: {problem}\n{ended.tail}")
            kills, soon = kills + len(died), soon + quick
    tally.notes.append(
        f"{kills} workers killed, {soon} of them before the others were together again; {lost} jobs ended since states "
        f"had died with their copy; {late} jobs started too late"
    )
    return tally


def _start(ranks: int, hosts: int, sharded: bool, every: int) -> Job:
    plan = {"deaths": {}, "epochs": _EPOCHS, "sharded": sharded, "adam": sharded, "every": every, "progress": True}
    plan["by_mpi"] = hosts > 1
    return Job(ranks, "programs.elastic_digits", json.dumps(plan), hosts=hosts, options=("--with-ft", "ulfm"))


def _all_train(job: Job, seconds: float, size: int) -> bool:
    """Whether this number of workers train together within that time."""
    deadline = time.monotonic() + seconds
    while len(re.findall(rf"^trains \d+ {size}$", job.text(), re.MULTILINE)) < size:
        if time.monotonic() > deadline or job.ended():
            return False
        time.sleep(0.02)
    return True


def _kill_some(job: Job, chance: random.Random) -> tuple[dict[int, float], int]:
    """Kill all but one worker, or fewer; returns the times of death, and the number of deaths during recoveries."""
    died: dict[int, float] = {}
    quick = 0
    victims = chance.sample(range(job.ranks), chance.randint(1, job.ranks - 1))
    pids = job.pids()
    for victim in victims:
        if chance.random() < 0.5:
            _all_train(job, _TOGETHER_S, job.ranks - len(died))
            time.sleep(chance.uniform(0, 0.5))
        else:
            time.sleep(chance.uniform(0, _SOON_S))
        steps = [int(step) for step in re.findall(r"^at (\d+)", job.text(), re.MULTILINE)]
        if job.ended() or max(steps, default=0) > _LAST_STEP:
            break
        quick += not _all_train(job, 0, job.ranks - len(died))
        died[victim] = time.time()
        send_signal(pids[victim], signal.SIGSEGV if chance.random() < _CRASHES else signal.SIGKILL)
    return died, quick


def _left(job: Job) -> str | None:
    deadline = time.monotonic() + _GONE_S
    while job.launch.members() and time.monotonic() < deadline:
        time.sleep(0.05)
    return f"processes are left: {job.launch.members()}" if job.launch.members() else None
