"""Reads figures of docs/benchmarks.md and docs/benchmarks-hosts.md, and of their tables."""

from __future__ import annotations

import csv
import re

from .cases import MB
from .environments import ROOT

LINK = 1e9 / 8  # bytes per second of the links in docs/benchmarks-hosts.md


def hosts_sums() -> dict[tuple[int, int], float]:
    """Seconds of a sum of 64 MB in shared memory, by hosts and workers on each, over links of 1 Gbit/s."""
    sums = _of_the_core("benchmarks-hosts", f"in place/{64 * MB}").items()
    return {(int(hosts), int(each)): seconds for (hosts, _, each), seconds in ((s.partition("x"), t) for s, t in sums)}


def host_sums() -> dict[int, float]:
    """Seconds of a sum of 4 MB in shared memory, by the number of workers."""
    return {int(size): seconds for size, seconds in _of_the_core("benchmarks", f"in place/{4 * MB}").items()}


def times(page: str) -> list[list[str]]:
    """Rows of the table of all times of a page of benchmarks, without its head (report.write_times)."""
    with (ROOT / "docs" / page / "times.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


def _of_the_core(page: str, work: str) -> dict[str, float]:
    rows = [row for row in times(page) if [row[0], *row[2:4]] == [work, "mykv core", "as installed"]]
    return {row[1]: float(row[4]) / 1e3 for row in rows}


def limit(hosts: int) -> float:
    """The shortest time, in seconds, in which a link can carry its part of such a sum over this number of hosts."""
    return 2 * (hosts - 1) / hosts * 64 * MB / LINK


def commit_of(page: str) -> str:
    """The commit of the figures on a page of benchmarks."""
    found = re.search(r"^- commit (\w+)", _page(page), re.MULTILINE)
    if found is None:
        raise ValueError(f"docs/{page} names no commit.")
    return found.group(1)


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")
