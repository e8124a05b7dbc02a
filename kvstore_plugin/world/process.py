"""This process as a rank: how it joins the other ranks, its numbers, and how it leaves so that no other rank hangs.

`core` is the module attribute through which all other files reach the compiled core. While there is no core, every use
of the attribute raises a RuntimeError: before init(), after shutdown(), and in a forked child, which has neither the
runtime's threads nor MPI. A forked child still knows the numbers of its parent: rank(), size() and the like.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import os
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

from mykvrun import worker_notes

from . import core as core_loader
from . import (
    failure_detector,
    gpu_libraries,
    launch_checks,
    launched,
    launcher_watch,
    log_prefix,
    missing_workers,
    mpi,
    mpi_settings,
    new_workers,
    script_end,
    settings,
    stall_watch,
    training_warnings,
)
from .version import VERSION

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("kvstore_plugin")

# Interval at which a wait for other ranks lets Python handle Ctrl-C.
_SIGNAL_CHECK_S = 0.2
_LEAST_DRAIN_S = 1.0  # time for MXNet's engine to finish after the core has ended all operations
# A long wait checks for its cause after the first time, then at intervals up to the second: a check asks all hosts.
_FIRST_LOOK_S, _LONGEST_PAUSE_S = 2.0, 30.0
_NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")


class _NoCore:
    """Replaces the core while there is none: every use raises a RuntimeError with the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self._reason)


class _CoreInChild(_NoCore):
    """In a forked child: answers from `numbers`, the rank's numbers at the fork."""

    def __init__(self, reason: str, numbers: dict[str, int]) -> None:
        super().__init__(reason)
        for name, number in numbers.items():
            setattr(self, name, functools.partial(int, number))


core: Any = _NoCore("kvstore_plugin is not initialized: call kvstore_plugin.init() first.")
_numbers: dict[str, int] = {}  # this rank's numbers since init(), for its forked children
losses = 0  # number of times that this process continued after a worker was lost
generation = 0  # number of starts of the core: objects of an earlier start must not touch new ones with the same names
recoveries = 0  # number of calls of join_again() since init()
job = ""  # a text that is the same on all ranks since init() and differs between jobs
_comm: MPI.Comm | None = None
_last_comm: MPI.Comm | None = None  # the _comm of the last init()
_group: MPI.Group | None = None  # the group of _comm; the user may free _comm
_groups: dict[int, Any] = {}  # by `generation`: the new _group, where it has changed
_machines: tuple[Any, list[str]] = (None, [])  # the _group of the last init(), and the machine of each of its ranks
_ended_before: dict[str, int] = {}  # by code: operations that had failed before the last init() because a rank had left
_tried_by_init = 0  # the result of _tried() at the end of the last init()
refusals = 0  # operations that this rank could not start: their arguments were wrong
_has_lost = False  # some process of MPI_COMM_WORLD has died
_forked = False
_broken_off = ""  # why no later init() can succeed
_init_called = False
_interrupted: list[Any] = []  # work whose wait was interrupted
_interrupted_lock = threading.Lock()


class Follower:
    """Callbacks of a part of the package for when this rank joins and leaves; no-ops in the base class."""

    def versions(self) -> dict[str, str]:
        """Values that must be the same on all ranks, by their names in errors."""
        return {}

    def tell(self) -> Any:
        """The value that init() sends to all ranks, pickled."""
        return None

    def hear(self, told: Sequence[Any]) -> None:
        """Called by init() on all ranks with the results of tell() from all ranks."""

    def joined(self, core: Any) -> None:
        """Called when the core has started."""

    def check_sets(self, process_sets: Any) -> None:
        """Called with the process sets of init(), if the core was started before."""

    def add_sets(self, process_sets: Any) -> None:
        """Called at the end of each init() that starts the core, on all ranks; init() raises its error."""

    def drain(self, seconds: float) -> int:
        """Wait at most `seconds` for pushed operations; returns the number of dropped errors that were never raised."""
        return 0

    def leaving(self) -> None:
        """Called before the core ends; other ranks may have ended already, so it must wait for none of them."""

    def left(self, lost: bool) -> None:
        """Called when the core has ended; `lost`: whether this was because of a lost worker."""


