"""Tells Open MPI of workers that have failed without a signal, which Open MPI's launcher does not report.

With ULFM, Open MPI's launcher (PRRTE) tells the other processes when a signal has ended a process. It does not tell
them of a process that exits by itself with a status other than 0, as with os._exit(1): then MPI calls of the others
hang. So every worker that sees such an exit on its machine sends the PMIx event by which Open MPI's own failure
detector tells the launcher, and the launcher passes the event on to all processes. Workers on other machines notice
closed connections.

The notifier runs as long as MPI calls may wait for the dead process, even while the survivors restart without this
process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from typing import Sequence, Tuple

from .loaded_files import loaded_files
from .process_watch import Followed, Identity

_log = logging.getLogger("kvstore_plugin")

_GRACE_S = 0.2  # the launcher gets this time to report the end of a process itself, as it does after a signal
_JOIN_S = 5.0

# Constants of the PMIx standard, from its version 4 on.
_SUCCESS, _OPERATION_SUCCEEDED = 0, -157
_ERR_PROC_TERM_WO_SYNC = -200
_EVENT_AFFECTED_PROC = b"pmix.evproc"
_PROC = 22  # PMIX_PROC, a data type
_RANGE_LOCAL = 2  # PMIX_RANGE_LOCAL: the event goes to the launcher on this machine, and to its processes

_teller: _Teller | None = None


Name = Tuple[str, int]  # a process's MPI_COMM_WORLD, as the launcher names it, and its rank there


def own_name() -> Name | None:
    """The name of this process; None if its launcher does not use PMIx."""
    try:
        return os.environ["PMIX_NAMESPACE"], int(os.environ["PMIX_RANK"])
    except (KeyError, ValueError):
        return None


def begin(processes: Sequence[Identity], names: Sequence[Name | None]) -> None:
    """Start the notifier for the processes of a communicator, unless it runs already for all of them.

    Parameters
    ----------
    processes : sequence of Identity
        In the order of their ranks in the communicator.
    names : sequence of Name
        Their names in the same order. The MPI_COMM_WORLD of new workers is not that of the first workers.
    """
    global _teller
    if _teller is None or not _teller.follows(processes):
        before, _teller = _teller, _Teller(processes, names)
        if before is not None:
            before.end()


def end() -> None:
    """Stop the notifier, before the workers exit normally."""
    global _teller
    ending, _teller = _teller, None
    if ending is not None:
        ending.end()


class _Teller:
    def __init__(self, processes: Sequence[Identity], names: Sequence[Name | None]) -> None:
        self._processes, self._names = set(processes), list(names)
        self._followed = Followed(processes)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore_plugin-failed-exits", daemon=True)
        self._thread.start()

    def follows(self, processes: Sequence[Identity]) -> bool:
        return self._processes.issuperset(processes)

    def end(self) -> None:
        self._ending.set()
        self._followed.wake()
        self._thread.join(_JOIN_S)
        self._followed.close()

    def _run(self) -> None:
        while not self._ending.is_set():
            ended = self._followed.ended(None)
            if not ended:
                continue
            self._ending.wait(_GRACE_S)
            for rank in [*ended, *self._followed.ended(0)]:
                name = self._names[rank]
                if name is not None:
                    self._tell(*name)

    def _tell(self, namespace: str, rank: int) -> None:
        try:
            tell_failed(namespace, rank)
        except (OSError, AttributeError, KeyError, ValueError) as error:
            _log.warning(
                "mykv cannot tell Open MPI that rank %d of MPI_COMM_WORLD has ended (%s). Unless a signal has ended "
                "it, other ranks may hang.",
                rank,
                error,
            )


class _Process(ctypes.Structure):
    """The struct pmix_proc_t of PMIx."""

    _fields_ = (("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


def tell_failed(namespace: str, rank: int) -> None:
    """Tell Open MPI, on all workers, that the process with this rank in its MPI_COMM_WORLD has failed.

    Raises
    ------
    OSError
        PMIx is not loaded, or rejects the event.
    AttributeError
        PMIx is too old.
    KeyError, ValueError
        The launcher's variables PMIX_NAMESPACE and PMIX_RANK are missing or wrong.
    """
    pmix = ctypes.CDLL(_loaded_pmix())
    own = _Process(os.environ["PMIX_NAMESPACE"].encode(), int(os.environ["PMIX_RANK"]))
    failed = _Process(namespace.encode(), rank)
    pmix.PMIx_Info_create.restype = ctypes.c_void_p
    pmix.PMIx_Info_create.argtypes = [ctypes.c_size_t]
    pmix.PMIx_Info_load.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint16]
    pmix.PMIx_Info_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    pmix.PMIx_Notify_event.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_uint8,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    info = pmix.PMIx_Info_create(1)
    try:
        pmix.PMIx_Info_load(info, _EVENT_AFFECTED_PROC, ctypes.byref(failed), _PROC)
        # Without a callback, PMIx_Notify_event returns when PMIx has accepted the event.
        code = pmix.PMIx_Notify_event(_ERR_PROC_TERM_WO_SYNC, ctypes.byref(own), _RANGE_LOCAL, info, 1, None, None)
    finally:
        pmix.PMIx_Info_free(info, 1)
    if code not in (_SUCCESS, _OPERATION_SUCCEEDED):
        raise OSError(f"PMIx_Notify_event returned {code}")


def _loaded_pmix() -> str:
    """The PMIx library that Open MPI uses in this process."""
    for path in loaded_files("libpmix.so"):
        return path
    raise OSError("Open MPI has no libpmix.so loaded")
