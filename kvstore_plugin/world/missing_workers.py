"""Ends the job if this rank waits in init() for a worker that has ended, and names the worker.

MPI does not report ended ranks to ranks that wait in MPI_Init or in init()'s first messages. So a thread checks the
processes of this host. An ended worker on another host is not noticed: then a warning after MYKV_STALL_WARN_S says how
long init() has waited.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Callable, Collection

from mykvrun import worker_notes

from . import launch_checks, launched, new_workers, settings

_log = logging.getLogger("kvstore_plugin")

_FIRST_LOOK_S, _LOOK_S = 2.0, 0.5
_LOOKS = 3  # consecutive checks: a launcher may start its processes one after the other
_HIGHER_LOOKS = 4  # extra checks of ranks other than the lowest, so that only the lowest rank reports


class Watch:
    """Looks for workers that have ended, inside the ``with`` block.

    Parameters
    ----------
    ranks : collection of int, optional
        The ranks in MPI_COMM_WORLD that are waited for; all by default.
    abort : callable
        Called with an exit status, ends the job; used only if MPI is initialized.
    """

    def __init__(self, ranks: Collection[int] | None, abort: Callable[[int], None]) -> None:
        self._ranks, self._abort = ranks, abort
        self._over = threading.Event()
        job = launch_checks.launched_processes(os.environ)
        self._size = 1 if job is None or new_workers.is_waiting() else job[1]

    def __enter__(self) -> None:
        if self._size > 1:
            threading.Thread(target=self._run, name="kvstore_plugin-missing-workers", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self) -> None:
        began, seen = time.monotonic(), 0
        warn_after = _warn_after()
        pause = _FIRST_LOOK_S
        while not self._over.wait(pause):
            pause = _LOOK_S
            who, is_lowest = self._look()
            seen = seen + 1 if who else 0
            if seen >= _LOOKS + (0 if is_lowest else _HIGHER_LOOKS) and not self._over.is_set():
                self._end(who)
            if warn_after and time.monotonic() - began >= warn_after:
                warn_after = 0.0
                _log.warning(
                    "init() has waited for %.0f s: not all %d workers have called it. It waits until all have.",
                    time.monotonic() - began,
                    self._size,
                )

    def _look(self) -> tuple[str, bool]:
        """The ended workers, and whether this rank is the lowest surviving one."""
        try:
            workers = launched.workers_here()
        except (OSError, ValueError):
            workers = None
        if workers is None:
            return "", False
        ended = sorted(rank for rank in workers.ended if self._ranks is None or rank in self._ranks)
        mine = launch_checks.launched_rank(os.environ)
        is_lowest = bool(workers.alive) and mine == min(workers.alive)
        if ended:
            many = len(ended) > 1
            return f"rank{'s' * many} {', '.join(map(str, ended))}, which {'have' if many else 'has'} ended", is_lowest
        if workers.missing and self._ranks is None:
            return f"{workers.missing} of the workers of this host, which have ended", is_lowest
        return "", False

    def _end(self, who: str) -> None:
        worker_notes.tell_end(1, f"an error: init() waits for {who}")
        _log.error(
            "init() waits for %s without calling it. All workers must call init(): look for a sys.exit(), a return or "
            "an os._exit() that not all workers reach. The job ends.",
            who,
        )
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):
                continue
        module = sys.modules.get("mpi4py.MPI")
        if module is not None and module.Is_initialized():
            self._abort(1)
        os._exit(1)


def _warn_after() -> float:
    try:
        return settings.value("MYKV_STALL_WARN_S")
    except ValueError:  # process._read_settings() reports the wrong value
        return 0.0
