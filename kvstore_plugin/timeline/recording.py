"""Reads and checks the file of one rank's timeline."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import Any

# Names of the phases of a call, which the timeline shows as bars below the call's bar. Other bars without a signature
# occur only in rows of threads ("awake").
PHASES = ("copy in", "wait", "reduce", "network", "spread", "copy out")
KINDS = ("gradients", "allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "barrier", "other")
_KIND = re.compile(r"\b(barrier|allreduce|broadcast|allgather|reducescatter|alltoall)\b")
_GRADIENTS = re.compile(r"(a step|an update) with batch size ")


class TimelineError(Exception):
    """A file cannot be shown. The text is for users."""


@dataclass
class Call:
    """One operation as one rank saw it.

    Attributes
    ----------
    begin, end : int
        When this rank's arrays were ready, and when the result was ready, in nanoseconds since `Recording.zero`.
    order, late : list
        Ranks of this rank's host in the order of arrival, and each rank's milliseconds after the first rank.
    host_order, host_late : list
        The same for hosts, each given by its first rank; empty except in rank 0's file of a job on several hosts.
    phases : list of (str, int, int)
        Name, begin and end of each phase.
    """

    name: str
    row: str
    turn: int
    kind: str
    signature: str
    size: int
    begin: int
    end: int
    tid: int
    error: str
    order: list[int]
    late: list[float]
    host_order: list[int]
    host_late: list[float]
    phases: list[tuple[str, int, int]] = field(default_factory=list)

    def spent(self, phase: str) -> int:
        """Nanoseconds in a phase."""
        return sum(end - begin for name, begin, end in self.phases if name == phase)


@dataclass
class Recording:
    """The timeline of one rank. `zero`: origin of all times, in ns since 1970."""

    path: str
    rank: int
    size: int
    host: str
    host_ranks: list[list[int]]
    job: str
    version: str
    zero: int
    events: list[dict[str, Any]]
    calls: list[Call]

    def host_of(self, rank: int) -> list[int]:
        """The ranks on a rank's host."""
        return next((ranks for ranks in self.host_ranks if rank in ranks), [rank])


def read(path: str) -> Recording:
    """Read a file of `start_timeline`.

    Raises
    ------
    TimelineError
        The file cannot be read, is empty, or is not a timeline of mykv.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise TimelineError(f"{path} cannot be read: {os.strerror(error.errno or 0)}.") from None
    return parse(data, path)


def parse(data: bytes, path: str) -> Recording:
    """Like `read`, for the content `data` of a file; errors call the file `path`."""
    if not data.strip():
        raise TimelineError(f"{path} is empty. Only start_timeline() writes a timeline; this file has none.")
    try:
        content = json.loads(data.decode())  # decoded here, since json would guess the encoding of bytes
    except (ValueError, RecursionError) as error:  # includes UnicodeDecodeError
        raise TimelineError(f"{path} is not a timeline: it is not JSON ({error}).") from None
    try:
        return _recording(path, content)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise TimelineError(
            f"{path} is not a timeline of mykv ({type(error).__name__}: {error}). Give files that start_timeline() or "
            "MYKV_TIMELINE has written."
        ) from None


def _recording(path: str, content: Any) -> Recording:
    about = content["otherData"]
    events = content["traceEvents"]
    if not isinstance(about["mykv"], str) or not isinstance(events, list):
        raise TypeError("the version or the events have a wrong type")
    if "ranks" in about:
        raise TimelineError(f"{path} is a joined trace of several ranks. Give the files of the ranks themselves.")
    return Recording(
        path=path,
        rank=int(about["rank"]),
        size=int(about["size"]),
        host=str(about["host"]),
        host_ranks=[[int(rank) for rank in ranks] for ranks in about["host_ranks"]],
        job=str(about.get("job", "")),
        version=about["mykv"],
        zero=_number(about["unix_time_at_zero_us"]) * 1000,
        events=events,
        calls=_calls(events),
    )


def nanoseconds(microseconds: Any) -> int:
    """An event's time in nanoseconds, from the microseconds with three decimals in JSON."""
    return _number(round(microseconds * 1000))


def _number(value: Any) -> int:
    number = int(value)
    if abs(number) >= 2**63:
        raise OverflowError("a number has more than 64 bits")
    return number


def _arrivals(about: dict[str, Any], ranks: str, late: str) -> tuple[list[int], list[float]]:
    """The ranks in the order of arrival, and each rank's milliseconds after the first rank."""
    order = [_number(rank) for rank in about.get(ranks, [])]
    times = [nanoseconds(milliseconds * 1000) / 1e6 for milliseconds in about.get(late, [])]
    if len(order) != len(times):
        raise ValueError(f"{ranks} and {late} have different lengths")
    return order, times


def _calls(events: list[dict[str, Any]]) -> list[Call]:
    """The calls in the order of the file, each with its phases, which follow its bar in the same row."""
    rows: dict[int, str] = {}
    last: dict[int, Call] = {}  # the last call of each row
    calls = []
    for event in events:
        if event["ph"] == "M" and event["name"] == "thread_name":
            rows[event["tid"]] = event["args"]["name"]
        if event["ph"] != "X":
            nanoseconds(event.get("ts", 0))  # check the time now, since joined.py shifts all times
            continue
        begin = nanoseconds(event["ts"])
        end = begin + nanoseconds(event["dur"])
        about = event.get("args", {})
        if "signature" in about:
            last[event["tid"]] = call = _call(event["tid"], rows[event["tid"]], about, begin, end)
            calls.append(call)
        elif event["name"] in PHASES:
            last[event["tid"]].phases.append((event["name"], begin, end))
    return calls


def _call(tid: int, row: str, about: dict[str, Any], begin: int, end: int) -> Call:
    signature = str(about["signature"])
    order, late = _arrivals(about, "order", "late_ms")
    host_order, host_late = _arrivals(about, "host_order", "host_late_ms")
    return Call(
        name=str(about.get("operation", row)),
        row=row,
        turn=_number(about["turn"]),
        kind=_kind(signature),
        signature=signature,
        size=_number(about["bytes"]),
        begin=begin,
        end=end,
        tid=tid,
        error=str(about.get("error", "")),
        order=order,
        late=late,
        host_order=host_order,
        host_late=host_late,
    )


def _kind(signature: str) -> str:
    if _GRADIENTS.match(signature):
        return "gradients"
    found = _KIND.search(signature)
    return found.group(1) if found else "other"
