"""Target: workers of an elastic job are killed at random moments, and replaced: run_elastic(respawn=True).

Any worker is killed, also new ones, also while the others begin again after the death before. At the end there are as
many workers as at the beginning, with the bits of a job in which nobody dies. One job in five also grows from 2 to 4
workers. The workers are those of tests/programs/respawn.py. A job may end with a sentence in two cases: states of the
optimizer on the store have died with their copy, or a death fell into MPI_Comm_spawn (docs/elastic.md).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import tempfile
import time
from pathlib import Path

from harness.processes import send_signal

from .job import Ended, Job
from .tally import Budget, Tally

_START_S = 90.0
_END_S = 180.0  # from the last kill
_PAUSE_S = 0.3  # in each of 12 steps
_WAIT_S = 40  # MYKV_RESPAWN_WAIT_S
CASES = [(3, "plain"), (3, "store"), (2, "plain"), (3, "local"), (2, "grow")]  # workers, kind
_END = r"^end (\d) of (\d) \w+ steps 12 sizes 12 \[([\d, ]+)\] updates \d+ weights (\w+)$"
_HOSTFILE = Path(tempfile.gettempdir(), f"mykv-torture-hosts-{os.getpid()}")
_LOST = re.compile(r"optimizer states of rank \d+ of \d+ are lost, since rank \d+, which kept their copy")
_IN_SPAWN = re.compile(r"mykv ends the job: MPI")


def run(budget: Budget, cases: list[tuple] = CASES) -> Tally:
    """One job after the other."""
    tally, chance = Tally(), random.Random(budget.seed)
    undisturbed: dict[tuple, str] = {}
    kills = lost = in_spawn = 0
    while budget.allows(tally):
        case = cases[tally.tried % len(cases)]
        if case not in undisturbed:
            with _start(*case, pause=0) as job:
                weights, problem = _weights(job.wait(_START_S), *case)
            if problem:
                tally.add(f"{case}: nobody was killed: {problem}")
                break
            undisturbed[case] = weights
        with _start(*case) as job:
            if not job.until("at 1\n", _START_S):
                tally.add(f"{case}: it does not start\n{job.wait(0).tail}")
                continue
            died = _kill_some(job, chance)
            ended = job.wait(_END_S)
            kills += died
            if case[1] == "store" and _LOST.search(ended.text):
                lost, problem = lost + 1, None
            elif _IN_SPAWN.search(ended.text):
                in_spawn, problem = in_spawn + 1, None
            else:
                weights, problem = _weights(ended, *case)
                if not problem and weights and weights != undisturbed[case]:
                    problem = f"weights {weights}, and {undisturbed[case]} where nobody dies"
            tally.add(problem and f"{case}: killed {died}: {problem}\n{ended.tail}")
    tally.notes.append(
        f"{kills} workers killed; {lost} jobs ended since states had died with their copy, {in_spawn} since a death "
        "fell into MPI_Comm_spawn"
    )
    _HOSTFILE.unlink(missing_ok=True)
    return tally


def _start(workers: int, kind: str, pause: float = _PAUSE_S) -> Job:
    env = {"MYKV_RESPAWN_WAIT_S": str(_WAIT_S)}
    plan: dict[str, object] = {"kind": kind, "pause": pause}
    if kind == "grow":
        _HOSTFILE.unlink(missing_ok=True)
        writes = {"2": f"{socket.gethostname()} slots=4"} if pause else {}
        plan.update(kind="plain", grow_to=4, hostfile=str(_HOSTFILE), writes=writes)
    return Job(workers, "programs.respawn", json.dumps(plan), env=env, options=("--with-ft", "ulfm"))


def _kill_some(job: Job, chance: random.Random) -> int:
    """Kill workers that live at that moment, and leave one of the first workers its state; returns how many."""
    died: set[int] = set()
    for _ in range(chance.randint(1, job.ranks - 1)):
        time.sleep(chance.uniform(0, 4.0))
        pids = {int(pid) for pid in re.findall(r"^pid (\d+)$", job.text(), re.MULTILINE)} - died
        if job.ended() or re.search(r"^end ", job.text(), re.MULTILINE) or len(pids) < 2:
            break
        victim = chance.choice(sorted(pids))
        died.add(victim)
        send_signal(victim, signal.SIGKILL)
    return len(died)


def _weights(ended: Ended, workers: int, kind: str) -> tuple[str, str | None]:
    """The weights at the end ("" where three workers made other sums), or what is wrong."""
    if ended.hung:
        return "", "it hung"
    ends = re.findall(_END, ended.text, re.MULTILINE)
    if sorted(int(end[0]) for end in ends) != list(range(max(workers, len(ends)))):
        return "", f"other workers are left: {[end[0] for end in ends]}"
    if kind != "grow" and {end[1] for end in ends} | {end[2] for end in ends} != {str(workers)}:
        return "", "they were not always as many as at the beginning"
    weights = {end[3] for end in ends}
    if len(weights) > 1:
        return "", "they have not the same weights"
    return "" if "3" in ends[0][2] and kind == "grow" else weights.pop(), None