_followers: list[Follower] = []


def follow(follower: Follower) -> None:
    """Register a follower, to be called when this rank joins and leaves."""
    _followers.append(follower)


def init(comm: MPI.Intracomm | Sequence[int] | None = None, process_sets: Sequence[Any] | str | None = None) -> None:
    """Join the other ranks. Collective; a second call with the same or no communicator is a no-op.

    MPI is initialized here, at MPI_THREAD_MULTIPLE, unless it is initialized already. If it is initialized here, it is
    finalized when Python exits, even if mpi4py.rc says otherwise.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or sequence of int, optional
        The ranks that join each other: a communicator, or ranks in MPI_COMM_WORLD, the same in the calls of all of
        them. All of MPI_COMM_WORLD by default. A communicator is duplicated, so that messages of the user and of mykv
        are never mixed.
    process_sets : sequence of ProcessSet, optional
        Sets that are added at once, as with `add_process_set`, in the same order on all ranks. ``'dynamic'``, which
        Horovod needs for `add_process_set`, is accepted and ignored.

    Raises
    ------
    ImportError
        The compiled core, an MPI library or mpi4py is missing.
    RuntimeError
        The launcher belongs to another MPI, MPI has no MPI_THREAD_MULTIPLE or was finalized, init() was called before
        with another communicator or without a set of `process_sets`, or this process is a forked child.
    TypeError, ValueError
        `comm` is not an intracommunicator, is the null communicator, or is a list of ranks without this rank; or a set
        of `process_sets` is wrong. If all ranks see the mistake, no rank is initialized afterwards. A setting (an
        environment variable MYKV_...) has a wrong value on some rank: then all ranks raise the ValueError.

    Examples
    --------
    >>> mykv.init()  # a no-op where a store or a trainer has called it already
    >>> print(f"worker {mykv.rank()} of {mykv.size()}")
    """
    global _init_called, _tried_by_init
    _init_called = True
    if _forked or _broken_off:
        core.init  # noqa: B018 - raises
    if is_initialized():
        if comm is not None and not new_workers.is_waiting() and not mpi.has_processes(comm, _group):
            raise RuntimeError("kvstore_plugin is initialized with another communicator: call shutdown() first.")
        for follower in _followers:
            follower.check_sets(process_sets)
        return
    _check_is_worker()
    script_end.install(_would_be_awaited, _at_exit, _abort)
    launcher_watch.begin()
    failure_detector.end()  # the detector still runs if join_again() has failed
    core_loader.load().begin_again()  # a rank lost earlier is not among the ranks of this init()
    with _noting_interruption(), missing_workers.Watch(mpi.world_ranks(comm), _abort):
        _join(comm, read_settings=True)
    try:
        # If a job can outlive its processes, its launcher does not end ranks that wait for a dead rank, even if
        # training is not elastic.
        if failure_detector.is_possible():
            core.end_failed_exits_by_signal(True)
            failure_detector.begin(_comm)
        for follower in _followers:
            follower.add_sets(process_sets)
    except BaseException as error:
        _leave(f"its init() has failed: {error}", f"kvstore_plugin is not initialized, init() has failed: {error}")
        raise
    if core.why_memory_is_not_shared():
        _log.warning(
            "Ranks of this host do not share memory and exchange through MPI, as if each were on its own host: %s.",
            core.why_memory_is_not_shared(),
        )
    warn_of_rejected_callers(core, "its ranks")
    gpu_libraries.log_road(core)
    if core.rank() == 0:
        for variable, nearest in settings.misspelled():
            _log.warning("There is no setting %s, so it has no effect. Is %s meant?", variable, nearest)
    mpi_settings.warn_if_late(core)
    launch_checks.warn_of_narrow_binding(core.local_rank(), core.local_size(), core.mpi_library_version())
    launch_checks.warn_of_many_threads(core.local_rank(), core.local_size())
    worker_notes.tell_joined()
    if core.rank() == 0:
        if not new_workers.is_waiting():
            launch_checks.tell_of_one_worker(core.size())
        _log_start()
    _tried_by_init = _tried()


