"""Builds the page: one HTML file that contains its data, style and script."""

from __future__ import annotations

import json
import statistics
from html import escape
from pathlib import Path
from typing import Any, Iterable

from .joined import clock_differences
from .phases import PHASES
from .recording import KINDS, Call, Recording
from .summary import Lateness, Step, latecomers, sizes, steps
from .trace import lanes

_TEMPLATE = Path(__file__).with_name("page.html")
_ERROR_CHARACTERS = 300
_MOST_ERRORS = 50


def page(recordings: list[Recording], shifts: list[int]) -> str:
    """The page of timelines, whose times are moved by ``shifts`` (ns)."""
    of_rank = {recording.rank: steps(recording) for recording in recordings}
    parts = {
        "TITLE": escape(_title(recordings)),
        "ABOUT": escape(_about(recordings)),
        "NOTES": "".join(f"<li>{escape(note)}</li>" for note in _notes(recordings, shifts, of_rank)),
        "LATE": _late_table(*latecomers(recordings, shifts)),
        "OVERLAP": _overlap_table(of_rank),
        "SIZES": _size_table(recordings),
        "ERRORS": _error_table(recordings),
        "DATA": json.dumps(_data(recordings, shifts, of_rank), separators=(",", ":")).replace("<", "\\u003c"),
    }
    # Only the template is split at "@@", since inserted text may contain "@@" too.
    pieces = _TEMPLATE.read_text(encoding="utf-8").split("@@")
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def _title(recordings: list[Recording]) -> str:
    names = [str(recording.rank) for recording in recordings]
    if len(names) == 1:
        return f"Timeline of rank {names[0]}"
    shown = ", ".join(names) if len(names) <= 8 else f"{names[0]} to {names[-1]}"
    return f"Timeline of ranks {shown}"


