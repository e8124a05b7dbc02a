"""A trace of the files of a job's ranks in Chrome's trace event format: a process for each rank, and one clock.

A process has a row for each name, and in the row a bar for each call, with its phases below the bar. Viewers require
that the bars of a row nest, so calls of one name that overlap in time get separate rows.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, Iterator, Sequence, Tuple

from .joined import Key, by_key, clock_differences, last_rank
from .phases import Part
from .recording import Call, Recording

_SHORTEST_FLOW_MS = 0.1  # shortest wait with an arrow from the late rank
# Names of unnamed operations, and of calls of layers ("/forward/12.0"), contain a number that differs for each call.
# Without it, these calls share a row.
_NUMBERED = re.compile(r"(/(?:unnamed|waiting|forward|backward))/[0-9.-]+")

Event = Dict[str, Any]
Bar = Tuple[int, int]  # begin and end in nanoseconds


def trace(recordings: list[Recording], shifts: list[int]) -> dict[str, Any]:
    """The trace, as an object for JSON. `shifts`: nanoseconds to add to the times of each file."""
    first = recordings[0]
    events: list[Event] = []
    rows: dict[int, dict[Key, int]] = {}  # the row of each call, of each rank
    for recording, shift in zip(recordings, shifts):
        process = _Process(recording, shift)
        rows[recording.rank] = dict(zip(by_key(recording), process.call_rows))
        events += process.events
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "mykv": first.version,
            "job": first.job,
            "ranks": [recording.rank for recording in recordings],
            "size": first.size,
            "host_ranks": first.host_ranks,
            "unix_time_at_zero_us": (first.zero - shifts[0]) / 1000,
            "clock_difference_us": [difference / 1000 for difference in clock_differences(recordings, shifts)],
        },
        "traceEvents": events + list(_flows(recordings, shifts, rows)),
    }


def lanes(bars: Sequence[Bar]) -> list[int]:
    """The number of a lane for each bar, such that bars in a lane do not overlap, and there are few lanes."""
    ends: list[int] = []  # the end of each lane's last bar
    found = [0] * len(bars)
    for index in sorted(range(len(bars)), key=lambda index: bars[index][0]):
        begin, end = bars[index]
        lane = next((number for number, last in enumerate(ends) if last <= begin), len(ends))
        ends[lane:] = [end, *ends[lane + 1 :]]
        found[index] = lane
    return found


class _Process:
    """The events of one rank."""

    def __init__(self, recording: Recording, shift: int) -> None:
        self._rank, self._shift = recording.rank, shift
        self._row_count = 0
        self.events: list[Event] = []
        name = f"rank {recording.rank} on {recording.host}"
        self._describe("process_name", name=name)
        self._describe("process_sort_index", sort_index=recording.rank)

        names = [_NUMBERED.sub(r"\1", call.name, count=1) for call in recording.calls]
        self.call_rows = self._rows(names, [(call.begin, call.end) for call in recording.calls])
        for call, row, row_name in zip(recording.calls, self.call_rows, names):
            self._add_call(call, row, row_name)
        threads = [thread for thread, _, _ in recording.awake]
        times = [(begin, end) for _, begin, end in recording.awake]
        for row, bar in zip(self._rows(threads, times, on_top=True), times):
            self._add_bar(row, "awake", bar)
        for time, count in recording.dropped:
            text = "operations left out: the file could not be written fast enough"
            self._add("i", 0, s="p", ts=self._us(time), name=text, args={"operations": count})

    def _rows(self, names: list[str], bars: list[Bar], on_top: bool = False) -> list[int]:
        """The number of a row for each bar. Adds the rows, named by `names`."""
        of_name: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            of_name.setdefault(name, []).append(index)
        found = [0] * len(bars)
        for name, indices in of_name.items():
            first = self._row_count + 1
            for index, lane in zip(indices, lanes([bars[index] for index in indices])):
                found[index] = first + lane
                self._row_count = max(self._row_count, found[index])
            for row in range(first, self._row_count + 1):
                self._describe("thread_name", row, name=name)
                self._describe("thread_sort_index", row, sort_index=-1 if on_top else row)
        return found

    def _add_call(self, call: Call, row: int, row_name: str) -> None:
        about: dict[str, Any] = {"bytes": call.size, "turn": call.turn, "signature": call.signature}
        about["operation"] = call.name if call.name != row_name else ""
        about["priority"] = call.priority
        about["parts"] = call.parts if call.parts > 1 else 0
        about["error"] = call.error
        about = {name: value for name, value in about.items() if value or name in ("bytes", "turn", "signature")}
        if call.first is not None:
            about.update(_arrivals(call.first))
        # "allreduce sum of float32 (3, 4)": the bar is named by the text before " of "; its args have the rest.
        self._add_bar(row, call.signature.partition(" of ")[0], (call.begin, call.end), about)
        for phase in call.phases:
            waits = phase.name == "wait"
            about = {"part": phase.part.number} if waits or call.parts > 1 else {}
            self._add_bar(
                row, phase.name, (phase.begin, phase.end), {**about, **(_arrivals(phase.part) if waits else {})}
            )

    def _add_bar(self, row: int, name: str, bar: Bar, about: dict[str, Any] | None = None) -> None:
        begin, end = bar
        self._add("X", row, ts=self._us(begin), dur=(end - begin) / 1000, name=name, args=about or {})

    def _describe(self, what: str, row: int = 0, **about: Any) -> None:
        self._add("M", row, name=what, args=about)

    def _add(self, kind: str, row: int, **more: Any) -> None:
        self.events.append({"ph": kind, "pid": self._rank, "tid": row, **more})

    def _us(self, time: int) -> float:
        return _microseconds(time + self._shift)


def _microseconds(time: int) -> float:
    return max(time, 0) / 1000  # times of trace events are not negative


def _arrivals(part: Part) -> dict[str, Any]:
    of_ranks = {"order": part.order, "late_ms": part.late} if part.order else {}
    of_hosts = {"host_order": part.host_order, "host_late_ms": part.host_late} if part.host_order else {}
    return {**of_ranks, **of_hosts}


def _flows(recordings: list[Recording], shifts: list[int], rows: dict[int, dict[Key, int]]) -> Iterator[Event]:
    """An arrow for each wait: from the rank that came last to each rank that waited for it."""
    calls = {recording.rank: by_key(recording) for recording in recordings}
    shift_of = {recording.rank: shift for recording, shift in zip(recordings, shifts)}
    number = 0
    for rank, key, call in _all_calls(calls):
        last = last_rank(key, call, calls)
        late = calls.get(last, {}).get(key) if last != rank else None
        waits = [(phase.end - phase.begin, phase.end) for phase in call.phases if phase.name == "wait"]
        if late is None or not waits or max(waits)[0] < _SHORTEST_FLOW_MS * 1e6:
            continue
        number += 1
        common = {"name": "waited for", "cat": "wait", "id": number}
        end = max(waits)[1] + shift_of[rank]
        begin = min(late.begin + shift_of[last], end)  # clocks differ; no arrow points back in time
        yield {**common, "ph": "s", "pid": last, "tid": rows[last][key], "ts": _microseconds(begin)}
        yield {**common, "ph": "f", "bp": "e", "pid": rank, "tid": rows[rank][key], "ts": _microseconds(end)}


def _all_calls(calls: dict[int, dict[Key, Call]]) -> Iterable[tuple[int, Key, Call]]:
    return ((rank, key, call) for rank, of_rank in calls.items() for key, call in of_rank.items())
