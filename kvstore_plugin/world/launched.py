"""The processes that the launcher has started on this host, as the kernel shows them in /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Mapping, NamedTuple

from mykvrun import worker_notes

from . import launch_checks, settings

# Variables that identify a process in its job; a nested launcher sets them differently.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_IDENTITY = (*_RANKS, "PMIX_NAMESPACE", "PMI_FD", "SLURM_STEP_ID", "SLURM_PROCID")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_LAUNCHERS = ("prte", "orted", "mpirun", "mpiexec", "hydra", "srun", "slurmstepd")
# Variable with the worker's pid, which its child processes inherit. The launcher does not pass it on to other hosts.
_MARK = "_MYKV_WORKER"
_ENDED = "mykv-ended"  # the name of a process whose script has ended, while MPI waits for the others


class _Process(NamedTuple):
    name: str
    parent: int
    is_zombie: bool


class Workers(NamedTuple):
    """The workers of this job on this host."""

    alive: set[int]  # ranks whose script has not ended
    ended: set[int]  # ranks whose script or process has ended, if they can be identified
    missing: int  # number of ended processes of unknown rank


def restart_count() -> int:
    """Number of restarts of this job by ``mykvrun --max-restarts``; 0 in the first attempt and without mykvrun.

    May be called before `init`.

    Returns
    -------
    int

    Examples
    --------
    >>> if mykv.restart_count() > 0:
    ...     print("continues from the last checkpoint")
    """
    return int(settings.value("MYKV_RESTART"))


def mark_worker() -> None:
    """Mark this process as a worker, for its child processes."""
    if _is_launched(os.environ):
        os.environ[_MARK] = str(os.getpid())


def worker_above() -> int | None:
    """The pid of the worker that has started this process, if this process is not a worker itself."""
    worker = launch_checks.count_of(os.environ.get(_MARK, ""))
    if worker is None or worker == os.getpid() or not _is_launched(os.environ):
        return None
    for pid, process in _ancestors():
        if pid == worker:
            return worker
        if process.name.startswith(_LAUNCHERS):  # a job that the worker has started
            return None
    return None


def mark_ended() -> None:
    """Mark this process's script as ended, for workers that wait in init() and look for this mark."""
    with contextlib.suppress(OSError):  # without the mark, these workers warn after MYKV_STALL_WARN_S
        Path("/proc/self/comm").write_text(_ENDED, encoding="ascii")


def workers_here() -> Workers | None:
    """The workers on this host; None if they cannot be determined."""
    size = next(filter(None, (launch_checks.count_of(os.environ.get(name, "")) for name in _LOCAL_SIZES)), None)
    above = launcher()
    if size is None or above is None:
        return None
    alive, ended = set(), set()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        process = _process(pid)
        if process is None or process.parent != above or process.is_zombie:
            continue
        environment = _environment(pid)
        if environment is None:
            return None
        rank = _rank(environment)
        if rank is not None:
            (ended if process.name == _ENDED else alive).add(rank)
    launched = launch_checks.launched_processes(os.environ)
    missing = size - len(alive | ended)
    if missing > 0 and launched is not None and launched[1] == size:
        ended |= set(range(size)) - alive
        missing = 0
    return Workers(alive, ended, missing)


def _is_launched(environment: Mapping[str, str]) -> bool:
    return "PMIX_NAMESPACE" in environment or launch_checks.launched_processes(environment) is not None


def _rank(environment: Mapping[str, str]) -> int | None:
    return next((int(environment[name]) for name in _RANKS if environment.get(name, "").isdigit()), None)


def launcher() -> int | None:
    """The pid of the launcher's process that has started this worker; a shell or a profiler may be between them."""
    if worker_notes.rank_in(os.environ) is None:
        return None
    mine = [os.environ.get(name) for name in _IDENTITY]
    for pid, process in _ancestors():
        environment = _environment(pid)
        if process.name.startswith(_LAUNCHERS) or environment is None:
            return pid
        if [environment.get(name) for name in _IDENTITY] != mine:
            return pid
    return None


def _ancestors() -> list[tuple[int, _Process]]:
    found = []
    own = _process(os.getpid())
    pid = own.parent if own else 0
    while pid > 0:
        process = _process(pid)
        if process is None:
            break
        found.append((pid, process))
        pid = process.parent
    return found


def _process(pid: int) -> _Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    state, parent = rest.split()[:2]
    return _Process(name, int(parent), state in "ZX")


def _environment(pid: int) -> dict[str, str] | None:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return None
    return {name: value for name, _, value in (one.partition("=") for one in text.split("\0"))}
