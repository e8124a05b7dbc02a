"""This process as one rank: joins the others, knows its place among them, and leaves so that none of them hangs.

`core` is the module attribute through which all other files reach the compiled core. It is an object whose every use
raises a RuntimeError while there is no core to talk to: before init(), after shutdown(), and for good in a forked
child, whose copies of the runtime's threads and of MPI do not exist.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import core as core_loader
from . import launch, settings

if TYPE_CHECKING:
    from mpi4py import MPI

# A rank that failed ends the whole job after this many seconds, even if threads of the user keep its interpreter alive.
_ABORT_AFTER_S = 5.0
# A wait for other ranks looks this often whether Ctrl-C was pressed.
_SIGNAL_CHECK_S = 0.2


class _NoCore:
    """Stands in for the core where there is none, and says why."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self._reason)


core: Any = _NoCore("kvstore_plugin is not initialized: call kvstore_plugin.init() first.")
_comm: MPI.Comm | None = None
_forked = False
_failed = False
_hooks_installed = False
_interrupted: list[Any] = []


def init(comm: MPI.Intracomm | None = None) -> None:
    """Join the other ranks. Collective; a second call with the same or no communicator does nothing.

    MPI is initialized here, at MPI_THREAD_MULTIPLE, unless that was done before; mpi4py finalizes it when Python exits.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that take part; all of MPI_COMM_WORLD by default. It is duplicated, so its own messages go on beside
        ours.

    Raises
    ------
    ImportError
        The compiled core, an MPI library or mpi4py is missing.
    RuntimeError
        The launcher belongs to another MPI, MPI has no MPI_THREAD_MULTIPLE or was finalized, init() was called before
        with another communicator, or this process is a forked child.
    TypeError, ValueError
        `comm` is not an intracommunicator, or is the null communicator.
    """
    global core, _comm
    if _forked:
        core.init  # noqa: B018 - raises
    if is_initialized():
        if comm is not None and not _is_ours(comm):
            raise RuntimeError("kvstore_plugin is initialized with another communicator: call shutdown() first.")
        return
    loaded = core_loader.load()
    launch.check_library(loaded.build_info()["mpi"], loaded.mpi_library_version())
    MPI = _import_mpi(loaded)
    _start_mpi(MPI)
    launch.check_size(MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    comm = _checked(MPI, comm)
    loaded.init(comm.py2f(), settings.core_options())
    _comm = comm
    core = loaded
    _attach_mxnet()
    _install_hooks()
    launch.warn_of_narrow_binding(loaded.local_rank(), loaded.local_size(), MPI.Get_library_version())


def shutdown() -> None:
    """Leave the other ranks; without effect where init() was not called.

    What this rank asked for is given time to finish. What others still ask of it fails there with an error. MPI stays
    initialized; init() may be called again by all ranks together.
    """
    if is_initialized():
        _leave("it called shutdown()", "kvstore_plugin was shut down: call kvstore_plugin.init() first.")


def is_initialized() -> bool:
    """Whether this process has joined the others and not left them; False in a forked child."""
    return not isinstance(core, _NoCore)


def require() -> Any:
    """The compiled core, after init() if nobody called that yet."""
    if not is_initialized():
        init()
    return core


def rank() -> int:
    """Number of this process among all, from 0."""
    return core.rank()


def size() -> int:
    """Number of processes."""
    return core.size()


def local_rank() -> int:
    """Number of this process among those of its host, from 0."""
    return core.local_rank()


def local_size() -> int:
    """Number of processes on this host."""
    return core.local_size()


def cross_rank() -> int:
    """Number of this host among those that have a process with this local_rank(), from 0."""
    return core.cross_rank()


def cross_size() -> int:
    """Number of hosts that have a process with this local_rank()."""
    return core.cross_size()


def wait(work: Any) -> None:
    """Wait for a ``Work`` of the core, so that Ctrl-C is noticed meanwhile.

    Raises
    ------
    mykv_core.Error
        The operation failed; the sentence says why.
    """
    try:
        while not work.wait(_SIGNAL_CHECK_S):
            pass
    except BaseException:
        if not work.done():  # Ctrl-C, or whatever a signal handler raises
            # The core writes to the arrays until the end, and dropping the work would wait for that.
            _interrupted.append(work)
        raise


def _import_mpi(loaded: ModuleType) -> ModuleType:
    """The module mpi4py.MPI, checked to use the core's MPI library before anything of it is called."""
    try:
        import mpi4py

        if "mpi4py.MPI" in sys.modules:
            from mpi4py import MPI
        else:
            saved = mpi4py.rc.initialize, mpi4py.rc.finalize
            # Not before the check below. Without `finalize`, mpi4py would take it that somebody else finalizes.
            mpi4py.rc.initialize = False
            if saved == (True, None):
                mpi4py.rc.finalize = True
            try:
                from mpi4py import MPI
            finally:
                mpi4py.rc.initialize, mpi4py.rc.finalize = saved
    except ImportError as error:
        raise ImportError(
            "mpi4py is missing or finds no MPI library, install it for the MPI that mykv was built against "
            f"({' '.join(launch.parse_version(loaded.build_info()['mpi'])).strip()}; pip install mpi4py): {error}",
            name="mpi4py",
        ) from error
    launch.check_same_library(loaded.mpi_library_version(), MPI.Get_library_version())
    return MPI


def _start_mpi(MPI: ModuleType) -> None:
    if MPI.Is_finalized():
        raise RuntimeError("MPI was finalized already, kvstore_plugin cannot be initialized any more.")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "MPI was initialized without MPI_THREAD_MULTIPLE: leave that to kvstore_plugin.init(), or ask for it "
            "(mpi4py.rc.thread_level = 'multiple', an MPI built with it)."
        )


