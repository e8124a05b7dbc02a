"""Starts MPI through mpi4py, as the core needs it, and creates communicators."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType
from typing import Any, Sequence

from . import launch_checks, mpi_settings, new_workers

# Tag of the messages that create a process set's communicator; large, so that users' messages have other tags.
_TAG = 32001


def start(core: ModuleType) -> ModuleType:
    """Initialize MPI, if it is not initialized, and return the module mpi4py.MPI.

    Raises
    ------
    ImportError
        mpi4py is missing, or finds no MPI library.
    RuntimeError
        mpi4py and the core use different MPI libraries, MPI was finalized, or has no MPI_THREAD_MULTIPLE.
    """
    MPI = _load(core)
    if MPI.Is_finalized():
        raise RuntimeError("MPI was finalized already, so kvstore_plugin can no longer be initialized.")
    if new_workers.is_waiting():
        core.finalize_mpi_at_exit()  # new_worker.py has initialized MPI
    if not MPI.Is_initialized():
        core.finalize_mpi_at_exit()  # mpi4py finalizes only an MPI that its import has initialized
        mpi_settings.apply()
        with mpi_settings.without_files(MPI.Get_library_version()):
            _initialize(core, MPI)
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            "MPI was initialized without MPI_THREAD_MULTIPLE. Let kvstore_plugin.init() initialize MPI, or request "
            "that level (mpi4py.rc.thread_level = 'multiple', an MPI built with it)."
        )
    return MPI


def _initialize(core: ModuleType, MPI: ModuleType) -> None:
    """Initialize MPI without the GIL, which mpi4py's function would hold."""
    for file in (core.__file__, None):  # None: all libraries whose symbols are global
        function = getattr(ctypes.CDLL(file), "MPI_Init_thread", None)
        if function is not None:
            break
    else:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        return
    code = function(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))
    if code != MPI.SUCCESS:
        raise RuntimeError(f"MPI_Init_thread has failed with the code {code}.")
    for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # as mpi4py does: an error of MPI is an exception


def is_initialized() -> bool:
    """Whether MPI is initialized and not finalized, as far as mpi4py knows."""
    MPI = sys.modules.get("mpi4py.MPI")
    return hasattr(MPI, "Is_finalized") and MPI.Is_initialized() and not MPI.Is_finalized()


def is_failure(error: BaseException) -> bool:
    """Whether an exception comes from a failed MPI call in mpi4py."""
    MPI = sys.modules.get("mpi4py.MPI")
    return hasattr(MPI, "Exception") and isinstance(error, MPI.Exception)


def is_shared() -> bool:
    """Whether MPI is initialized with other processes: these wait for this process in MPI_Finalize at the latest."""
    return is_initialized() and sys.modules["mpi4py.MPI"].COMM_WORLD.Get_size() > 1


def world_ranks(comm: Any) -> list[int] | None:
    """The ranks in MPI_COMM_WORLD that the argument `comm` of init() means; None for all. Not collective."""
    if isinstance(comm, (list, tuple, range)):
        return list(comm) or None
    if comm is None or not is_initialized():
        return None
    from mpi4py import MPI

    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        return []  # communicator() reports the error
    group = comm.Get_group()
    return ranks_of_group(group, range(group.Get_size()), MPI.COMM_WORLD.Get_group())


def _load(core: ModuleType) -> ModuleType:
    """The module mpi4py.MPI, checked to use the core's MPI library before any function of it is called."""
    try:
        import mpi4py

        if "mpi4py.MPI" in sys.modules:
            from mpi4py import MPI
        else:
            saved = mpi4py.rc.initialize, mpi4py.rc.finalize
            mpi4py.rc.initialize = False  # MPI must not start before the check below
            mpi4py.rc.finalize = False  # mpi4py would also finalize MPI in a forked child, and hang
            try:
                from mpi4py import MPI
            finally:
                mpi4py.rc.initialize, mpi4py.rc.finalize = saved
    except ImportError as error:
        raise ImportError(
            "mpi4py is missing or finds no MPI library, install it for the MPI that mykv was built against "
            f"({' '.join(launch_checks.parse_version(core.build_info()['mpi'])).strip()}; pip install mpi4py): {error}",
            name="mpi4py",
        ) from error
    launch_checks.check_same_library(core.mpi_library_version(), MPI.Get_library_version())
    return MPI


