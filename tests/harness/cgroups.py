"""A memory cgroup for one test, like a container's."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Iterator, NamedTuple


class MemoryCgroup(NamedTuple):
    """Its folder, and the names of its files for limit and usage."""

    folder: Path
    limit: str
    usage: str


@contextlib.contextmanager
def memory_cgroup() -> Iterator[MemoryCgroup | None]:
    """Create an empty cgroup without a limit; None if that is impossible (it needs root and a parent cgroup)."""
    made = _made()
    try:
        yield made
    finally:
        if made is not None:
            _remove(made.folder)


def _remove(folder: Path) -> None:
    """Move its processes to the parent cgroup, and remove it. The kernel still counts a process that has just ended."""
    deadline = time.monotonic() + 10
    while True:
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (folder.parent / "cgroup.procs").write_text(pid)
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _made() -> MemoryCgroup | None:
    for top, limit, usage in (
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ):
        folder = Path(top) / f"mykv-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / limit).exists() and os.access(folder / limit, os.W_OK):
            return MemoryCgroup(folder, limit, usage)
        folder.rmdir()
    return None
