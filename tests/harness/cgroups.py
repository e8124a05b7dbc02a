"""A memory cgroup of a test's own, as a container has one."""

from __future__ import annotations

import contextlib
import os
import time
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
            _remove(made.folder)


def _remove(folder: Path) -> None:
    """Move its processes to the cgroup above, and remove it. The kernel counts one that has just ended for a moment."""
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