def communicator(comm: Any) -> Any:
    """The communicator that the argument `comm` of init() means.

    Raises
    ------
    TypeError, ValueError
        `comm` is not a communicator, or does not hold this process.
    """
    from mpi4py import MPI

    if new_workers.is_waiting():
        return MPI.COMM_SELF  # `comm` means the first workers, which this worker joins in run_elastic()
    if comm is None:
        return MPI.COMM_WORLD
    if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL:
        raise ValueError("comm is the null communicator: only the ranks of a communicator may call init() with it.")
    if isinstance(comm, (list, tuple, range)):
        ranks = _checked_ranks(comm)
        return part_of(MPI.COMM_WORLD, MPI.COMM_WORLD.Get_group(), ranks) if ranks else MPI.COMM_WORLD
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm must be an mpi4py.MPI.Intracomm, a list of ranks or None, not {type(comm).__name__}.")
    return comm


def _checked_ranks(ranks: Sequence[int]) -> list[int]:
    from mpi4py import MPI

    me, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    for rank in ranks:
        if not isinstance(rank, int):
            raise TypeError(f"comm must hold ranks, not {type(rank).__name__}.")
        if not 0 <= rank < size:
            raise ValueError(f"comm has the rank {rank}, but ranks of MPI_COMM_WORLD go from 0 to {size - 1}.")
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"comm has a rank twice: {list(ranks)}.")
    if ranks and me not in ranks:
        raise ValueError(
            f"comm has the ranks {list(ranks)}, but rank {me} of MPI_COMM_WORLD, which is not among them, calls init() "
            "with it."
        )
    return list(ranks)


def has_processes(comm: Any, group: Any) -> bool:
    """Whether `comm`, as given to init(), means the processes of `group` in their order."""
    from mpi4py import MPI

    if isinstance(comm, (list, tuple, range)):
        world = MPI.COMM_WORLD.Get_group()
        given = world.Incl(_checked_ranks(comm)) if comm else world
    else:
        given = communicator(comm).Get_group()
    return is_same(given, group)


def is_same(group: Any, other: Any) -> bool:
    """Whether two groups have the same processes in the same order. Not collective."""
    from mpi4py import MPI

    return MPI.Group.Compare(group, other) == MPI.IDENT


def ranks_in(comm: Any, group: Any) -> list[int]:
    """Ranks in `group` of the processes of a communicator, in its order; empty for the null communicator.

    Raises
    ------
    TypeError, ValueError
        `comm` is not an intracommunicator, or a process is not in the group.
    """
    from mpi4py import MPI

    if comm == MPI.COMM_NULL:
        return []
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"A process set needs an intracommunicator, not {type(comm).__name__}.")
    of_comm = comm.Get_group()
    ranks = MPI.Group.Translate_ranks(of_comm, list(range(of_comm.Get_size())), group)
    if MPI.UNDEFINED in ranks:
        raise ValueError("The communicator of a process set holds a process that was not in kvstore_plugin.init().")
    return list(ranks)


def ranks_of_group(group: Any, ranks: Sequence[int], other: Any) -> list[int]:
    """The ranks in `other` of processes of `group`; negative for a process that is not in `other`. Not collective."""
    from mpi4py import MPI

    return list(MPI.Group.Translate_ranks(group, list(ranks), other))


def part_of(comm: Any, group: Any, ranks: Sequence[int], world_is_whole: bool = True) -> Any:
    """A new communicator for some processes of `group`, all of them in `comm`. Collective over these processes only.

    `world_is_whole` is False when a process of MPI_COMM_WORLD has died: then MPI_COMM_WORLD cannot be used.
    """
    from mpi4py import MPI

    part = group.Incl(list(ranks))
    # MPI_COMM_WORLD is preferred, since users cannot free it; spawned processes have their own MPI_COMM_WORLD.
    world = MPI.COMM_WORLD.Get_group()
    everywhere = MPI.UNDEFINED not in MPI.Group.Translate_ranks(group, list(range(group.Get_size())), world)
    made = (MPI.COMM_WORLD if everywhere and world_is_whole else comm).Create_group(part, _TAG)
    part.Free()
    world.Free()
    return made