def _checked(MPI: ModuleType, comm: Any) -> Any:
    if comm is None:
        return MPI.COMM_WORLD
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ValueError("comm is the null communicator: only the ranks of a communicator may call init() with it.")
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm must be an mpi4py.MPI.Intracomm or None, not {type(comm).__name__}.")
    return comm


def _is_ours(comm: Any) -> bool:
    from mpi4py import MPI

    comm = _checked(MPI, comm)
    if comm == _comm:
        return True
    try:
        return MPI.Comm.Compare(comm, _comm) in (MPI.IDENT, MPI.CONGRUENT)
    except MPI.Exception:  # the one of init() was freed since
        return False


def _attach_mxnet() -> None:
    # Absent only in the self-test of an installation without MXNet.
    compat = sys.modules.get(f"{__package__}.mxnet_compat")
    if compat is not None:
        core.attach_mxnet(compat.library_handle(), compat.MAJOR, compat.engine_blocks(), compat.MXNetError)


def _install_hooks() -> None:
    global _hooks_installed
    if not _hooks_installed:
        _hooks_installed = True
        os.register_at_fork(after_in_child=_forget_in_child)
        sys.excepthook = _remembering(sys.excepthook)
        # Handlers run in the reverse order: this one before MXNet's own, which was registered with its import, and
        # after those that the user registers from now on, which may still use the store.
        atexit.register(_at_exit)


def _forget_in_child() -> None:
    global core, _forked
    _forked = True
    core = _NoCore(
        "kvstore_plugin does not work in a forked child of a rank, since MPI does not survive a fork: "
        "use it in the parent only, or start the child with the method 'spawn'."
    )


def _remembering(previous: Any) -> Any:
    """An excepthook that notes that this rank fails, after `previous` has shown why."""

    def excepthook(kind: Any, value: Any, traceback: Any) -> None:
        global _failed
        previous(kind, value, traceback)
        # In an interactive Python the user goes on after a traceback.
        if is_initialized() and core.size() > 1 and not sys.flags.interactive and not hasattr(sys, "ps1"):
            _failed = True
            watch = threading.Timer(_ABORT_AFTER_S, _abort_if_ending)
            watch.daemon = True
            watch.start()

    return excepthook


def _abort_if_ending() -> None:
    """End the job if the main thread is over; otherwise somebody called sys.excepthook and goes on."""
    global _failed
    if threading.main_thread().is_alive():
        _failed = False
    else:
        _abort()


def _abort() -> None:
    from mpi4py import MPI

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # closed, or None under pythonw and the like
            continue
    MPI.COMM_WORLD.Abort(1)


def _at_exit() -> None:
    if is_initialized():
        if _failed:
            _abort()
        _leave(
            "its script has ended; do all workers make the same number of steps?",
            "kvstore_plugin was shut down: Python is exiting.",
        )


def _leave(reason: str, afterwards: str) -> None:
    """Let what this rank has pushed finish, as long as the others take part; then tell them why it is gone."""
    global core, _comm
    seconds = settings.exit_wait_seconds()
    _drain(seconds)
    leaving, core, _comm = core, _NoCore(afterwards), None
    leaving.abandon(reason)
    leaving.shutdown()
    _drain(seconds)  # what did not finish has failed now, and MXNet would report that as an error of its own exit


def _drain(seconds: float) -> None:
    compat = sys.modules.get(f"{__package__}.mxnet_compat")
    if compat is None:
        return
    waiter = threading.Thread(target=compat.wait_for_all, name="kvstore_plugin-drain", daemon=True)
    try:
        waiter.start()
    except RuntimeError:  # Python 3.12 starts no thread while it exits
        compat.wait_for_all()
    else:
        waiter.join(seconds)
