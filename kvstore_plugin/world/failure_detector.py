"""Failure detector: a thread of each worker that notices dead workers and fails all pending operations.

The thread watches the processes of this machine by pidfds, which the kernel makes readable when a process ends. It
watches all workers by an MPI receive from any source, for which no worker sends a message: with ULFM the receive fails
when a process of its communicator has failed, or when a worker has revoked the communicator. Every worker that notices
a death revokes the communicator, so all workers notice the death. Then the core ends all operations of this process.

The communicator has no other use. The thread only tests the receive, every 50 ms (_LOOK_MS), and never waits in MPI.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Callable

import numpy as np

from . import core as core_loader
from . import exit_notifier, launch_checks
from .process_watch import Followed, this_process

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("kvstore_plugin")

_LOOK_MS = 50  # between two tests of the receive
_TAG = 32002  # tag of a receive that never completes; it fails when a peer dies
_NAMES_S = 0.5  # how long the thread tries to find out which rank has ended
_NAME_LOOK_MS = 5
_JOIN_S = 5.0
_ABORT_APART_S, _MOST_APART_S = 0.5, 5.0

# Message with the ranks that have ended, or None.
death: str | None = None

_watch: _Watch | None = None
_before_finalize: list[Callable[[], None]] = []
_key: int | None = None  # keyval of an attribute of MPI_COMM_SELF, whose deletion calls end()


def check_possible(what: str = "elastic=True", otherwise: str = "elastic=False") -> None:
    """Raise a RuntimeError if this job cannot outlive one of its processes.

    For the message: `what` is the argument that needs this, `otherwise` the argument to use instead.
    """
    refusal = _refusal(what, otherwise)
    if refusal:
        raise RuntimeError(refusal)


def is_possible() -> bool:
    """Whether this job can outlive one of its processes."""
    return _refusal() is None


def _refusal(what: str = "elastic=True", otherwise: str = "elastic=False") -> str | None:
    from mpi4py import MPI

    library = MPI.Get_library_version()
    if launch_checks.parse_version(library)[0] != "Open MPI" or not hasattr(MPI.Comm, "Shrink"):
        return (
            f"{what} needs Open MPI 5 and mpi4py 4.1, which let a job continue after a process has died (ULFM), "
            f"but this job runs with {' '.join(launch_checks.parse_version(library)).strip()}. Use that Open MPI, or "
            f"{otherwise}."
        )
    if not launch_checks.outlives_processes():
        return (
            f"{what} needs a job that continues after a process has died. Start it with `mykvrun --elastic`, "
            f"which calls `mpirun --with-ft ulfm` of Open MPI 5, or use {otherwise}."
        )
    return None


def abort(comm: MPI.Comm, status: int) -> None:
    """End the job by MPI_Abort.

    The mpirun of Open MPI 5 deadlocks in a quarter of the jobs with --with-ft which two ranks abort at once (26 of
    106). In such a job each rank waits a little longer than the rank before it, so that the first one ends the others.
    """
    from mpi4py import MPI

    if is_possible():
        time.sleep(min(_ABORT_APART_S * MPI.COMM_WORLD.Get_rank(), _MOST_APART_S))
    comm.Abort(status)


def begin(comm: MPI.Intracomm) -> None:
    """Watch the processes of a communicator; a no-op if a watch runs already. Collective over the communicator."""
    global _watch, death
    if _watch is None:
        death = None
        _end_before_mpi()
        core_loader.load().watch(True)
        _watch = _Watch(comm)


def end(orderly: bool = True) -> None:
    """Stop watching. `orderly`: this process leaves because it is done, not because another process was lost."""
    global _watch, death
    if orderly:
        exit_notifier.end()
    ending, _watch = _watch, None
    if ending is not None:
        core_loader.load().watch(False)
        ending.end(orderly)
    death = None


def before_finalize(function: Callable[[], None]) -> None:
    """Call a function when MPI_Finalize begins, in a job that outlives its processes."""
    _before_finalize.append(function)


def _end_before_mpi() -> None:
    """Call end() at the beginning of MPI_Finalize, which deletes the attributes of MPI_COMM_SELF first."""
    global _key
    if _key is not None:
        return
    from mpi4py import MPI

    process = os.getpid()

    def end_here(*_: object) -> None:
        if os.getpid() == process:  # a forked child lacks the thread, but shares its pipe
            end()
            for function in _before_finalize:
                function()

    _key = MPI.Comm.Create_keyval(delete_fn=end_here)
    MPI.COMM_SELF.Set_attr(_key, None)


def lost(seconds: float = 0.0) -> str | None:
    """Message with the ranks that have ended, or None. Waits up to `seconds` for a death to be noticed."""
    watch = _watch
    if watch is not None and seconds:
        watch.noticed.wait(seconds)
    return death


class _Watch:
    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._MPI = MPI
        self.noticed = threading.Event()
        self._has_noticed = False
        self._ending = False
        self._comm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        identities, names = zip(*self._comm.allgather((this_process(), exit_notifier.own_name())))
        self._followed = Followed(identities)
        exit_notifier.begin(identities, names)
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
            if orderly and not self._has_noticed and not self._thread.is_alive():
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
        """The ranks that have ended; empty if another worker revoked the communicator and no dead rank is found in
        time."""
        until = time.monotonic() + _NAMES_S
        while True:
            ended = self._followed.ended(_NAME_LOOK_MS) or self._failed()
            if ended or self._ending or time.monotonic() > until:
                return ended

    def _failed(self) -> list[int]:
        """The ranks that failed according to MPI."""
        try:
            failed = self._comm.Get_failed()
            return _translated(failed, self._comm.Get_group())
        except self._MPI.Exception:
            return []

    def _notice(self, ended: list[int]) -> None:
        global death
        numbers, size = ", ".join(map(str, ended)), self._comm.Get_size()
        who = f"rank {numbers} of {size} has" if ended else f"a rank of {size} has"
        who = f"ranks {numbers} of {size} have" if len(ended) > 1 else who
        self._has_noticed = True
        death = f"{who} ended: killed, or left before the others were done"
        _log.warning("%s.", death)
        core_loader.load().lose(death, ended)
        core_loader.load().watch(False)  # operations that fail later need not wait for lose()
        self.noticed.set()
        with contextlib.suppress(self._MPI.Exception):
            self._comm.Revoke()


def _translated(group: MPI.Group, to: MPI.Group) -> list[int]:
    """The ranks of a group's processes in the group `to`. Both groups are freed."""
    from mpi4py import MPI

    try:
        return list(MPI.Group.Translate_ranks(group, list(range(group.Get_size())), to))
    finally:
        group.Free()
        to.Free()
