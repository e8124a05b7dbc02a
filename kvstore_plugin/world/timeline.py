"""The timeline: a file that shows the phases of each operation, and when it waited for which rank.

Rank 0 writes a timeline, or each rank writes one if the file's name has ``{rank}``. A rank knows the arrivals and the
work of its host's ranks, which record them in shared memory while a timeline is on. Rank 0 also knows when it learned
that all ranks of another host had arrived. So a timeline needs no messages, and the other ranks need not call
start_timeline() at all.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import threading
import time

from . import core as core_loader
from . import launched, new_workers, process, settings
from .version import VERSION

_log = logging.getLogger("kvstore_plugin")
_lock = threading.Lock()
_RANK = "{rank}"  # in a path: every rank records, to a path with its number instead of this text
_path: str | None = None  # path of this rank's timeline


def start_timeline(file_path: str | os.PathLike, mark_cycles: bool = False) -> None:
    """Record the phases of every operation. ``python -m kvstore_plugin.timeline`` shows them.

    Rank 0 writes the file, so `file_path` must be writable only on rank 0; an existing file is replaced. On the other
    ranks the call only checks its arguments, so that all ranks may run the same program. If `file_path` contains
    ``{rank}``, each rank that calls this writes its own file, with its number in the name. The call is not collective
    and does not wait, and any time is allowed, even during training. Operations started earlier are left out.

    ``python -m kvstore_plugin.timeline FILE ...`` converts the file, or the files of all ranks, to a page, and with
    ``--trace JSON`` to Chrome's trace format, for https://ui.perfetto.dev.

    The file is complete after `stop_timeline`, `shutdown` or the end of the program. It can be read at any time, also
    while it is written; if the process is killed, the last 0.1 s may be missing.

    Parameters
    ----------
    file_path : str or path
        The file.
    mark_cycles : bool, optional
        Show when the runtime's threads are awake, one row for each process set. (Horovod marks its cycles, which have a
        fixed length.)

    Raises
    ------
    OSError
        The file cannot be created or written, or is not a regular file. Only on a rank that writes it.
    RuntimeError
        This rank records a timeline already, or init() was not called.
    TypeError, ValueError
        `file_path` is not a path, or is empty.

    Examples
    --------
    >>> mykv.start_timeline("timeline.mykv")
    >>> sums = mykv.allreduce(mx.np.ones(1000), name="sums")
    >>> sums.wait_to_read()
    >>> mykv.stop_timeline()  # then: python -m kvstore_plugin.timeline timeline.mykv
    """
    global _path
    core = process.core
    core.start_timeline  # noqa: B018 - raises before init() and in a forked child, which still knows its rank
    path = os.fsdecode(os.fspath(file_path))
    if not path:
        raise ValueError("start_timeline() needs the name of a file.")
    rank = core.rank()
    if rank != 0 and _RANK not in path:
        return  # and keep _path: this rank does not know whether rank 0 has a timeline
    path = path.replace(_RANK, str(rank))
    with _lock:
        if _path is not None:
            raise RuntimeError(f"a timeline is recorded to {_path} already: call stop_timeline() first.")
        _start(core, path, bool(mark_cycles))
        _path = path
    if path.endswith(".json"):
        _log.warning(
            "%s will not be JSON. To open it in https://ui.perfetto.dev, convert it at the end: "
            "python -m kvstore_plugin.timeline %s --trace trace.json",
            path,
            path,
        )


def stop_timeline() -> None:
    """End the timeline of `start_timeline` and complete its file; a no-op if no timeline is on.

    Operations that have not ended are left out. A new timeline may be started afterwards.

    Raises
    ------
    OSError
        The file could not be written to its end, for example because the disk is full. Its records can be read.

    Examples
    --------
    >>> mykv.start_timeline("timeline.mykv", mark_cycles=True)
    >>> mykv.barrier()
    >>> mykv.stop_timeline()
    """
    global _path
    with _lock:
        if _path is None:
            return
        path, _path = _path, None
        failure = core_loader.load().stop_timeline()
    if failure:
        raise OSError(failure, f"the timeline is not complete: {os.strerror(failure)}", path)


class _FollowTimeline(process.Follower):
    def joined(self, core: object) -> None:
        path = settings.value("MYKV_TIMELINE")
        if not path or new_workers.is_respawned():  # a new worker would overwrite another worker's file
            return
        # A restarted job, and elastic workers that restart, keep the earlier records.
        restart = launched.restart_count()
        path = f"{path}.restart{restart}" if restart else path
        path = path if process.generation == 1 else f"{path}.{process.generation}"
        try:
            start_timeline(path)
        except OSError as error:
            _log.warning("No timeline is recorded: MYKV_TIMELINE=%s cannot be written (%s).", path, error)

    def left(self, lost: bool) -> None:
        try:
            stop_timeline()
        except OSError as error:
            _log.warning("%s", error)


process.follow(_FollowTimeline())


def _start(core: object, path: str, mark_cycles: bool) -> None:
    # O_NONBLOCK: a pipe without a reader is an error instead of an endless wait.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"the timeline needs a regular file, but {path} is not a regular file.")
        os.ftruncate(fd, 0)
        failure = core.start_timeline(fd, json.dumps(_about(core)), mark_cycles)
    finally:
        os.close(fd)
    if failure:
        raise OSError(failure, os.strerror(failure), path)


def _clocks() -> tuple[int, int]:
    """The two clocks at the same moment (ns): the core's clock, and the time since 1970.

    The thread may be preempted between two readings, so the closest of several pairs is taken.
    """
    pairs = []
    for _ in range(5):
        before, unix_time, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        pairs.append((after - before, before, unix_time))
    return min(pairs)[1:]


def _about(core: object) -> dict[str, object]:
    """The file's first line, which kvstore_plugin/timeline/recording.py reads."""
    zero, unix_time = _clocks()
    return {
        "mykv": VERSION,
        "host": socket.gethostname(),
        "rank": core.rank(),
        "size": core.size(),
        "host_ranks": core.host_ranks(),
        "zero_ns": zero,
        "unix_time_at_zero_ns": unix_time,
        "job": f"{process.job}-{process.recoveries}",
    }
