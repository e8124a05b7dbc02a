"""Figures of docs/benchmarks.md and docs/benchmarks-hosts.md, as the pages show them."""

from __future__ import annotations

import re

from .cases import MB
from .environments import ROOT

LINK = 1e9 / 8  # bytes per second, of the links of docs/benchmarks-hosts.md


def hosts_sums() -> dict[tuple[int, int], float]:
    """Seconds of a sum of 64 MB in shared memory, by hosts and workers on each, over links of 1 Gbit/s."""
    row = rf"^\| in place/{64 * MB} \| (\d+)x(\d+) \| mykv core \| as installed \| ([\d.]+) ms "
    found = re.findall(row, _page("benchmarks-hosts.md"), re.MULTILINE)
    return {(int(hosts), int(each)): float(time) / 1e3 for hosts, each, time in found}


def host_sums() -> dict[int, float]:
    """Seconds of a sum of 4 MB in shared memory, by the number of workers."""
    row = rf"^\| in place/{4 * MB} \| (\d+) \| mykv core \| as installed \| ([\d.]+) ms "
    return {int(workers): float(time) / 1e3 for workers, time in re.findall(row, _page("benchmarks.md"), re.MULTILINE)}


def limit(hosts: int) -> float:
    """Seconds that a link needs at least for its part of such a sum over so many hosts."""
    return 2 * (hosts - 1) / hosts * 64 * MB / LINK


def commit_of(page: str) -> str:
    """The commit whose figures a page of benchmarks shows."""
    found = re.search(r"^- commit (\w+)", _page(page), re.MULTILINE)
    if found is None:
        raise ValueError(f"docs/{page} names no commit.")
    return found.group(1)


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")
