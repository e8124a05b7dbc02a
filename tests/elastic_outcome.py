"""What the output of a job of elastic_digits.py must say, whoever was killed in it and when."""

from __future__ import annotations

import re

_NOTICE_S = 2.0
_AGAIN_S = 10.0  # from the death of a worker while the others begin again, until they train

# The replay adds the gradients of all workers up in another order: rounding, which training does not make smaller.
_ROUNDING = 5e-3


def survivors(ranks: int, died_at: dict[int, float], stdout: str, stderr: str) -> list[dict[str, str]]:
    """What each survivor says at the end; raises an AssertionError where they are not what all jobs must be.

    Parameters
    ----------
    ranks : int
        At the beginning.
    died_at : dict of float
        For each that died, by its first rank: when, as time.time() shows it.
    stdout, stderr : str
        Of all workers.
    """
    ends = [line.split() for line in stdout.splitlines() if line.startswith("end ")]
    said = [{"was": end[1], "rank": end[2], "size": end[3], **dict(zip(end[4::2], end[5::2]))} for end in ends]
    assert sorted(int(one["was"]) for one in said) == sorted(set(range(ranks)) - set(died_at)), "others are left"
    assert all(int(one["size"]) == len(said) for one in said), "they do not know how many are left"
    together = _together(stdout)
    noticed = [float(time) for time in re.findall(r"noticed at ([\d.]+)", stderr)]
    for rank, died in died_at.items():
        in_time = any(0 <= time - died < _NOTICE_S for time in noticed)
        in_time = in_time or any(0 <= time - died < _AGAIN_S for time in together)
        assert in_time, f"the death of rank {rank} was not noticed"
    for one in said:
        assert one["steps"] == one["replayed"] == one["updates"], "a step is missing or counts twice"
        assert float(one["difference"]) < _ROUNDING, "a step was applied twice or by half"
    assert len({one["weights"] for one in said}) == 1, "they have not the same weights"
    return said


def _together(stdout: str) -> list[float]:
    """When workers trained again; all that did so together had the same step and the same weights and states."""
    resets: dict[str, set] = {}
    times = []
    for line in stdout.splitlines():
        if line.startswith("reset "):
            _, _, _, size, step, checksum, time = line.split()
            resets.setdefault(size, set()).add((step, checksum))
            times.append(float(time))
    assert all(len(seen) == 1 for seen in resets.values()), "they began again from different states"
    return times
