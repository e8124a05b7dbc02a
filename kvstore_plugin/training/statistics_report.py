"""The table of MYKV_REPORT, which rank 0 prints at the end and at intervals.

Rank 0 prints its own figures without asking other workers, so the table appears even if workers have ended or died.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from ..world import new_workers, process, settings
from . import statistics as counters

_SHOWN_LATE = 3
_SHOWN_BUCKETS = 8
_JOIN_S = 5.0


def table(numbers: dict[str, Any]) -> str:
    """The statistics as lines of text.

    Parameters
    ----------
    numbers : dict
        As `statistics` returns it.
    """
    title = f"mykv: {_seconds(numbers['seconds'])}, {numbers['steps']:,} steps, on rank 0 of {process.size()}"
    slow = [one for one in numbers["late"] if one["operation_wait"] > 0][:_SHOWN_LATE]
    lines = [("slow", late_sentence(one, numbers)) for one in slow] or [("slow", "no worker waited for another one")]
    lines += [
        ("waited", _waited(numbers)),
        ("operations", _operations(numbers)),
        ("communication", _communication(numbers)),
        ("update", f"{_each(numbers['update'], numbers)}"),
    ]
    lines += [line for one in numbers["trainers"] for line in _trainer(one)]
    before, width = None, max(len(name) for name, _ in lines)
    rows = []
    for name, text in lines:
        rows.append(f"  {'' if name == before else name:<{width}}  {text}")
        before = name
    return "\n".join([title, *rows])


def late_sentence(one: dict[str, Any], numbers: dict[str, Any]) -> str:
    """How often a worker came last, and how long the others waited for it."""
    unit = "operation" if one["step_share"] is None else "step"
    count = sum(other[f"{unit}s"] for other in numbers["late"])
    return (
        f"rank {one['rank']} of {one['machine']} came last in {one[f'{unit}_share']:.0%} of {count:,} {unit}s; the "
        f"others waited {_seconds(one[f'{unit}_wait'])} each time"
    )


def line(numbers: dict[str, Any]) -> str:
    """The statistics in one short text, for a progress bar."""
    words = []
    if numbers["late"] and numbers["steps"]:
        slowest = numbers["late"][0]
        lost = numbers["waited_in_steps"] / numbers["seconds"] if numbers["seconds"] else 0.0
        words.append(f"waits {lost:.0%}, slowest rank {slowest['rank']} ({slowest['step_share'] or 0:.0%})")
    if numbers["overlapped"] is not None:
        words.append(f"overlap {numbers['overlapped']:.0%}")
    if numbers["steps"]:
        words.append(f"update {_seconds(numbers['update'] / numbers['steps'])}")
    return ", ".join(words) or f"{numbers['operations']:,} operations"


def _waited(numbers: dict[str, Any]) -> str:
    text = f"{_seconds(numbers['waited'])} in all operations"
    if numbers["steps"]:
        share = numbers["waited_in_steps"] / numbers["seconds"]
        text += f"; {_each(numbers['waited_in_steps'], numbers)} after backward, {share:.0%} of the time"
    return text


def _operations(numbers: dict[str, Any]) -> str:
    roads = [
        f"{name} {road['operations']:,} ({_size(road['bytes'])})"
        for name, road in numbers["roads"].items()
        if road["operations"]
    ]
    failed = f", {numbers['failed']:,} failed" if numbers["failed"] else ""
    return f"{numbers['operations']:,} ({_size(numbers['bytes'])}): {', '.join(roads) or 'none'}{failed}"


def _communication(numbers: dict[str, Any]) -> str:
    if numbers["overlapped"] is None:
        return "no steps"
    return f"{_each(numbers['communication'], numbers)}, {numbers['overlapped']:.0%} of it while backward ran"


def _trainer(one: dict[str, Any]) -> list[tuple[str, str]]:
    sizes = sorted(one["bucket_bytes"], reverse=True)
    more = f" and {len(sizes) - _SHOWN_BUCKETS} smaller" if len(sizes) > _SHOWN_BUCKETS else ""
    shown = ", ".join(map(_size, sizes[:_SHOWN_BUCKETS]))
    lines = [f"{one['adopted']} gradients in buckets; operations of {shown}{more}"]
    lines += [f"{count} gradients copied: {why}" for why, count in one["copied"].items()]
    if one["sums_times"] is not None and process.size() > 1:
        lines.append(f"gradients summed over {process.size()} workers; step() for {one['sums_times']}")
    return [(one["name"], text) for text in lines]


def _each(seconds: float, numbers: dict[str, Any]) -> str:
    if not numbers["steps"]:
        return _seconds(seconds)
    return f"{_seconds(seconds / numbers['steps'])} a step"


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} us"


def _size(nbytes: int) -> str:
    size, units = float(nbytes), ["bytes", "KB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if size >= 100 or units[0] == "bytes" else f"{size:.1f} {units[0]}"


class _Report(process.Follower):
    """Prints the table while this rank is initialized, and when it leaves the other ranks."""

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_on = False

    def joined(self, core: Any) -> None:
        period = settings.value("MYKV_REPORT")
        # A new worker is rank 0 of its own world until it joins the others.
        self._is_on = bool(period) and core.rank() == 0 and not new_workers.is_waiting()
        if self._is_on and period > 1:
            self._ending.clear()
            self._thread = threading.Thread(
                target=self._print_often, args=(period,), name="kvstore_plugin-report", daemon=True
            )
            self._thread.start()

    def leaving(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
            self._thread = None
        if self._is_on:
            self._is_on = False
            _print()

    def _print_often(self, period: float) -> None:
        while not self._ending.wait(period):
            _print()


def _print() -> None:
    """Print the table; a failure to create or show it must not end training."""
    try:
        text = table(counters.statistics())
    except Exception as error:
        text = f"mykv: there is no report, since the statistics cannot be read: {error}"
    try:
        print(text, file=sys.stderr, flush=True)
    except (AttributeError, OSError, ValueError):  # the stream is closed, or None as under pythonw
        return


process.follow(_Report())
