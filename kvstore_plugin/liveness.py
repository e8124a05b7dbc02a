"""Notices that another worker's process has ended, without anybody having called it, and lets nobody wait for it.

Two things are watched by a thread of each worker. The processes of this machine by pidfds, which the kernel makes
readable when they end. All workers by a receive of MPI that nobody sends to, from any source: with ULFM it fails when
a process of its communicator has failed, or when somebody has revoked the communicator, as everybody does who notices
a death. So a death that one worker has noticed is noticed by all. Then the core ends all operations of this process.

The communicator is one of its own, and only looked at, a few times in a second: nothing waits in MPI.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import core as core_loader
from . import launch

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("kvstore_plugin")

_LOOK_MS = 50  # between two looks at MPI
_TAG = 32002  # of the message that never comes
_JOIN_S = 5.0
_SYS_PIDFD_OPEN = 434  # on all architectures; os.pidfd_open came with Python 3.9

_watch: _Watch | None = None


def check_possible() -> None:
    """Raise a RuntimeError if this job cannot outlive one of its processes."""
    refusal = _refusal()
    if refusal:
        raise RuntimeError(refusal)


def _refusal() -> str | None:
    from mpi4py import MPI

    library = MPI.Get_library_version()
    if launch.parse_version(library)[0] != "Open MPI" or not hasattr(MPI.Comm, "Shrink"):
        return (
            "elastic=True needs Open MPI 5 and mpi4py 4.1, whose ULFM lets a job outlive its processes, but this job "
            f"runs with {' '.join(launch.parse_version(library)).strip()}: use that Open MPI, or elastic=False."
        )
    if not launch.outlives_processes():
        return (
            "elastic=True needs a job that outlives its processes: start it with `mpirun --with-ft ulfm` (Open MPI 5), "
            "or use elastic=False."
        )
    return None


def begin(comm: MPI.Intracomm) -> None:
    """Watch the processes of a communicator, unless that is done already. Collective over it."""
    global _watch
    if _watch is None:
        _watch = _Watch(comm)


def end() -> None:
    """Stop watching."""
    global _watch
    ending, _watch = _watch, None
    if ending is not None:
        ending.end()


def is_on() -> bool:
    """Whether the other workers are watched."""
    return _watch is not None


def lost(seconds: float = 0.0) -> str | None:
    """Who has ended, as a sentence, or None; waits up to so many seconds for that to be known."""
    watch = _watch
    if watch is None:
        return None
    watch.noticed.wait(seconds)
    return watch.sentence


class _Watch:
    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._MPI = MPI
        self.noticed = threading.Event()
        self.sentence: str | None = None
        self._ending = False
        self._comm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        here = (_machine(), os.getpid())
        everyone = self._comm.allgather(here)
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}  # by file descriptor
        for rank, (machine, pid) in enumerate(everyone):
            if machine == here[0] and pid != here[1]:
                self._follow(rank, pid)
        self._wake, self._waken = os.pipe()
        self._poll.register(self._wake, select.POLLIN)
        self._nothing = np.zeros(1, dtype=np.int8)
        self._request = self._comm.Irecv(self._nothing, source=MPI.ANY_SOURCE, tag=_TAG)
        self._thread = threading.Thread(target=self._run, name="kvstore_plugin-liveness", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ending = True
        os.write(self._waken, b"x")
        self._thread.join(_JOIN_S)
        with contextlib.suppress(self._MPI.Exception):
            self._request.Cancel()
            self._request.Wait()
        for descriptor in (self._wake, self._waken, *self._ranks):
            os.close(descriptor)

    def _follow(self, rank: int, pid: int) -> None:
        descriptor = ctypes.CDLL(None, use_errno=True).syscall(_SYS_PIDFD_OPEN, pid, 0)
        if descriptor >= 0:  # else an old kernel, or it has ended: MPI tells
            self._ranks[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)

    def _run(self) -> None:
        while not self._ending:
            ended = [self._ranks[one] for one, _ in self._poll.poll(_LOOK_MS) if one in self._ranks]
            if self._ending:
                return
            try:
                self._request.Test()
            except self._MPI.Exception:
                ended = ended or self._failed()
            else:
                if not ended:
                    continue
            self._notice(ended)
            return

    def _failed(self) -> list[int]:
        """The ranks that MPI knows to have failed; none where another worker has told before MPI."""
        try:
            failed = self._comm.Get_failed()
            numbers = list(range(failed.Get_size()))
            return list(self._MPI.Group.Translate_ranks(failed, numbers, self._comm.Get_group()))
        except self._MPI.Exception:
            return []

    def _notice(self, ended: list[int]) -> None:
        who = f"rank {ended[0]} has" if len(ended) == 1 else f"ranks {', '.join(map(str, ended))} have"
        who = who if ended else "a rank has"
        self.sentence = f"{who} ended, of {self._comm.Get_size()}: killed, or left before the others were done"
        _log.warning("mykv on rank %d: %s.", self._comm.Get_rank(), self.sentence)
        core_loader.load().lose(f"WorkersLost: {self.sentence}")
        self.noticed.set()
        with contextlib.suppress(self._MPI.Exception):
            self._comm.Revoke()


def _machine() -> tuple[str, str]:
    """The same for two processes that can name each other by process ids, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", str(os.getpid())


def check() -> None:
    """Raise a WorkersLost if a worker was lost."""
    sentence = lost()
    if sentence:
        from .lost import WorkersLost

        raise WorkersLost(f"{sentence}.")


def any_failure(error: BaseException) -> Any:
    """A WorkersLost in place of an error of the core or of MXNet where a worker was lost; otherwise the error."""
    from .lost import WorkersLost

    sentence = lost()
    return WorkersLost(f"{error} ({sentence})") if sentence and not isinstance(error, WorkersLost) else error