def _check_is_worker() -> None:
    worker = launched.worker_above()
    if worker is not None:
        raise RuntimeError(
            f"This process was started by a worker (process {worker}) and is not a worker itself: the launcher knows "
            "only the worker, and MPI would wait without end. Use kvstore_plugin in the worker. If this process should "
            "work alone, start it without the launcher's variables: env={name: value for name, value in "
            "os.environ.items() if not name.startswith(('PMI', 'OMPI_', 'PRTE_', 'SLURM_', 'MPI_LOCAL', 'HYDI_'))}."
        )


@contextlib.contextmanager
def _noting_interruption() -> Iterator[None]:
    """Context manager: records an exception that ends init() here while the other ranks wait in it for this rank."""
    global core, _broken_off
    try:
        yield
    except (ImportError, TypeError, ValueError):
        raise  # raised by init() itself, before ranks wait for each other or on all ranks
    except BaseException as error:
        if isinstance(error, RuntimeError) and not _is_alone(error):
            raise
        if mpi.is_shared():
            _broken_off = f"init() was interrupted by {type(error).__name__} on this rank, and other ranks wait in it"
            core = _NoCore(f"{_broken_off}: no later init() can meet them. End the script, which ends the job.")
        raise


def _is_alone(error: RuntimeError) -> bool:
    """Whether only this rank has the error, while others wait in init(): a call of MPI or of the system has failed."""
    core_error = core_loader.load().Error
    return mpi.is_failure(error) or (isinstance(error, core_error) and not error.agreed)


def _log_start() -> None:
    """Log one line that describes this job."""
    workers, hosts = core.size(), len(core.host_ranks())
    _log.info(
        "mykv %s: %d worker%s on %d host%s. MPI: %s. Transports: %s.",
        VERSION,
        workers,
        "s" * (workers != 1),
        hosts,
        "s" * (hosts != 1),
        launch_checks.first_line(core.mpi_library_version()),
        ", ".join(name for name, why_unused in core.transports().items() if not why_unused),
    )


def operations() -> int:
    """Number of operations of the set of all ranks that have ended on this rank since the core was started."""
    return sum(count for count, _ in core.statistics()["ways"].values())


def _tried() -> int:
    """Number of this rank's operations that have ended, failed, or could not start."""
    return operations() + core.failed_operations() + refusals


def _warn_if_nothing_was_exchanged() -> None:
    """Log a warning at the end of a job whose workers have exchanged nothing, so they may have trained separately."""
    if core.size() > 1 and core.rank() == 0 and recoveries == 0 and _tried() == _tried_by_init:
        training_warnings.warn(
            "The %d workers have exchanged nothing since init(). If they should have trained together, give the store "
            "'mykv' to gluon.Trainer or Module, or use a DistributedTrainer.",
            core.size(),
        )


def _warn_if_never_initialized() -> None:
    """Log a warning at the end of a worker that never called init() and has not failed."""
    has_failed = hasattr(sys, "last_type") or script_end.failed_exit() is not None  # such as argparse's exit
    if not _init_called and os.getpid() == _imported_in and not has_failed:
        launch_checks.warn_of_separate_workers()


_imported_in = os.getpid()
atexit.register(_warn_if_never_initialized)
os.register_at_fork(after_in_child=lambda: _forget_in_child())


def warn_of_rejected_callers(group: Any, who: str) -> None:
    """Log how many processes outside of this job asked for a new group's memory; on one rank of the group per host."""
    if group.rejected_callers():
        _log.warning(
            "%d processes outside of this job asked for the memory that %s share, and were refused.",
            group.rejected_callers(),
            who,
        )


def shutdown() -> None:
    """Leave the other ranks; a no-op if init() was not called.

    Operations of this rank get time to finish. Operations of other ranks that still need this rank fail there with an
    error. MPI stays initialized. Ranks may call init() again, even with another communicator: trainers and stores can
    be kept (docs/elastic.md, "Suspend and resume").

    Examples
    --------
    >>> if mykv.rank() == 0:
    ...     net.save_parameters("net.params")
    >>> mykv.shutdown()  # this worker may continue alone, for example with an evaluation
    >>> mykv.is_initialized()
    False
    """
    if is_initialized():
        _warn_if_nothing_was_exchanged()
        forgotten = _leave("it called shutdown()", "kvstore_plugin was shut down: call kvstore_plugin.init() first.")
        ended = [text for code, (count, text) in _ended_by_leaving().items() if count > _ended_before.get(code, 0)]
        if forgotten and ended:
            training_warnings.warn(
                "Operations have failed because a rank has left, and shutdown() has dropped their errors: the results "
                "are missing, but reading them no longer raises an error. One of the operations: %s",
                ended[0],
            )


