"""Reads and checks the file of one rank's timeline, whose format is that of csrc/timeline/record_file.h."""

from __future__ import annotations

import json
import os
import re
import struct
from dataclasses import dataclass, field
from typing import Any

from .phases import Part, Phase, phases

KINDS = ("gradients", "allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "barrier", "other")
_KIND = re.compile(r"\b(barrier|allreduce|broadcast|allgather|reducescatter|alltoall)\b")
_GRADIENTS = re.compile(r"(a step|an update) with batch size ")

_HEAD = struct.Struct("<II")  # RecordHead
_REQUEST, _AWAKE, _DROPPED = 1, 2, 3  # RecordHead::Kind
_REQUEST_FIELDS = struct.Struct("<qqQQiIIIII")
_PART = struct.Struct("<IIII16q")
_ARRIVAL = struct.Struct("<qq")
_AWAKE_FIELDS = struct.Struct("<qq")
_DROPPED_FIELDS = struct.Struct("<qQ")


class TimelineError(Exception):
    """A file cannot be shown. The text is for users."""


@dataclass
class Call:
    """One operation as one rank saw it.

    Attributes
    ----------
    begin, end : int
        When this rank's arrays were ready, and when the result was ready, in nanoseconds since `Recording.zero`.
    parts : int
        Number of parts that the operation was divided into.
    first : Part or None
        The first part, with the ranks in the order of arrival; None if the operation failed before it began.
    """

    name: str
    turn: int
    kind: str
    signature: str
    size: int
    begin: int
    end: int
    priority: int
    parts: int
    error: str
    first: Part | None
    phases: list[Phase]

    @property
    def order(self) -> list[int]:
        """Ranks of this rank's host in the order of arrival."""
        return self.first.order if self.first else []

    def spent(self, phase: str) -> int:
        """Nanoseconds in a phase."""
        return sum(one.end - one.begin for one in self.phases if one.name == phase)


@dataclass
class Recording:
    """The timeline of one rank.

    Attributes
    ----------
    zero : int
        Origin of all times, in nanoseconds since 1970.
    awake : list of (str, int, int)
        Name of a thread, and from when to when it was awake.
    dropped : list of (int, int)
        When operations were left out, since the file could not be written fast enough, and how many.
    """

    path: str
    rank: int
    size: int
    host: str
    host_ranks: list[list[int]]
    job: str
    version: str
    zero: int
    calls: list[Call] = field(default_factory=list)
    awake: list[tuple[str, int, int]] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)

    def host_of(self, rank: int) -> list[int]:
        """The ranks on a rank's host."""
        return next((ranks for ranks in self.host_ranks if rank in ranks), [rank])


def read(path: str) -> Recording:
    """Read a file of `start_timeline`.

    Raises
    ------
    TimelineError
        The file cannot be read, or is not a timeline.
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
    line = data.partition(b"\n")[0]
    try:
        about = json.loads(line.decode())  # decoded here, since json would guess the encoding of bytes
        if "traceEvents" in about:
            raise TimelineError(f"{path} is a trace for viewers. Give the files that start_timeline() has written.")
        recording = _recording(path, about)
        _add_records(recording, data, len(line) + 1, _number(about["zero_ns"]))
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError, struct.error) as error:
        raise TimelineError(
            f"{path} is not a timeline of mykv ({type(error).__name__}: {error}). Give files that start_timeline() or "
            "MYKV_TIMELINE has written."
        ) from None
    return recording


def _recording(path: str, about: dict[str, Any]) -> Recording:
    if not isinstance(about["mykv"], str):
        raise TypeError("the version has a wrong type")
    return Recording(
        path=path,
        rank=_number(about["rank"]),
        size=_number(about["size"]),
        host=str(about["host"]),
        host_ranks=[[_number(rank) for rank in ranks] for ranks in about["host_ranks"]],
        job=str(about["job"]),
        version=about["mykv"],
        zero=_number(about["unix_time_at_zero_ns"]),
    )


def _number(value: Any) -> int:
    number = int(value)
    if abs(number) >= 2**63:
        raise OverflowError("a number has more than 64 bits")
    return number


def _add_records(recording: Recording, data: bytes, at: int, zero: int) -> None:
    """Add the records from offset `at` on. A file may end within a record, if the disk was full or the rank killed."""
    while at + _HEAD.size <= len(data):
        kind, size = _HEAD.unpack_from(data, at)
        if size < _HEAD.size or kind not in (_REQUEST, _AWAKE, _DROPPED):
            raise ValueError(f"no record begins at byte {at}")
        if at + size > len(data):
            return
        record = data[at + _HEAD.size : at + size]
        if kind == _REQUEST:
            recording.calls.append(_call(record, zero))
        elif kind == _AWAKE:
            begin, end = _AWAKE_FIELDS.unpack_from(record)
            thread = record[_AWAKE_FIELDS.size :].decode()
            recording.awake.append((thread, max(begin - zero, 0), max(end - zero, 0)))
        else:
            time, count = _DROPPED_FIELDS.unpack(record)
            recording.dropped.append((time - zero, count))
        at += size


def _call(record: bytes, zero: int) -> Call:
    begin, end, size, turn, priority, planned, parts, arrivals, name_bytes, signature_bytes = (
        _REQUEST_FIELDS.unpack_from(record)
    )
    first_arrival = _REQUEST_FIELDS.size + parts * _PART.size
    text = first_arrival + arrivals * _ARRIVAL.size
    if text + name_bytes + signature_bytes > len(record):
        raise ValueError("an operation's record is too short")
    arrived = list(_ARRIVAL.iter_unpack(record[first_arrival:text]))
    found = [_part(part, arrived, zero) for part in _PART.iter_unpack(record[_REQUEST_FIELDS.size : first_arrival])]
    signature = record[text + name_bytes : text + name_bytes + signature_bytes].decode()
    return Call(
        name=record[text : text + name_bytes].decode(),
        turn=turn,
        kind=_kind(signature),
        signature=signature,
        size=size,
        begin=begin - zero,
        end=end - zero,
        priority=priority,
        parts=planned,
        error=record[text + name_bytes + signature_bytes :].decode(),
        first=next((part for part in found if part.number == 0), None),
        phases=phases(begin - zero, end - zero, found),
    )


def _part(fields: tuple[int, ...], arrived: list[tuple[int, int]], zero: int) -> Part:
    number, first, ranks, hosts, *times = fields
    return Part(
        number,
        *_in_order(arrived[first : first + ranks]),
        *_in_order(arrived[first + ranks : first + ranks + hosts]),
        [(begin - zero, end - zero) if begin != 0 else None for begin, end in zip(times[::2], times[1::2])],
    )


def _in_order(arrived: list[tuple[int, int]]) -> tuple[list[int], list[float]]:
    """Ranks in the order of arrival, and each rank's milliseconds after the first rank, from ranks and times."""
    in_order = sorted(arrived, key=lambda arrival: arrival[1])
    return [rank for rank, _ in in_order], [(time - in_order[0][1]) / 1e6 for _, time in in_order]


def _kind(signature: str) -> str:
    if _GRADIENTS.match(signature):
        return "gradients"
    found = _KIND.search(signature)
    return found.group(1) if found else "other"
