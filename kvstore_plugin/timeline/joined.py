"""Joins the files of a job's ranks into one trace: one process for each rank, and one clock."""

from __future__ import annotations

from collections import Counter
from typing import Any, Tuple

from .recording import Call, Recording, TimelineError, nanoseconds

# An operation of the job: its name, the number of the call, and its index among a file's calls with this name and
# number.
Key = Tuple[str, int, int]
_SHORTEST_FLOW_MS = 0.1  # shortest wait with an arrow from the late rank


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
    # Times of trace events are not negative.
    earliest = min(0, *shifts)
    return [shift - earliest for shift in shifts]


def clock_differences(recordings: list[Recording], shifts: list[int]) -> list[int]:
    """Nanoseconds by which each file's clock was corrected; 0 if it was trusted."""
    return [shift - shifts[0] - (recording.zero - recordings[0].zero) for recording, shift in zip(recordings, shifts)]


def joined_trace(recordings: list[Recording], shifts: list[int]) -> dict[str, Any]:
    """One trace of all files, with a process for each rank."""
    first = recordings[0]
    events: list[dict[str, Any]] = []
    for recording, shift in zip(recordings, shifts):
        events += _names(recording)
        events += [_moved(event, shift) for event in recording.events if not _is_name(event)]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "mykv": first.version,
            "job": first.job,
            "ranks": [recording.rank for recording in recordings],
            "size": first.size,
            "host_ranks": first.host_ranks,
            "unix_time_at_zero_us": (first.zero - shifts[0]) // 1000,
            "clock_difference_us": [difference / 1000 for difference in clock_differences(recordings, shifts)],
        },
        "traceEvents": events + _flows(recordings, shifts),
    }


def _is_name(event: dict[str, Any]) -> bool:
    return event["ph"] == "M" and event["name"] in ("process_name", "process_sort_index")


def _names(recording: Recording) -> list[dict[str, Any]]:
    name = f"rank {recording.rank} on {recording.host}"
    about = {"process_name": {"name": name}, "process_sort_index": {"sort_index": recording.rank}}
    return [{"ph": "M", "pid": recording.rank, "name": name, "args": args} for name, args in about.items()]


def _moved(event: dict[str, Any], shift: int) -> dict[str, Any]:
    return {**event, "ts": (nanoseconds(event["ts"]) + shift) / 1000} if "ts" in event else event


def _flows(recordings: list[Recording], shifts: list[int]) -> list[dict[str, Any]]:
    """An arrow for each wait: from the rank that came last to each rank that waited for it."""
    calls = {recording.rank: by_key(recording) for recording in recordings}
    shift_of = {recording.rank: shift for recording, shift in zip(recordings, shifts)}
    events: list[dict[str, Any]] = []
    number = 0
    for recording in recordings:
        for key, call in calls[recording.rank].items():
            last = last_rank(key, call, calls)
            waits = [(begin, end) for name, begin, end in call.phases if name == "wait"]
            late = calls.get(last, {}).get(key) if last != recording.rank else None
            if late is None or not waits or max(end - begin for begin, end in waits) < _SHORTEST_FLOW_MS * 1e6:
                continue
            number += 1
            common = {"name": "waited for", "cat": "wait", "id": number}
            arrow_end = max(waits, key=lambda wait: wait[1] - wait[0])[1] + shift_of[recording.rank]
            arrow_begin = min(late.begin + shift_of[last], arrow_end)  # clocks differ; no arrow points back in time
            source = {"ph": "s", "pid": last, "tid": late.tid, "ts": max(arrow_begin, 0) / 1000}
            target = {"ph": "f", "bp": "e", "pid": recording.rank, "tid": call.tid, "ts": arrow_end / 1000}
            events += [{**common, **source}, {**common, **target}]
    return events


def last_rank(key: Key, call: Call, calls: dict[int, dict[Key, Call]]) -> int:
    """The rank that came last to an operation; -1 if the files do not show it.

    If there are several hosts, rank 0 knows which host came last. Each rank knows which rank came last on its host.
    """
    leader = calls.get(0, {}).get(key)
    if leader is not None and len(leader.host_order) > 1:
        host = leader.host_order[-1]
        on_host = next((c[key] for c in calls.values() if key in c and host in c[key].order), None)
        return on_host.order[-1] if on_host is not None else host
    return call.order[-1] if call.order else -1