def _ended_by_leaving() -> dict[str, tuple[int, str]]:
    """Number of operations that failed because a rank has left, and the last error, by its code."""
    return {code: failed for code, failed in core_loader.load().failures().items() if code in ("left", "departed")}


def is_initialized() -> bool:
    """Whether this process has joined the other ranks and not left them; False in a forked child.

    Examples
    --------
    >>> if not mykv.is_initialized():
    ...     mykv.init()
    """
    return not isinstance(core, _NoCore)


def require() -> Any:
    """The compiled core; calls init() first if it was not called yet."""
    if not is_initialized():
        init()
    return core


def rank() -> int:
    """Number of this process among all processes, from 0; in a forked child that of its parent.

    Examples
    --------
    >>> if mykv.rank() == 0:  # a single worker writes the file
    ...     net.save_parameters("net.params")
    """
    return core.rank()


def size() -> int:
    """Number of processes.

    Examples
    --------
    >>> mykv.size()
    2
    >>> learning_rate = 0.01 * mykv.size()  # for a batch that is twice as large
    """
    return core.size()


def local_rank() -> int:
    """Number of this process among the processes of its host, from 0.

    Examples
    --------
    >>> if mykv.local_rank() == 0:  # one worker of each host unpacks the data
    ...     with open("inputs.npy", "wb") as file:
    ...         np.save(file, inputs)
    >>> mykv.barrier()
    """
    return core.local_rank()


def local_size() -> int:
    """Number of processes on this host.

    Examples
    --------
    >>> threads = max(1, os.cpu_count() // mykv.local_size())  # this worker's share of the host's cores
    """
    return core.local_size()


def cross_rank() -> int:
    """Number of this host among the hosts that have a process with this local_rank(), from 0.

    Examples
    --------
    >>> folder = f"cache-of-host-{mykv.cross_rank()}"  # a folder for each host on a shared disk
    """
    return core.cross_rank()


def cross_size() -> int:
    """Number of hosts that have a process with this local_rank().

    Examples
    --------
    >>> hosts = mykv.cross_size()
    >>> hosts * mykv.local_size()  # where all hosts have equally many workers
    2
    """
    return core.cross_size()


def machine_of(rank: int) -> str:
    """Name of the machine that a rank runs on."""
    group, names = _machines
    (then,) = mpi.ranks_of_group(_group, [rank], group)
    return names[then]


def has_same_ranks_as(earlier: int) -> bool:
    """Whether the ranks are the processes of an earlier `generation`, in the same order."""
    return mpi.is_same(_groups[max(begin for begin in _groups if begin <= earlier)], _group)


def communicator_of(ranks: Sequence[int]) -> MPI.Intracomm:
    """A new communicator of some of the ranks, in this order. Collective over these ranks."""
    return mpi.part_of(_comm, _group, ranks, not _has_lost)


def world_communicator() -> MPI.Intracomm:
    """The communicator of the last init(), even after this rank has left: survivors use it to agree who is left."""
    return _last_comm


def leave_lost() -> None:
    """Leave a world that has lost a rank. Afterwards this rank no longer writes to the world's memory."""
    if is_initialized():
        core.lose(failure_detector.lost() or "another rank has noticed that a worker has ended")
        _leave("a worker was lost", "kvstore_plugin has lost a worker: it is initialized again by run_elastic().", True)
    failure_detector.end(orderly=False)  # the detector still runs if join_again() has failed


def join_again(comm: MPI.Intracomm) -> None:
    """Initialize again, on a communicator of the surviving ranks. Collective over the communicator."""
    global _has_lost, losses, job, _machines
    _has_lost = True
    losses += 1
    core_loader.load().begin_again()
    failure_detector.begin(comm)
    names, marks = zip(*comm.allgather((socket.gethostname(), job)))  # new processes need the others' mark
    _join(comm)
    job, _machines = marks[0], (_group, list(names))


