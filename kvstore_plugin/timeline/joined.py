"""Puts the files of a job's ranks together: the same operations on all ranks, and one clock."""

from __future__ import annotations

from collections import Counter
from typing import Tuple

from .recording import Call, Recording, TimelineError

# An operation of the job: its name, the number of the call, and its index among a file's calls with this name and
# number.
Key = Tuple[str, int, int]


def check_same_job(recordings: list[Recording]) -> None:
    """Raise an error unless the files are of different ranks of one job.

    Raises
    ------
    TimelineError
        Two files are of different jobs, or of the same rank.
    """
    first = recordings[0]
    seen: dict[int, str] = {}
    for recording in recordings:
        if recording.rank in seen:
            raise TimelineError(
                f"{seen[recording.rank]} and {recording.path} are both of rank {recording.rank}. Give one file of each."
            )
        seen[recording.rank] = recording.path
        if (recording.job, recording.size, recording.host_ranks) != (first.job, first.size, first.host_ranks):
            raise TimelineError(
                f"{first.path} and {recording.path} are of different jobs ({_job(first)} and {_job(recording)}). Give "
                "the files of one job."
            )


def _job(recording: Recording) -> str:
    return f"{recording.job or 'a job without a mark'}, {recording.size} ranks, {len(recording.host_ranks)} hosts"


def by_key(recording: Recording) -> dict[Key, Call]:
    """The calls of a file by their operations."""
    seen: Counter[tuple[str, int]] = Counter()
    found = {}
    for call in recording.calls:
        found[(call.name, call.turn, seen[(call.name, call.turn)])] = call
        seen[(call.name, call.turn)] += 1
    return found


def clock_shifts(recordings: list[Recording]) -> list[int]:
    """Shift of each file's times in nanoseconds, so that all times count from the same moment.

    The clocks of hosts differ. An allreduce ends on no rank before all ranks have reached it, which bounds each shift
    from both sides. The shift by the clocks is used if it is within the bounds, otherwise the middle of the bounds.
    """
    reference = by_key(recordings[0])
    shifts = [0]
    for recording in recordings[1:]:
        shift = recording.zero - recordings[0].zero
        lowest, highest = None, None
        for key, call in by_key(recording).items():
            other = reference.get(key)
            if other is None or "allreduce" not in call.signature or call.error or other.error:
                continue
            least, most = other.begin - call.end, other.end - call.begin
            lowest = least if lowest is None else max(lowest, least)
            highest = most if highest is None else min(highest, most)
        if lowest is not None and highest is not None and not lowest <= shift <= highest:
            shift = (lowest + highest) // 2
        shifts.append(shift)
    earliest = min(0, *shifts)
    return [shift - earliest for shift in shifts]


def clock_differences(recordings: list[Recording], shifts: list[int]) -> list[int]:
    """Nanoseconds by which each file's clock was corrected; 0 if it was trusted."""
    return [shift - shifts[0] - (recording.zero - recordings[0].zero) for recording, shift in zip(recordings, shifts)]


def last_rank(key: Key, call: Call, calls: dict[int, dict[Key, Call]]) -> int:
    """The rank that came last to an operation; -1 if the files do not show it.

    If there are several hosts, rank 0 knows which host came last. Each rank knows which rank came last on its host.
    """
    leader = calls.get(0, {}).get(key)
    if leader is not None and leader.first is not None and len(leader.first.host_order) > 1:
        host = leader.first.host_order[-1]
        on_host = next((c[key] for c in calls.values() if key in c and host in c[key].order), None)
        return on_host.order[-1] if on_host is not None else host
    return call.order[-1] if call.order else -1
