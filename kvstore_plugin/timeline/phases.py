"""The phases of a call, made from the times of its parts."""

from __future__ import annotations

from typing import NamedTuple

# The names of phases, in the order in which they are colored.
PHASES = ("copy in", "wait", "reduce", "network", "spread", "copy out")
# The phases of a part in the order of its times in the file, which is the order in which they happen.
_OF_PART = ("copy in", "wait", "reduce", "network", "reduce", "network", "spread", "copy out")
# A row shows one phase at each moment: first the work of the rank's own thread, then work of other threads, last
# waiting.
_PRECEDENCE = ("copy in", "copy out", "reduce", "spread", "network", "wait")
_SHORTEST = 100  # ns; shorter pieces are not shown


class Part(NamedTuple):
    """A part of a call's array.

    Attributes
    ----------
    order, late : list
        Ranks of this rank's host in the order of arrival, and each rank's milliseconds after the first rank.
    host_order, host_late : list
        The same for hosts, each given by its first rank; empty except in rank 0's file of a job on several hosts.
    intervals : list of (int, int) or None
        Begin and end in nanoseconds of each phase in the order of the file; None for a phase that did not happen.
    """

    number: int
    order: list[int]
    late: list[float]
    host_order: list[int]
    host_late: list[float]
    intervals: list[tuple[int, int] | None]


class Phase(NamedTuple):
    """A phase of a call; times in nanoseconds."""

    name: str
    begin: int
    end: int
    part: Part


def phases(begin: int, end: int, parts: list[Part]) -> list[Phase]:
    """The shown phases of a call: disjoint, in the order of time, within the call's times."""
    pieces = []
    for part in parts:
        for name, interval in zip(_OF_PART, part.intervals):
            if interval is None:
                continue
            piece = Phase(name, max(interval[0], begin), min(interval[1], end), part)
            if piece.begin < piece.end:
                pieces.append(piece)
    return _first_of_each_moment(pieces) if len(parts) > 1 else _in_sequence(pieces)


def _in_sequence(pieces: list[Phase]) -> list[Phase]:
    """The phases of one part, which follow each other, without small overlaps.

    They overlap since different threads read the times, and some read them late.
    """
    shown, last = [], 0
    for piece in pieces:
        begin = max(piece.begin, last)
        last = max(last, piece.end)
        if piece.end - begin >= _SHORTEST:
            shown.append(piece._replace(begin=begin))
    return shown


def _first_of_each_moment(pieces: list[Phase]) -> list[Phase]:
    """The phase that is first in `_PRECEDENCE` at each moment: parts are in different phases at the same time."""
    edges = [(piece.begin, number) for number, piece in enumerate(pieces)]
    edges += [(piece.end, number) for number, piece in enumerate(pieces)]
    open_pieces: dict[str, list[int]] = {name: [] for name in _PRECEDENCE}
    shown: list[Phase] = []
    current, since = None, 0
    for time, number in sorted(edges, key=lambda edge: edge[0]):
        same = open_pieces[pieces[number].name]
        if number in same:
            same.remove(number)
        else:
            same.append(number)
        first = next((numbers[0] for numbers in open_pieces.values() if numbers), None)
        if first == current:
            continue
        if current is not None and time - since >= _SHORTEST:
            shown.append(pieces[current]._replace(begin=since, end=time))
        current, since = first, time
    return shown
