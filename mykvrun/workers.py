"""The workers of this host as processes: those that end before init() while others wait there, and orphans.

Only the launcher is a child of mykvrun. Workers are the first processes below it that have a rank in their environment:
below mpirun of Open MPI, and with MPICH and Intel MPI below the processes of Hydra. Those of srun and of other hosts
are not seen from here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Callable, Iterator

from . import worker_notes

_PAUSE_S = 0.5
_PATIENCE_S = 3.0  # the others may still end by themselves, or the launcher ends them
_ORPHANS_S = 5.0  # from SIGTERM to SIGKILL
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of processes whose launcher is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def guarded(launcher: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the launcher, by SIGTERM, if this process ends before it in any way, as by SIGKILL.

    A small process of its own waits for that. PR_SET_PDEATHSIG would not do: the kernel sends that signal when each
    thread of a killed process ends, and after a second SIGTERM Open MPI's launcher ends without its workers.
    """
    assert launcher.stdout and launcher.stderr
    reading, writing = os.pipe()
    guard = os.fork()
    if guard == 0:
        _guard(launcher.pid, reading, [writing, launcher.stdout.fileno(), launcher.stderr.fileno()])
    os.close(reading)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.write(writing, b"x")
        os.close(writing)
        os.waitpid(guard, 0)


def _guard(launcher: int, reading: int, others: list[int]) -> None:
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        for descriptor in others:
            os.close(descriptor)
        if not os.read(reading, 1):  # the end, without a word from mykvrun
            os.kill(launcher, signal.SIGTERM)
    finally:
        os._exit(0)


def end_orphans() -> None:
    """End the workers that a killed launcher has left to this process."""
    deadline = time.monotonic() + _ORPHANS_S
    while True:
        orphans = dict(_ranks_below(os.getpid()))
        is_late = time.monotonic() > deadline
        for pid in orphans.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
        if not orphans or is_late:
            return
        time.sleep(_PAUSE_S)


class EarlyEnds:
    """Notices a worker that has ended without init() while others wait for it there.

    A thread, until all workers have joined. The launcher ends a job only where a worker's status is not 0, and the
    others wait in MPI_Init for as long as they are let.

    Parameters
    ----------
    launcher : int
        Its process id.
    workers : int
        How many ranks the job has, all of them on this host.
    notes : Path
        The folder of `worker_notes`.
    on_end : callable
        Called once with the ranks that have ended and the ranks that wait.
    """

    def __init__(
        self, launcher: int, workers: int, notes: Path, on_end: Callable[[list[int], list[int]], None]
    ) -> None:
        self._launcher, self._ranks, self._notes, self._on_end = launcher, set(range(workers)), notes, on_end
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="early-ends", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; the launcher has ended."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        since: float | None = None  # when a worker was first seen to be missing
        while not self._done.wait(_PAUSE_S):
            joined = worker_notes.ranks_with(self._notes, worker_notes.JOINED)
            if joined >= self._ranks:
                return
            ended, waiting = self._missing(joined)
            if not (ended and waiting):
                since = None
            elif since is None:
                since = time.monotonic()
            elif time.monotonic() - since >= _PATIENCE_S:
                self._on_end(sorted(ended), sorted(waiting))
                return

    def _missing(self, joined: set[int]) -> tuple[set[int], set[int]]:
        """The ranks that have ended without init(), and the ranks that wait in init()."""
        waiting = worker_notes.ranks_with(self._notes, worker_notes.WAITS) - joined
        if not waiting:
            return set(), set()
        living = {rank for rank, _ in _ranks_below(self._launcher)}
        living -= {end.rank for end in worker_notes.ends(self._notes)}  # such a worker may wait in MPI_Finalize
        return self._ranks - joined - living, waiting & living


def _ranks_below(pid: int) -> Iterator[tuple[int, int]]:
    """The rank and the process id of each worker below a process."""
    for child in _children_of(pid):
        try:
            words = Path(f"/proc/{child}/environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended, or belongs to another user
            continue
        rank = worker_notes.rank_in(dict(word.partition("=")[::2] for word in words))
        if rank is None:
            yield from _ranks_below(child)
        else:
            yield rank, child


def _children_of(pid: int) -> list[int]:
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, path.read_text(encoding="ascii").split())
    return children
