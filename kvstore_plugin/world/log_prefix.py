"""Each message of the logger ``kvstore_plugin`` begins with the rank in a job of several ranks.

A filter of the logger does that. It touches neither handlers nor formatters, which belong to the program.
"""

from __future__ import annotations

import logging
import os

from . import launch_checks, new_workers

_log = logging.getLogger("kvstore_plugin")

_rank: int | None = None  # None: not known yet, or the only rank
_has_joined = False


def install() -> None:
    """Begin messages with the rank from now on; a second call is a no-op."""
    _log.addFilter(_with_rank)


def remove() -> None:
    """Leave messages as they are, for a program that names ranks itself."""
    _log.removeFilter(_with_rank)


def joined(rank: int, size: int) -> None:
    """Remember this process's rank, also for messages after it has left the others."""
    global _rank, _has_joined
    _rank, _has_joined = rank if size > 1 else None, True


def _with_rank(record: logging.LogRecord) -> bool:
    rank = _rank if _has_joined else _rank_by_launcher()
    if rank is not None:
        record.msg = f"mykv on rank {rank}: {record.msg}"
    return True


def _rank_by_launcher() -> int | None:
    """The rank before init(); a new worker has none yet."""
    return None if new_workers.is_waiting() else launch_checks.launched_rank(os.environ)
