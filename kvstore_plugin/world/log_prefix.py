"""Puts the rank before each message of the logger ``kvstore_plugin`` in a job of several ranks.

A filter of the logger does so. Handlers and formatters, which belong to the program, are not changed.
"""

from __future__ import annotations

import logging
import os

from . import launch_checks, new_workers

_log = logging.getLogger("kvstore_plugin")

_rank: int | None = None  # None: unknown yet, or a single rank
_has_joined = False


def install() -> None:
    """Begin messages with the rank from now on; a second call is a no-op."""
    _log.addFilter(_with_rank)


def remove() -> None:
    """Stop adding the rank, for a program that names ranks itself."""
    _log.removeFilter(_with_rank)


def joined(rank: int, size: int) -> None:
    """Remember this process's rank, including for messages after it has left the others."""
    global _rank, _has_joined
    _rank, _has_joined = rank if size > 1 else None, True


def _with_rank(record: logging.LogRecord) -> bool:
    rank = _rank if _has_joined else _rank_by_launcher()
    if rank is not None:
        record.msg = f"mykv on rank {rank}: {record.msg}"
    return True


def _rank_by_launcher() -> int | None:
    """The rank before init(); None in a new worker."""
    return None if new_workers.is_waiting() else launch_checks.launched_rank(os.environ)
