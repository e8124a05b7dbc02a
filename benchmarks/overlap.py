"""Plots the times of a trainer's buckets on the network: ``python -m benchmarks.overlap TIMELINE OUTPUT.svg``.

TIMELINE is a file of mykv.start_timeline() from a job on several hosts.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Container, Iterator

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from kvstore_plugin.timeline.phases import Phase
from kvstore_plugin.timeline.recording import Recording, read

_STEPS = 3  # plotted steps, from the middle of the file
_COLOURS = {"wait": "#d9d9d9", "network": "#3b6ea8"}


def main() -> None:
    """Read, plot, and print how long the network was idle."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("timeline", type=Path)
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    rows = _rows(read(str(given.timeline)))
    first = max(rows)
    begins = sorted(begin for name, begin, _ in rows[first] if name == "wait")
    if len(begins) <= _STEPS:
        parser.error(f"The timeline has {len(begins)} steps, and more than {_STEPS} are needed.")
    middle = (len(begins) - _STEPS) // 2
    window = (begins[middle], begins[middle + _STEPS])
    _draw(rows, window, given.output)
    busy = [(b, e) for row in rows.values() for name, b, e in row if name == "network"]
    share = _covered(busy, window) / (window[1] - window[0])
    print(f"{(window[1] - window[0]) / _STEPS:.0f} ms a step, something on the network {share:.1%} of the time")


def _rows(recording: Recording) -> dict[int, list[tuple[str, float, float]]]:
    """For each bucket its phases: name, begin and end in ms."""
    rows: dict[int, list[tuple[str, float, float]]] = {}
    for bucket, phase in bucket_phases(recording, _COLOURS):
        rows.setdefault(bucket, []).append((phase.name, phase.begin / 1e6, phase.end / 1e6))
    return dict(sorted(rows.items()))


def bucket_phases(recording: Recording, names: Container[str]) -> Iterator[tuple[int, Phase]]:
    """The phases with these names of a trainer's buckets, each with its bucket's number."""
    for call in recording.calls:
        bucket = re.search(r"bucket(\d+)$", call.name)
        for phase in call.phases if bucket else ():
            if phase.name in names:
                yield int(bucket.group(1)), phase


def _covered(intervals: list[tuple[float, float]], window: tuple[float, float]) -> float:
    """Total length of the window that the intervals cover."""
    covered, reached = 0.0, window[0]
    for begin, end in sorted(intervals):
        begin, end = max(begin, reached), min(end, window[1])
        if end > begin:
            covered += end - begin
            reached = end
    return covered


def _draw(rows: dict[int, list[tuple[str, float, float]]], window: tuple[float, float], output: Path) -> None:
    figure, axes = plt.subplots(figsize=(9, 3.6))
    for number, phases in rows.items():
        for name, begin, end in phases:
            axes.barh(number, end - begin, left=begin - window[0], height=0.8, color=_COLOURS[name])
    axes.set_xlim(0, window[1] - window[0])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_ylabel("bucket, 0 nearest the input")
    axes.legend(
        handles=[plt.Rectangle((0, 0), 1, 1, color=colour) for colour in _COLOURS.values()],
        labels=["written, waits for its turn", "on the network"],
        loc="upper center",
        bbox_to_anchor=(0.5, 1.15),
        ncol=2,
        frameon=False,
    )
    figure.tight_layout()
    figure.savefig(output)


if __name__ == "__main__":
    main()
