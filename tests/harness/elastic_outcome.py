"""Checks the output of a job of elastic_digits.py, whichever worker was killed and when."""

from __future__ import annotations

import math
import re

_NOTICE_S = 2.0
_AGAIN_S = 10.0  # from a worker's death during a recovery until the others train

# The replay sums the workers' gradients in another order: rounding errors, which training does not reduce.
_ROUNDING = 5e-3


def survivors(ranks: int, died_at: dict[int, float], stdout: str) -> list[dict[str, str]]:
    """Check and return each survivor's last message; raises an AssertionError if one is wrong.

    Parameters
    ----------
    ranks : int
        At the beginning.
    died_at : dict of float
        For each dead worker, by its first rank: the time of death (time.time()).
    stdout : str
        Of all workers.
    """
    ends = [line.split() for line in stdout.splitlines() if line.startswith("end ")]
    said = [{"was": end[1], "rank": end[2], "size": end[3], **dict(zip(end[4::2], end[5::2]))} for end in ends]
    assert sorted(int(one["was"]) for one in said) == sorted(set(range(ranks)) - set(died_at)), "others are left"
    assert all(int(one["size"]) == len(said) for one in said), "they do not know how many are left"
    require_notices(ranks, died_at, stdout)
    _require_one_state(stdout)
    for one in said:
        assert one["steps"] == one["replayed"] == one["updates"], "a step is missing or counts twice"
        assert float(one["difference"]) < _ROUNDING, "a step was applied twice or by half"
    assert len({one["weights"] for one in said}) == 1, "they have not the same weights"
    return said


def require_notices(ranks: int, died_at: dict[int, float], stdout: str) -> None:
    """Check that each survivor has noticed each death in time.

    A survivor that was together with the others after all earlier deaths has reported that. The report of one that was
    still recovering may be about the earlier death: it must train again with one worker less.
    """
    for number, (dead, died) in enumerate(sorted(died_at.items(), key=lambda one: (one[1], one[0]))):
        left = ranks - number - 1  # after this death
        for worker in sorted(set(range(ranks)) - set(died_at)):
            noticed = [float(time) for time in re.findall(rf"^notices {worker} ([\d.]+)$", stdout, re.MULTILINE)]
            again = [(time, size) for name, size, _, _, time in _resets(stdout) if name == worker]
            size = min((size for time, size in again if time <= died), default=ranks)
            if size == left + 1:
                until = min((time for time, _ in again if time > died), default=math.inf)
                took = [time - died for time in noticed if died <= time <= until]
                assert min(took, default=_NOTICE_S) < _NOTICE_S, _unnoticed(worker, dead, took)
            else:
                took = [time - died for time, size in again if time >= died and size <= left]
                assert min(took, default=_AGAIN_S) < _AGAIN_S, _unnoticed(worker, dead, took)


def _unnoticed(worker: int, dead: int, took: list[float]) -> str:
    when = f"after {min(took):.1f} s" if took else "not at all"
    return f"worker {worker} noticed the death of worker {dead} {when}"


def _resets(stdout: str) -> list[tuple[int, int, str, str, float]]:
    """A worker's report after a recovery: its name, the number of workers, the step, a checksum, and the time."""
    lines = [line.split() for line in stdout.splitlines() if line.startswith("reset ")]
    return [(int(me), int(size), step, checksum, float(time)) for _, me, _, size, step, checksum, time in lines]


def _require_one_state(stdout: str) -> None:
    """Check that workers that trained again together had the same step, weights and states."""
    seen: dict[int, set] = {}
    for _, size, step, checksum, _ in _resets(stdout):
        seen.setdefault(size, set()).add((step, checksum))
    assert all(len(states) == 1 for states in seen.values()), "they began again from different states"
