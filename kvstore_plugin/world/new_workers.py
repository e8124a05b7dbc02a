"""New workers that replace dead workers or are added: the living workers start them with MPI_Comm_spawn and join them.

The script of a new worker runs from its beginning. In this script, init() creates a world of the new worker alone
(MPI_COMM_SELF), until run_elastic() calls join(). The messages between a new worker and each living worker:

1. hello, from the new worker when MPI has started (new_worker.py): its machine and pid, by which the others watch it.
2. here, from the new worker in join().
3. go, from the living worker when all living workers have merged the two groups. A new worker that gets no `go` is not
   needed: another death has happened meanwhile, and the living workers start other new workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, NoReturn, Sequence

from . import failure_detector, settings
from .loaded_files import loaded_files
from .new_worker import MARK, TAG_HELLO
from .process_watch import Followed, Identity, this_process

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("kvstore_plugin")

_TAG_HERE, _TAG_GO = 32004, 32005
_LOOK_MS = 20
_THREADS = ("OMP_", "KMP_", "MKL_", "OPENBLAS_")
# A word of Python's command line with an option that takes a value. Options without a value may precede this option in
# the same word, and the value may follow: -uWerror, -mtrain.
_WITH_VALUE = re.compile(r"(?P<flags>-[^-cmWX]*)(?P<kind>[cmWX])(?P<value>.*)", re.DOTALL)
# Prefixes of variables that new workers get from a living worker: the launcher's daemon, which starts them, may lack
# these variables.
_PASSED_ON = ("MYKV_", "MXNET_", "NCCL_", "OMPI_MCA_mpi_", "OMPI_MCA_async_mpi_", "PYTHONPATH", *_THREADS)

_began_in = os.getcwd()  # saved before the script changes it
_has_joined = False
_has_started = False  # whether this process has started new workers


def is_respawned() -> bool:
    """Whether this process is a new worker, which `run_elastic` has started in a running job.

    The script of a new worker runs from its beginning, with `rank` 0 and `size` 1 until it calls run_elastic(). Check
    is_respawned() before one-time setup.

    Examples
    --------
    >>> if mykv.rank() == 0 and not mykv.is_respawned():
    ...     print("a new job begins")
    """
    return os.environ.get(MARK) == str(os.getpid())


def end_without_disconnecting() -> None:
    """In a job with new workers, keep MPI_Finalize from waiting for other workers.

    MPI_Finalize of Open MPI 5.0 exchanges messages with all processes of all communicators that contain a spawned
    process, even with dead processes, and then waits forever. It does so only if its count of such communicators is
    above 1, so this function sets the count to 0.
    """
    if not _has_started and not is_respawned():
        return
    for path in loaded_files("libmpi.so"):
        with contextlib.suppress(OSError, ValueError):  # the library has no such variable
            ctypes.c_int.in_dll(ctypes.CDLL(path), "ompi_comm_num_dyncomm").value = 0


failure_detector.before_finalize(end_without_disconnecting)


def is_waiting() -> bool:
    """Whether this process is a new worker that has not joined the living workers yet."""
    return is_respawned() and not _has_joined


def check_possible() -> None:
    """Raise a RuntimeError if this job cannot start new workers."""
    failure_detector.check_possible("run_elastic(respawn=True)", "respawn=False")


class NotReached(RuntimeError):
    """New workers have not reached run_elastic in time."""


def started(comm: MPI.Intracomm, count: int, hosts: str, is_known: bool) -> NewWorkers | None:
    """Start new workers; None if MPI fails here, for example because a living worker has died meanwhile. Collective.

    Parameters
    ----------
    comm, count, hosts, is_known
        As for `NewWorkers`.
    """
    from mpi4py import MPI

    try:
        return NewWorkers(comm, count, hosts, is_known)
    except MPI.Exception as error:  # after a death, MPI's error may be of any of several classes
        _log.warning("MPI_Comm_spawn has failed (%s).", error)
        return None


class NewWorkers:
    """Processes that were started by the living workers. All methods are collective over the living workers.

    Parameters
    ----------
    comm : Intracomm
        The living workers.
    count : int
    hosts : str
        Hosts, as ``name:number,...``; "" lets the launcher choose.
    is_known : bool
        True: the launcher has started workers on all of these hosts before, and the numbers in `hosts` are those of the
        workers to start. False: the numbers are all slots of each host, and the launcher uses free slots.
    """

    def __init__(self, comm: MPI.Intracomm, count: int, hosts: str, is_known: bool) -> None:
        global _has_started
        from mpi4py import MPI

        _has_started = True
        self._MPI = MPI
        self._comm = comm
        self._known: dict[int, Identity] = {}  # by rank: new workers that have sent hello
        self._count = count
        with _limited("MPI_Comm_spawn has not started a new worker"):
            try:
                self._inter = self._started(hosts, is_known)
            except MPI.Exception as error:
                if not hosts or not is_known or _is_loss(error):
                    raise
                self._inter = self._started("", True)
        self._inter.Set_errhandler(MPI.ERRORS_RETURN)

    def _started(self, hosts: str, is_known: bool) -> MPI.Intercomm:
        options, plan, arguments = _own_command()
        command = [*options, str(Path(__file__).with_name("new_worker.py")), json.dumps(plan), *arguments]
        return self._comm.Spawn(sys.executable, command, self._count, _info(hosts, is_known), 0)

    def await_here(self, seconds: float) -> bool:
        """Wait until all new workers have called join(); False if a new worker has died.

        Raises
        ------
        NotReached
            Not all have called it within that time.
        """
        until = time.monotonic() + seconds
        hello = {rank: self._inter.irecv(source=rank, tag=TAG_HELLO) for rank in range(self._count)}
        here = {rank: self._inter.irecv(source=rank, tag=_TAG_HERE) for rank in range(self._count)}
        known = self._known
        followed: Followed | None = None
        try:
            while here:
                for rank, request in list(hello.items()):
                    is_there, identity = request.test()
                    if is_there:
                        known[rank] = identity
                        del hello[rank]
                for rank, request in list(here.items()):
                    if request.test()[0]:
                        del here[rank]
                if time.monotonic() > until:
                    raise NotReached(self._late(sorted(here), known, seconds))
                if followed is None and not hello:
                    followed = Followed([known[rank] for rank in range(self._count)])
                if followed is None:
                    time.sleep(_LOOK_MS / 1000)
                elif followed.ended(_LOOK_MS):
                    return False
        except self._MPI.Exception:
            return False
        finally:
            if followed is not None:
                followed.close()
        return True

    def _late(self, late: Sequence[int], known: dict[int, Any], seconds: float) -> str:
        pids = ", ".join(f"process {known[rank][1]}" if rank in known else "a process" for rank in late)
        return (
            f"{len(late)} of {self._count} new workers ({pids}) have not reached run_elastic() within {seconds:g} s "
            "after their start. A new worker runs the script from its beginning, alone: does the script wait "
            "there for other workers? Raise MYKV_RESPAWN_WAIT_S if the script takes longer."
        )

    def merged(self) -> MPI.Intracomm | None:
        """A communicator of the living workers followed by the new workers; None if that fails here."""
        try:
            with _limited("MPI has not joined the new workers to the living workers"):
                full = self._inter.Merge(False)
            full.Set_errhandler(self._MPI.ERRORS_RETURN)
            return full
        except self._MPI.Exception:
            return None

    def go(self) -> None:
        """Tell the new workers that all living workers have merged."""
        for rank in range(self._count):
            with contextlib.suppress(self._MPI.Exception):  # the new worker has died; the next agreement notices
                self._inter.send(None, rank, _TAG_GO)

    def dismiss(self) -> None:
        """Dismiss the new workers: they end when they call join()."""
        with contextlib.suppress(self._MPI.Exception):
            self._inter.Revoke()

    def kill(self) -> None:
        """End the new workers at once; if some are on other machines or have not said hello, with the whole job."""
        elsewhere = False
        for machine, pid in self._known.values():
            if machine != this_process()[0]:
                elsewhere = True
                continue
            with contextlib.suppress(OSError):  # another worker of this machine was faster
                os.kill(pid, signal.SIGKILL)
        if elsewhere or len(self._known) < self._count:
            failure_detector.abort(self._inter, 1)


def join() -> MPI.Intracomm:
    """Join the living workers, in a new worker; ends this process if it is not needed any more."""
    global _has_joined
    from mpi4py import MPI

    parent = MPI.Comm.Get_parent()
    living = range(parent.Get_remote_size())
    # The living workers wait for all new workers, and then for MPI, each time up to the same limit. If MPI_Comm_spawn
    # has failed in a living worker although this worker was started, they never join this worker.
    seconds = 2 * settings.value("MYKV_RESPAWN_WAIT_S")
    watch = threading.Timer(seconds, _end_unneeded, [f"they have not joined it within {seconds:g} s"])
    watch.daemon = True
    watch.start()
    try:
        for rank in living:
            with contextlib.suppress(MPI.Exception):  # that worker has died; the living workers notice
                parent.send(None, rank, _TAG_HERE)
        full = parent.Merge(True)
        full.Set_errhandler(MPI.ERRORS_RETURN)
        _await_go(parent)
    except MPI.Exception as error:
        _end_unneeded(error)
    finally:
        watch.cancel()
    _has_joined = True
    return full


def _await_go(parent: MPI.Intercomm) -> None:
    """Wait for `go` from a living worker; raises an MPI.Exception if no living worker can send it."""
    from mpi4py import MPI

    requests = {rank: parent.irecv(source=rank, tag=_TAG_GO) for rank in range(parent.Get_remote_size())}
    while True:
        for rank, request in list(requests.items()):
            try:
                if request.test()[0]:
                    return
            except MPI.Exception as error:
                del requests[rank]
                if not requests or error.Get_error_class() == MPI.ERR_REVOKED:
                    raise
        time.sleep(_LOOK_MS / 1000)


def _end_unneeded(why: object) -> NoReturn:
    _log.warning("This new worker ends, since the others do not need it any more (%s).", why)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os.kill(os.getpid(), signal.SIGKILL)  # MPI_Finalize would wait for the others
    raise SystemExit(1)


def _is_loss(error: MPI.Exception) -> bool:
    """Whether a process has died, so that all living workers may try again."""
    from mpi4py import MPI

    return error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)


@contextlib.contextmanager
def _limited(what: str) -> Iterator[None]:
    """Context manager: ends the job if MPI waits too long, perhaps for a process that has ended before MPI_Init."""
    seconds = settings.value("MYKV_RESPAWN_WAIT_S")

    def end() -> None:
        from mpi4py import MPI

        _log.error("mykv ends the job: %s within %g s (MYKV_RESPAWN_WAIT_S).", what, seconds)
        failure_detector.abort(MPI.COMM_WORLD, 1)

    watch = threading.Timer(seconds, end)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _info(hosts: str, is_known: bool) -> MPI.Info:
    from mpi4py import MPI

    info = MPI.Info.Create()
    info.Set("wdir", _began_in)
    info.Set("mpi_initial_errhandler", "mpi_errors_return")  # else a death during MPI_Init ends the job
    # Open MPI's launcher counts the slots and cores of dead workers as occupied: new workers must not need free ones.
    info.Set("PMIX_BINDTO", "none")
    if is_known:
        info.Set("PMIX_MAPBY", "slot:OVERSUBSCRIBE")
    if hosts:
        info.Set("PMIX_HOST" if is_known else "PMIX_ADD_HOST", hosts)
    return info


def _own_command() -> tuple[list[str], dict[str, Any], list[str]]:
    """This process's command: options of Python, the kind of program and the program, and the arguments."""
    line = Path("/proc/self/cmdline").read_bytes().decode(errors="surrogateescape").split("\0")[1:-1]
    options, kind, what, arguments = _parsed(line)
    if is_respawned():
        inner = json.loads(arguments[0])
        kind, what, arguments = inner["kind"], inner["what"], arguments[1:]
    plan = {
        "kind": kind,
        "what": what,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)},
        "process_watch": str(Path(__file__).with_name("process_watch.py")),
        "wait": math.ceil(settings.value("MYKV_RESPAWN_WAIT_S")),
    }
    return options, plan, arguments


def _parsed(line: Sequence[str]) -> tuple[list[str], str, str, list[str]]:
    """Divide the arguments of Python: its options, the kind of program, the program, and its own arguments."""
    at = 0
    while at < len(line):
        option = line[at]
        if not option.startswith("-") or option == "-":
            break
        letters = _WITH_VALUE.fullmatch(option)
        is_apart = option == "--check-hash-based-pycs" or (letters is not None and not letters["value"])
        after = at + 1 + is_apart
        if letters is not None and letters["kind"] in "cm":
            options = [*line[:at], *([letters["flags"]] if letters["flags"] != "-" else [])]
            kind = "code" if letters["kind"] == "c" else "module"
            return options, kind, letters["value"] or line[at + 1], list(line[after:])
        at = after
    return list(line[:at]), "script", line[at] if at < len(line) else "", list(line[at + 1 :])
