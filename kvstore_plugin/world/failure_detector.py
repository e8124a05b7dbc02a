"""Notices that another worker's process has ended, without anybody having called it, and lets nobody wait for it.

Two things are watched by a thread of each worker. The processes of this machine by pidfds, which the kernel makes
readable when they end. All workers by a receive of MPI that nobody sends to, from any source: with ULFM it fails when
a process of its communicator has failed, or when somebody has revoked the communicator, as everybody does who notices
a death. So a death that one worker has noticed is noticed by all. Then the core ends all operations of this process.

The communicator is one of its own, and only looked at, a few times in a second: nothing waits in MPI.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from . import core as core_loader
from . import exit_notifier, launcher
from .process_watch import Followed, this_process

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("kvstore_plugin")

_LOOK_MS = 50  # between two looks at MPI
_TAG = 32002  # of the message that never comes
_NAMES_S = 0.5  # for the name of who has ended, where only that somebody has is known
_NAME_LOOK_MS = 5
_JOIN_S = 5.0

_watch: _Watch | None = None
_key: int | None = None  # of an attribute of MPI_COMM_SELF


def check_possible() -> None:
    """Raise a RuntimeError if this job cannot outlive one of its processes."""
    refusal = _refusal()
    if refusal:
        raise RuntimeError(refusal)


def is_possible() -> bool:
    """Whether this job can outlive one of its processes."""
    return _refusal() is None


def _refusal() -> str | None:
    from mpi4py import MPI

    library = MPI.Get_library_version()
    if launcher.parse_version(library)[0] != "Open MPI" or not hasattr(MPI.Comm, "Shrink"):
        return (
            "elastic=True needs Open MPI 5 and mpi4py 4.1, whose ULFM lets a job outlive its processes, but this job "
            f"runs with {' '.join(launcher.parse_version(library)).strip()}: use that Open MPI, or elastic=False."
        )
    if not launcher.outlives_processes():
        return (
            "elastic=True needs a job that outlives its processes: start it with `mpirun --with-ft ulfm` (Open MPI 5), "
            "or use elastic=False."
        )
    return None


def begin(comm: MPI.Intracomm) -> None:
    """Watch the processes of a communicator, unless that is done already. Collective over it."""
    global _watch
    if _watch is None:
        _end_before_mpi()
        core_loader.load().watch(True)
        _watch = _Watch(comm)


def end(orderly: bool = True) -> None:
    """Stop watching. `orderly`: this process leaves because it is done, and not since another one was lost."""
    global _watch
    if orderly:
        exit_notifier.end()
    ending, _watch = _watch, None
    if ending is not None:
        core_loader.load().watch(False)
        ending.end(orderly)


def _end_before_mpi() -> None:
    """Let MPI_Finalize, whoever calls it, begin with end(): it deletes the attributes of MPI_COMM_SELF first."""
    global _key
    if _key is not None:
        return
    from mpi4py import MPI

    process = os.getpid()

    def end_here(*_: object) -> None:
        if os.getpid() == process:  # and not in a fork, which has no such thread but writes to the same pipe
            end()

    _key = MPI.Comm.Create_keyval(delete_fn=end_here)
    MPI.COMM_SELF.Set_attr(_key, None)


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
        everyone = self._comm.allgather(this_process())
        self._followed = Followed(everyone)
        exit_notifier.begin(everyone, _translated(self._comm.Get_group(), MPI.COMM_WORLD.Get_group()))
        self._nothing = np.zeros(1, dtype=np.int8)
        self._request = self._comm.Irecv(self._nothing, source=MPI.ANY_SOURCE, tag=_TAG)
        self._thread = threading.Thread(target=self._run, name="kvstore_plugin-liveness", daemon=True)
        self._thread.start()

    def end(self, orderly: bool) -> None:
        self._ending = True
        self._followed.wake()
        self._thread.join(_JOIN_S)
        with contextlib.suppress(self._MPI.Exception):
            self._request.Cancel()
            self._request.Wait()
            if orderly and self.sentence is None and not self._thread.is_alive():
                self._comm.Free()
        self._followed.close()

    def _run(self) -> None:
        while not self._ending:
            ended = self._followed.ended(_LOOK_MS)
            if self._ending:
                return
            try:
                self._request.Test()
            except self._MPI.Exception:
                ended = ended or self._named()
            else:
                if not ended:
                    continue
            if self._ending:
                return
            self._notice(ended)
            return

    def _named(self) -> list[int]:
        """Who has ended; none where another worker has told, and that does not show here soon."""
        until = time.monotonic() + _NAMES_S
        while True:
            ended = self._followed.ended(_NAME_LOOK_MS) or self._failed()
            if ended or self._ending or time.monotonic() > until:
                return ended

    def _failed(self) -> list[int]:
        """The ranks that MPI knows to have failed."""
        try:
            failed = self._comm.Get_failed()
            return _translated(failed, self._comm.Get_group())
        except self._MPI.Exception:
            return []

    def _notice(self, ended: list[int]) -> None:
        who = f"rank {ended[0]} has" if len(ended) == 1 else f"ranks {', '.join(map(str, ended))} have"
        who = who if ended else "a rank has"
        self.sentence = f"{who} ended, of {self._comm.Get_size()}: killed, or left before the others were done"
        _log.warning("mykv on rank %d: %s.", self._comm.Get_rank(), self.sentence)
        core_loader.load().lose(f"WorkersLost: {self.sentence}")
        core_loader.load().watch(False)  # it calls lose() no more
        self.noticed.set()
        with contextlib.suppress(self._MPI.Exception):
            self._comm.Revoke()


def _translated(group: MPI.Group, to: MPI.Group) -> list[int]:
    """The ranks of all of a group in another one. Both are freed."""
    from mpi4py import MPI

    try:
        return list(MPI.Group.Translate_ranks(group, list(range(group.Get_size())), to))
    finally:
        group.Free()
        to.Free()
