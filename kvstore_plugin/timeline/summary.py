"""The data of the page's tables: ranks that came last, sizes of operations, and communication during backward."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field

from .joined import Key, by_key, last_rank
from .recording import KINDS, Call, Recording

_OWNER = re.compile(r"(.*?trainer\d+)/")
_SIZE_CLASSES = [(4 << 10, "below 4 KiB"), (64 << 10, "4 to 64 KiB"), (1 << 20, "64 KiB to 1 MiB")]
_LARGEST = "1 MiB and more"


@dataclass
class Lateness:
    """How often a rank came last, and the resulting waits.

    ``held``: for each operation the arrival times (ns) of the last but one rank and of this rank. Between the two all
    other ranks waited only for this rank.
    """

    rank: int
    held: list[tuple[int, int]] = field(default_factory=list)
    longest: int = 0
    longest_name: str = ""

    @property
    def total(self) -> int:
        """Nanoseconds in which other ranks waited for this rank; simultaneous waits count once."""
        total, until = 0, 0
        for begin, end in sorted(self.held):
            total += max(0, end - max(begin, until))
            until = max(until, end)
        return total


def latecomers(recordings: list[Recording], shifts: list[int]) -> tuple[list[Lateness], int]:
    """Ranks that came last, the most costly first, and the number of operations whose last rank is known."""
    calls = {recording.rank: by_key(recording) for recording in recordings}
    found: dict[int, Lateness] = {}
    seen: set[Key] = set()
    for one, shift in zip(recordings, shifts):  # rank 0 comes first: only its file has other hosts' arrivals
        for key, call in calls[one.rank].items():
            interval = None if key in seen else _held(call, one)
            rank = last_rank(key, call, calls)
            if interval is None or rank < 0:
                continue
            seen.add(key)
            entry = found.setdefault(rank, Lateness(rank))
            entry.held.append((interval[0] + shift, interval[1] + shift))
            if interval[1] - interval[0] > entry.longest:
                entry.longest, entry.longest_name = interval[1] - interval[0], f"{call.name}, call {call.turn}"
    return sorted(found.values(), key=lambda entry: -entry.total), len(seen)


def _held(call: Call, one: Recording) -> tuple[int, int] | None:
    """Arrival times (ns) of the last but one and of the last rank or host at an operation; None if unknown."""
    if call.first is None:
        return None
    own, order, late = one.rank, call.first.order, call.first.late
    if len(call.first.host_order) > 1:
        own, order, late = one.host_of(one.rank)[0], call.first.host_order, call.first.host_late
    if len(order) < 2 or own not in order:
        return None
    arrived = next((phase.end for phase in call.phases[:1] if phase.name == "copy in"), call.begin)
    last = arrived + round((late[-1] - late[order.index(own)]) * 1e6)
    return last - round((late[-1] - late[-2]) * 1e6), last


@dataclass
class SizeClass:
    """Operations of one kind and similar size; times in milliseconds, on the rank that recorded them."""

    kind: str
    label: str
    count: int = 0
    size: int = 0
    times: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the time from ready arrays to the result."""
        return statistics.median(self.times)

    @property
    def median_wait(self) -> float:
        """Median of the time that the recording rank waited for other ranks."""
        return statistics.median(self.waits)


def sizes(recordings: list[Recording]) -> list[SizeClass]:
    """Operations by kind and size; the call of each rank counts separately."""
    labels = [label for _, label in _SIZE_CLASSES] + [_LARGEST]
    found: dict[tuple[int, int], SizeClass] = {}
    for recording in recordings:
        for call in recording.calls:
            number = next((n for n, (limit, _) in enumerate(_SIZE_CLASSES) if call.size < limit), len(_SIZE_CLASSES))
            size_class = (KINDS.index(call.kind), number)
            entry = found.setdefault(size_class, SizeClass(call.kind, labels[number]))
            entry.count += 1
            entry.size += call.size
            entry.times.append((call.end - call.begin) / 1e6)
            entry.waits.append(call.spent("wait") / 1e6)
    return [found[size_class] for size_class in sorted(found)]


@dataclass
class Step:
    """The gradients of one step of a trainer on one rank; times in nanoseconds, as in its `Recording`.

    Backward is visible from ``begin``, when the first gradients were ready, to ``ready``, when the last gradients were.
    """

    rank: int
    owner: str
    begin: int
    ready: int
    end: int
    communication: int  # time in which at least one operation of the step ran
    overlapped: int  # the part of `communication` before `ready`


def steps(recording: Recording) -> list[Step]:
    """The steps of all trainers in the order of time."""
    groups: dict[str, list[list[Call]]] = {}
    for call in sorted(recording.calls, key=lambda call: call.begin):
        owner = _OWNER.match(call.name)
        if call.kind != "gradients" or owner is None:
            continue
        of_owner = groups.setdefault(owner.group(1), [[]])
        if any(call.name == other.name for other in of_owner[-1]):  # a name occurs once in a step
            of_owner.append([])
        of_owner[-1].append(call)
    found = [_step(recording.rank, owner, calls) for owner, of_owner in groups.items() for calls in of_owner]
    return sorted(found, key=lambda step: step.begin)


def _step(rank: int, owner: str, calls: list[Call]) -> Step:
    ready = calls[-1].begin
    communication = overlapped = 0
    until = calls[0].begin
    for call in calls:  # sorted by begin: adds up the union of the calls' times
        begin = max(call.begin, until)
        until = max(until, call.end)
        communication += max(0, call.end - begin)
        overlapped += max(0, min(call.end, ready) - begin)
    return Step(rank, owner, calls[0].begin, ready, until, communication, overlapped)
