"""The command ``python -m kvstore_plugin.timeline``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from .joined import check_same_job, clock_shifts
from .page import page
from .recording import Recording, TimelineError, read
from .trace import trace

_EPILOG = """examples:
  mykvrun -n 4 --timeline timeline.mykv python train.py                 rank 0 records
  python -m kvstore_plugin.timeline timeline.mykv                       write timeline.html, and open it in a browser
  python -m kvstore_plugin.timeline timeline.mykv --trace trace.json    and a trace for https://ui.perfetto.dev

  mykvrun -n 4 --timeline 'timeline-{rank}.mykv' python train.py        every rank records a file of its own
  python -m kvstore_plugin.timeline timeline-*.mykv --trace trace.json  one page and one trace of all ranks

The page is one file and needs no network. Large timelines: show a part with --begin and --end."""


def main(arguments: list[str] | None = None) -> int:
    """Write the page and, if asked for, the joined trace; return 0, or 2 with a message if that fails."""
    given = _parser().parse_args(arguments)
    try:
        _check_outputs(given)
        recordings = sorted((read(path) for path in given.files), key=lambda one: one.rank)
        check_same_job(recordings)
        shifts = clock_shifts(recordings)
        if given.trace:
            _write(given.trace, json.dumps(trace(recordings, shifts)))
        for one, shift in zip(recordings, shifts):
            _cut(one, shift, given.begin, given.end)
        _write(given.output, page(recordings, shifts))
    except TimelineError as error:
        print(f"timeline: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m kvstore_plugin.timeline",
        description="Write a page that shows timelines: operations of each rank over time, who was waited for, how "
        "much of the communication ran during backward, and sizes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "files", nargs="+", metavar="FILE", help="files of start_timeline() or MYKV_TIMELINE; several: ranks of one job"
    )
    add("-o", "--output", default="timeline.html", metavar="PAGE", help="the page, %(default)s by default")
    add("--trace", metavar="JSON", help="also write a trace of all ranks in Chrome's trace event format")
    add("--begin", type=float, default=0.0, metavar="S", help="show operations that end after S seconds")
    add("--end", type=float, default=float("inf"), metavar="S", help="show operations that begin before S seconds")
    return parser


def _check_outputs(given: Any) -> None:
    inputs = {os.path.realpath(path) for path in given.files}
    outputs = [path for path in (given.output, given.trace) if path]
    for path in outputs:
        if os.path.realpath(path) in inputs:
            raise TimelineError(f"{path} is one of the files to read. Give another name for what is written.")
    if len({os.path.realpath(path) for path in outputs}) < len(outputs):
        raise TimelineError(f"-o and --trace are both {given.output}. Give two names.")


def _cut(one: Recording, shift: int, begin: float, end: float) -> None:
    one.calls = [c for c in one.calls if c.end + shift >= begin * 1e9 and c.begin + shift <= end * 1e9]


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise TimelineError(f"{path} cannot be written: {os.strerror(error.errno or 0)}.") from None
    print(path)


if __name__ == "__main__":
    raise SystemExit(main())