def _about(recordings: list[Recording]) -> str:
    first = recordings[0]
    count = sum(len(recording.calls) for recording in recordings)
    return (
        f"{len(recordings)} of {_count(first.size, 'rank')} on {_count(len(first.host_ranks), 'host')}, "
        f"{_count(count, 'operation')}. Recorded by mykv {first.version}."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _notes(recordings: list[Recording], shifts: list[int], of_rank: dict[int, list[Step]]) -> list[str]:
    """Sentences about the most important findings."""
    notes = []
    late, known = latecomers(recordings, shifts)
    if late:
        worst = late[0]
        notes.append(
            f"Rank {worst.rank} cost the others most: it came last to {len(worst.held)} of {known} operations and held "
            f"them up by {worst.total / 1e6:.1f} ms in all."
        )
    known_steps = [step for of_one in of_rank.values() for step in of_one]
    communication = sum(step.communication for step in known_steps)
    if communication:
        share = sum(step.overlapped for step in known_steps) / communication
        notes.append(f"{share:.0%} of the communication of gradients ran while backward ran.")
    for one, difference in zip(recordings, clock_differences(recordings, shifts)):
        if difference:
            notes.append(
                f"The clock of rank {one.rank} on {one.host} was corrected by {abs(difference) / 1e6:.3f} ms, since an "
                "operation would have ended before all ranks had reached it."
            )
        left_out = sum(count for _, count in one.dropped)
        if left_out:
            notes.append(
                f"Operations of rank {one.rank} that are left out, since its file could not be written fast enough: "
                f"{left_out}."
            )
    return notes or ["No operation was recorded."]


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table; numbers are right-aligned."""
    lines = ["<table><thead><tr>", *(f"<th>{escape(name)}</th>" for name in head), "</tr></thead><tbody>"]
    for row in rows:
        cells = [(escape(str(cell)), "" if isinstance(cell, _Text) else ' class="n"') for cell in row]
        lines.append("<tr>" + "".join(f"<td{style}>{text}</td>" for text, style in cells) + "</tr>")
    return "".join([*lines, "</tbody></table>"])


class _Text(str):
    """A cell that is not a number."""


def _late_table(late: list[Lateness], known: int) -> str:
    if not late:
        return "<p>No operation of several ranks was recorded.</p>"
    return _table(
        ("rank", "came last", "share", "held the others up (ms)", "longest (ms)", "longest at"),
        (
            (
                recording.rank,
                len(recording.held),
                f"{len(recording.held) / known:.0%}",
                f"{recording.total / 1e6:.2f}",
                f"{recording.longest / 1e6:.2f}",
                _Text(recording.longest_name),
            )
            for recording in late
        ),
    )


def _overlap_table(of_rank: dict[int, list[Step]]) -> str:
    rows = []
    for rank, of_one in of_rank.items():
        for owner in dict.fromkeys(step.owner for step in of_one):
            own = [step for step in of_one if step.owner == owner]
            total = sum(step.communication for step in own)
            hidden = sum(step.overlapped for step in own)
            after = statistics.median((step.end - step.ready) / 1e6 for step in own)
            share = f"{hidden / total:.0%}" if total else ""
            rows.append((rank, _Text(owner), len(own), f"{total / len(own) / 1e6:.2f}", share, f"{after:.2f}"))
    head = (
        "rank",
        "trainer",
        "steps",
        "communication a step (ms)",
        "while backward ran",
        "after backward, median (ms)",
    )
    return _table(head, rows) if rows else "<p>No step of a trainer was recorded.</p>"


def _size_table(recordings: list[Recording]) -> str:
    head = ("operation", "size", "count", "MB in all", "median (ms)", "of it waiting for ranks (ms)")
    rows = (
        (
            _Text(one.kind),
            _Text(one.label),
            one.count,
            f"{one.size / 1e6:.2f}",
            f"{one.median:.3f}",
            f"{one.median_wait:.3f}",
        )
        for one in sizes(recordings)
    )
    return (
        _table(head, rows) if any(recording.calls for recording in recordings) else "<p>No operation was recorded.</p>"
    )


def _error_table(recordings: list[Recording]) -> str:
    failed = [(recording.rank, call) for recording in recordings for call in recording.calls if call.error]
    if not failed:
        return ""
    rows = [(rank, _Text(call.name), _Text(call.error[:_ERROR_CHARACTERS])) for rank, call in failed[:_MOST_ERRORS]]
    return f"<h2>Failed operations: {len(failed)}</h2>" + _table(("rank", "operation", "error"), rows)


def _data(recordings: list[Recording], shifts: list[int], of_rank: dict[int, list[Step]]) -> dict[str, Any]:
    """The data for the page's script; times in microseconds."""
    names: dict[str, int] = {}
    ranks = []
    for one, shift in zip(recordings, shifts):
        of_calls = lanes([(call.begin, call.end) for call in one.calls])
        ranks.append(
            {
                "rank": one.rank,
                "host": one.host,
                "lanes": max(of_calls, default=0) + 1,
                "calls": [_bar(call, lane, shift, names) for call, lane in zip(one.calls, of_calls)],
                "steps": [
                    [(time + shift) / 1000 for time in (step.begin, step.ready, step.end)] for step in of_rank[one.rank]
                ],
            }
        )
    return {"kinds": KINDS, "phases": PHASES, "names": list(names), "ranks": ranks}


def _bar(call: Call, lane: int, shift: int, names: dict[str, int]) -> list[Any]:
    def number(text: str) -> int:
        return names.setdefault(text, len(names))

    phases = [
        [PHASES.index(phase.name), (phase.begin - call.begin) / 1000, (phase.end - phase.begin) / 1000]
        for phase in call.phases
    ]
    return [
        (call.begin + shift) / 1000,
        (call.end - call.begin) / 1000,
        lane,
        KINDS.index(call.kind),
        number(call.name),
        call.turn,
        call.size,
        number(call.signature),
        phases,
        call.order,
        call.first.late if call.first else [],
        number(call.error),
    ]