def ranks_in(comm: MPI.Intracomm) -> list[int]:
    """Ranks of the processes of a communicator.

    Raises
    ------
    ValueError
        A process has no rank.
    """
    return mpi.ranks_in(comm, _group)


def wait(work: Any, look: Callable[[], None] | None = None, first_look: float = _FIRST_LOOK_S) -> None:
    """Wait for a ``Work`` of the core; Ctrl-C interrupts the wait.

    Parameters
    ----------
    work : Work
    look : callable, optional
        Called without arguments after `first_look` seconds and then at intervals that double up to 30 seconds (or
        `first_look`, if longer).
    first_look : float, optional

    Raises
    ------
    kvstore_plugin._core.Error
        The operation failed; the message says why.
    """
    if _interrupted:
        _forget_finished()
    began = time.monotonic()
    next_look = first_look if look is not None else math.inf
    try:
        while not work.wait(_SIGNAL_CHECK_S):
            if time.monotonic() - began >= next_look:
                next_look += min(next_look, max(first_look, _LONGEST_PAUSE_S))
                look()
    except BaseException:
        keep(work)  # Ctrl-C, or any exception of a signal handler
        raise


def keep(work: Any) -> None:
    """Keep unfinished work whose wait was interrupted, with its arrays: its deletion would wait for the operation.

    After the operation's end, the next call that waits drops the work.
    """
    _forget_finished()
    if not work.done():
        with _interrupted_lock:
            _interrupted.append(work)


def _forget_finished() -> None:
    with _interrupted_lock:
        _interrupted[:] = [work for work in _interrupted if not work.done()]


