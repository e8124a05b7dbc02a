"""The workers of this host as processes, where mykvrun or the launcher is killed.

Only the launcher is a child of mykvrun. Workers are the first processes below it that have a rank in their environment:
below mpirun of Open MPI, and with MPICH and Intel MPI below the processes of Hydra.
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

from . import worker_notes

_PAUSE_S = 0.5
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
