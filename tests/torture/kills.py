"""Target: a worker is killed with -9 at a random moment of its life, before init() or in it, in forward, in a
reduction, while others wait in join(), while states are written. The job ends within ten seconds with a message that
names the rank; no process, no shared memory and no half-written checkpoint is left.
"""

from __future__ import annotations

import pickle
import random
import re
import signal
import time
import zlib
from pathlib import Path

from harness.processes import send_signal

from .job import Job
from .tally import Budget, Tally

_LIMIT_S = 10.0  # from the kill to the end of the job
_START_S = 90.0
_MOST_LATE = 5  # allowed jobs that a busy machine cannot start in that time
_GONE_S = 2.0  # for the kernel to remove the processes that mpirun has ended
# What rank 0 has said last before the kill, and the most seconds after that: core workers start within a second.
_CORE_MOMENTS = [("pid of", 0.3), ("pid of", 1.0), ("inited", 0.05), ("inited", 1.0), ("saving", 0.02)]
_MOMENTS = [("pid of", 4.0), ("inited", 0.5), ("step", 1.0), ("step", 1.0), ("saving", 0.05)]
_ENV = {"MYKV_COMPRESS_BYTES": "1"}  # compress the small weights of victims too
CASES = [
    ("core", 2, 1),
    ("core", 4, 2),
    ("gluon", 2, 1),
    ("core", 3, 1),
    ("core", 4, 1),
    ("core", 3, 2),
    ("core", 2, 2),
]
CASES += [("gluon", 4, 2), ("core", 2, 1), ("core", 4, 2), ("gluon", 3, 1), ("core", 4, 1)]
CASES += [("sparse", 3, 1), ("join", 3, 1), ("amp", 2, 1), ("compression", 4, 2), ("stock", 3, 1)]
CASES += [("sparse", 4, 2), ("join", 4, 2), ("amp", 4, 2), ("compression", 3, 2), ("stock", 4, 2)]


def run(budget: Budget, cases: list[tuple] = CASES) -> Tally:
    """Kill once per job."""
    tally, slowest = Tally(), 0.0
    chance = random.Random(budget.seed)
    moments: dict[str, int] = {}
    late = 0
    while budget.allows(tally):
        mode, ranks, hosts = cases[(tally.tried + late) % len(cases)]
        victim = chance.randrange(ranks)
        text, most = chance.choice(_CORE_MOMENTS if mode == "core" else _MOMENTS)
        after = chance.uniform(0, most)
        what = f"{mode}, {ranks} ranks on {hosts} hosts, rank {victim} killed {after:.3f} s after {text!r}"
        problem, seconds = _kill(mode, ranks, hosts, victim, text, after)
        if seconds is None:
            late += 1
            if late > _MOST_LATE:
                tally.add("jobs do not start")
            continue
        tally.add(problem and f"{what}: {problem}")
        slowest = max(slowest, seconds)
        moments[f"{mode} {text}"] = moments.get(f"{mode} {text}", 0) + 1
    tally.notes.append(f"slowest end {slowest:.1f} s after the kill; moments {moments}; {late} jobs started too late")
    return tally


def _kill(mode: str, ranks: int, hosts: int, victim: int, text: str, after: float) -> tuple[str | None, float | None]:
    """The error, and the job's time to end; None if it was too slow to get there."""
    with Job(ranks, "torture.victim", mode, hosts, hosts=hosts, env=_ENV) as job:
        if not job.until(text, _START_S) or not job.until(f"pid of {victim}:", _START_S):
            if not job.ended():
                return None, None
            return f"it ended before it said {text!r}:\n{job.wait(0).tail}", 0.0
        time.sleep(after)
        shared = job.shared_files()
        pid = job.pids()[victim]
        begin = time.monotonic()
        send_signal(pid, signal.SIGKILL)
        ended = job.wait(_LIMIT_S)
        seconds = time.monotonic() - begin
        problems = []
        if ended.hung:
            problems.append("the job did not end")
        if ended.code == 0:
            problems.append("mpirun ended with 0")
        # mpirun's message; or, if the victim had the host's table locked, the message of the others, which may be
        # faster.
        named = rf"rank {victim}\b.*?signal:? 9|rank {victim} died while it changed mykv's shared table"
        if not re.search(named, ended.text, re.IGNORECASE | re.DOTALL):
            problems.append(f"no sentence names rank {victim}")
        deadline = time.monotonic() + _GONE_S
        while job.launch.members() and time.monotonic() < deadline:
            time.sleep(0.05)
        if job.launch.members():
            problems.append(f"processes are left: {job.launch.members()}")
        left = [one for one in shared if Path(one).exists()]
        if left:
            problems.append(f"shared memory is left: {left}")
        problems += _broken_files(job.directory)
        return ("; ".join(problems) + f"\n{ended.tail}" if problems else None), seconds


def _broken_files(directory: Path) -> list[str]:
    """Incomplete checkpoints, and other leftovers of writing them."""
    problems = []
    for path in directory.iterdir():
        if path.name == "states":
            try:
                pickle.loads(path.read_bytes())
            except (pickle.UnpicklingError, EOFError, ValueError) as error:
                problems.append(f"half-written states: {error}")
        elif path.name == "numbers":
            content = path.read_bytes()
            if zlib.crc32(content[4:]) != int.from_bytes(content[:4], "little"):
                problems.append(f"half-written numbers: {len(content)} bytes")
        elif path.name.endswith(".tmp"):
            problems.append(f"left: {path.name}")
    return problems