def _join(comm: Any, read_settings: bool = False) -> None:
    global core, generation, recoveries, _comm, _last_comm, _group, _machines, _ended_before
    loaded = core_loader.load()
    info = loaded.build_info()
    launch_checks.check_library(info["mpi"], loaded.mpi_library_version(), info["mpi_abi"])
    MPI = mpi.start(loaded)
    launched.mark_worker()
    launch_checks.check_size(MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
    if failure_detector.is_possible():
        loaded.end_failed_exits_by_signal(True)
    comm = mpi.communicator(comm)
    names = _read_settings(loaded, comm) if read_settings else None
    gpu_libraries.find()
    options = {**settings.core_options(), "stall_abort_ms": round(1000 * settings.value("MYKV_STALL_ABORT_S"))}
    loaded.init(comm.py2f(), {**options, "versions": _versions(loaded)})
    _comm, _last_comm, _group = comm, comm, comm.Get_group()
    _machines = _machines if names is None else (_group, names)
    core = loaded
    _numbers.update((name, getattr(core, name)()) for name in _NUMBERS)
    log_prefix.joined(core.rank(), core.size())
    _ended_before = {code: count for code, (count, _) in _ended_by_leaving().items()}
    generation += 1
    recoveries = 0 if read_settings else recoveries + 1
    if not _groups or not mpi.is_same(next(reversed(_groups.values())), _group):
        _groups[generation] = _group
    for follower in _followers:
        follower.joined(core)
    stall_watch.begin(core)


def _read_settings(loaded: Any, comm: MPI.Comm) -> list[str]:
    """Read the settings; if a rank fails, raise on all ranks, since the others would wait for that rank.

    Returns the name of each rank's machine, and sets `job`.
    """
    global job
    problem = None
    try:
        settings.read()
        _select_kernels(loaded, settings.value("MYKV_KERNELS"))
    except ValueError as error:
        problem = str(error)
    told = [follower.tell() for follower in _followers]
    mine = (problem, socket.gethostname(), os.urandom(8).hex(), told)
    problems, names, marks, heard = zip(*comm.allgather(mine))
    wrong = [rank for rank, sentence in enumerate(problems) if sentence is not None]
    if wrong:
        ranks = f"rank {wrong[0]}" if len(wrong) == 1 else f"{len(wrong)} ranks, the first of which is {wrong[0]}"
        where = "" if len(set(problems)) == 1 else f" on {ranks}"
        raise ValueError(f"{problems[wrong[0]][:-1]}{where}.")
    job = marks[0]
    for follower, each in zip(_followers, zip(*heard)):
        follower.hear(each)
    return list(names)


def _select_kernels(loaded: Any, name: str) -> None:
    if not loaded.select_kernel_path(name):
        built = ", ".join(loaded.build_info()["kernels"])
        raise ValueError(
            f"MYKV_KERNELS is {name!r}, but this processor does not have it, or mykv was built without it (it was "
            f"built with {built}). Unset the variable."
        )


def _versions(loaded: Any) -> dict[str, str]:
    """Values that must be the same on all ranks, which may have been started in different environments."""
    versions = {"mykv": loaded.build_info()["version"]}
    for follower in _followers:
        versions.update(follower.versions())
    return versions


def install_hooks() -> None:
    """Start to observe forks and the end of the script; a second call is a no-op.

    Exit handlers run in reverse order: mykv's before MXNet's, which is registered when MXNet is imported, and after
    handlers that the program registers later, which may still use the store.
    """
    script_end.install(_would_be_awaited, _at_exit, _abort)


def _would_be_awaited() -> bool:
    """Whether other ranks would wait for this process if it ended now."""
    return mpi.is_shared() or (is_initialized() and core.size() > 1)


def _forget_in_child() -> None:
    global core, _forked
    if not mpi.is_initialized():
        return  # this child may become a rank
    _forked = True
    core = _CoreInChild(
        "kvstore_plugin does not work in a forked child of a rank, since MPI does not survive a fork: use it in the "
        "parent only. The child knows rank(), size() and the like.",
        _numbers,
    )
    script_end.forget_in_child()


def _abort(status: int) -> None:
    from mpi4py import MPI

    core_loader.load().end_failed_exits_by_signal(False)  # no rank can continue without this process: Abort ends all

    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # the stream is closed, or None as under pythonw
            continue
    failure_detector.abort(MPI.COMM_WORLD, status)


def _at_exit() -> None:
    if _forked:
        return
    failure, exit_ = script_end.failure(), script_end.failed_exit()
    if is_initialized():
        if failure is not None:
            script_end.tell_launcher(failure)
            _tell_leaving()
            core.leave(failure.text)
            script_end.end_job(failure)
        script_end.tell_launcher(exit_)
        _warn_if_nothing_was_exchanged()
        _leave(
            exit_.text
            if exit_ is not None
            else "its script has ended; all workers must make this call, and the same number of steps",
            "kvstore_plugin was shut down: Python is exiting.",
        )
    else:
        failure_detector.end()  # the detector still runs if join_again() has failed
        script_end.tell_launcher(failure or exit_)
    if mpi.is_shared():
        if failure is not None:
            script_end.end_job(failure)
        if _broken_off:
            _log.error("%s: the job ends.", _broken_off)
            _abort(exit_.status if exit_ is not None else 1)
        launched.mark_ended()
    new_workers.end_without_disconnecting()


def _leave(reason: str, afterwards: str, lost: bool = False) -> int:
    """Wait for this rank's operations while the other ranks still serve them; then tell these ranks why it leaves.

    MXNet drops errors of these operations that were never raised; returns their number.
    """
    global core, _comm, _group
    seconds = settings.value("MYKV_EXIT_WAIT_S")
    forgotten = drain(seconds)
    _tell_leaving()
    leaving, core, _comm, _group = core, _NoCore(afterwards), None, None
    _numbers.clear()
    stall_watch.end(leaving)
    failure_detector.end(orderly=not lost)
    leaving.leave(reason)
    leaving.shutdown()
    # Unfinished operations have failed now. Without this drain MXNet would report their errors when it exits. The
    # thread that drains should be done before the caller reads an array: two threads must not take the same error out
    # of the engine.
    forgotten += drain(max(seconds, _LEAST_DRAIN_S))
    for follower in _followers:
        follower.left(lost)
    return forgotten


def _tell_leaving() -> None:
    for follower in _followers:
        follower.leaving()


def drain(seconds: float) -> int:
    """Wait for this rank's operations in MXNet's engine, for at most this number of seconds.

    MXNet drops errors that were never raised; returns their number.
    """
    return 0 if _forked else sum(follower.drain(seconds) for follower in _followers)
