"""A memory cgroup of a test's own, as a container has one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Iterator, NamedTuple


class MemoryCgroup(NamedTuple):
    """Its folder, and the names of the files of its limit and of its use."""

    folder: Path
    limit: str
    usage: str


@contextlib.contextmanager
def memory_cgroup() -> Iterator[MemoryCgroup | None]:
    """One without a limit and without processes, or None where none can be made (it takes root, and a cgroup above)."""
    made = _made()
    try:
        yield made
    finally:
        if made is not None:
            for pid in (made.folder / "cgroup.procs").read_text().split():
                (made.folder.parent / "cgroup.procs").write_text(pid)
            made.folder.rmdir()


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
