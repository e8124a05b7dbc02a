"""Ends the launcher and this host's workers if mykvrun or the launcher is killed.

Only the launcher is a child of mykvrun. Workers are descendants of the launcher: of Open MPI's mpirun, or of Hydra's
processes with MPICH and Intel MPI. Workers whose parent has ended become children of mykvrun, which is a subreaper.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Iterator

_PAUSE_S = 0.5
_ORPHANS_S = 5.0  # seconds from SIGTERM to SIGKILL
_KILLED_S = 10.0  # seconds to wait after SIGKILL, since a process may be waiting for a disk
WITHOUT_WORKERS_S = 5.0  # how long a launcher may continue after its last worker has ended
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the subreaper of processes whose launcher is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def guarded(launcher: subprocess.Popen[bytes]) -> Iterator[int]:
    """End the launcher by SIGTERM if this process ends first in any way, even by SIGKILL.

    A small guard process, whose id is returned, waits for this process to end. PR_SET_PDEATHSIG does not suffice: the
    kernel sends that signal once per thread of a killed process, and after a second SIGTERM Open MPI's launcher ends
    without ending its workers.
    """
    assert launcher.stdout and launcher.stderr
    reading, writing = os.pipe()
    guard = os.fork()
    if guard == 0:
        _guard(launcher.pid, reading, [writing, launcher.stdout.fileno(), launcher.stderr.fileno()])
    os.close(reading)
    try:
        yield guard
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
        if not os.read(reading, 1):  # the pipe was closed without a byte: mykvrun was killed
            os.kill(launcher, signal.SIGTERM)
    finally:
        os._exit(0)


def wait_for(launcher: subprocess.Popen[bytes]) -> int | None:
    """Wait until the launcher ends, and return its status; None if it had to be killed.

    Open MPI's launcher hangs if a worker connects to it while it is ending the job: all workers have ended, and it
    waits for one of its own threads.
    """
    had_workers, without_since = False, 0.0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return launcher.wait(_PAUSE_S)
        if next(_below(launcher.pid), None) is not None:
            had_workers, without_since = True, 0.0
        elif had_workers:
            without_since = without_since or time.monotonic()
            if time.monotonic() - without_since > WITHOUT_WORKERS_S:
                launcher.kill()
                launcher.wait()
                return None


def end_orphans(but: int | None = None) -> None:
    """End the orphaned processes of an ended launcher: workers, and processes of workers.

    Parameters
    ----------
    but : int, optional
        The process id of a child to leave alone.
    """
    begin = time.monotonic()
    while True:
        orphans = [pid for pid in _below(os.getpid()) if pid != but]
        waited = time.monotonic() - begin
        if not orphans or waited > _ORPHANS_S + _KILLED_S:
            return
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM if waited < _ORPHANS_S else signal.SIGKILL)
        time.sleep(_PAUSE_S)


def _below(pid: int) -> Iterator[int]:
    """Process ids of the descendants of a process that have not ended."""
    for child in _children_of(pid):
        if not _is_zombie(child):
            yield child
        yield from _below(child)


def _is_zombie(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def _children_of(pid: int) -> list[int]:
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, path.read_text(encoding="ascii").split())
    return children
