"""Settings of MPI libraries, mostly to keep ranks that outnumber the cores from spinning while they wait.

mykv's own thread never waits inside MPI, and its messages fill the wire without settings: with the defaults of Open
MPI, MPICH (over UCX and over libfabric) and Intel MPI they reached 93 to 96% of a link of 1 Gbit/s. But a script's own
MPI calls wait inside MPI, and Open MPI and Intel MPI spin: ranks that outnumber the cores then wait for each other's
time slices. Time of an exchange of 4 KB over TCP:

- Open MPI, two ranks on two cores: 12.8 ms, and 0.1 ms if the waiting rank yields.
- Intel MPI, four ranks on two cores: 14 to 21 ms, 0.14 ms with its mode for ranks that outnumber cores, and 1.2 ms with
  I_MPI_THREAD_YIELD alone.
- MPICH yields by itself: 0.2 ms.

None of the three can sleep in a wait, whatever the settings.

An MPI reads its settings from the environment when it is initialized. So importing the package sets them, unless the
user has: in the environment, on the command line of mpirun (which uses the environment) or in Open MPI's file of
parameters.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any, Iterator, MutableMapping

from . import launch_checks

_log = logging.getLogger("kvstore_plugin")

# Variables of each MPI and their values. An MPI ignores the variables of the others.
_SETTINGS = {
    "Open MPI": {"OMPI_MCA_mpi_yield_when_idle": "1"},
    "Intel MPI": {"I_MPI_WAIT_MODE": "1"},
    # UCX, which several MPIs use, catches SIGHUP for its debug mode, so SIGHUP would not end a worker. 0: no signal.
    "UCX": {"UCX_DEBUG_SIGNO": "0"},
}
_PREFIX = "OMPI_MCA_"

# For a job that outlives its processes (docs/elastic.md). MPI_Finalize waits in a barrier of the launcher, in which a
# host hangs if all processes of another host have died. This setting skips the barrier. In such jobs MPI_Finalize has
# ULFM's agreement before the barrier, and so needs no barrier.
_OUTLIVING = {"OMPI_MCA_async_mpi_finalize": "1"}

# Open MPI's variables for its transports and their files, and prefixes of the variables that launchers set.
_TRANSPORTS, _FILES = "OMPI_MCA_btl", "OMPI_MCA_btl_sm_backing_directory"
_LAUNCHED = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "SLURM_PROCID")
_FIRST_WITH_FILES = 5  # version of Open MPI

_late: dict[str, str] = {}  # settings that came too late, after the initialization of MPI


def apply(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that the user has not set. If MPI is initialized already, only note which ones are missing."""
    wanted = {name: value for settings in _SETTINGS.values() for name, value in settings.items()}
    if launch_checks.outlives_processes(environment):
        wanted.update(_OUTLIVING)
    missing = {name: value for name, value in wanted.items() if not _is_set(name, environment)}
    if _initialized():
        _late.clear()
        _late.update(missing)
    else:
        environment.update(missing)


@contextlib.contextmanager
def without_files(library: str, environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Context manager for the initialization of MPI: without a launcher, Open MPI creates no files in /dev/shm.

    mpirun removes the files of its processes, but the files of a process without a launcher would stay. Such a process
    needs none, since it shares memory with no other process: processes that it spawns reach it by TCP.
    """
    name, version = launch_checks.parse_version(library)
    makes_files = name == "Open MPI" and int(version or 0) >= _FIRST_WITH_FILES
    is_launched = any(variable.startswith(_LAUNCHED) for variable in environment)
    if not makes_files or is_launched or any(_is_set(variable, environment) for variable in (_TRANSPORTS, _FILES)):
        yield
        return
    environment[_TRANSPORTS] = "^sm"
    try:
        yield
    finally:
        del environment[_TRANSPORTS]  # programs that this process starts use their own settings


def warn_if_late(core: Any) -> None:
    """Log one line on rank 0 if MPI was initialized before its settings were set, and spinning can cost time."""
    settings = _SETTINGS.get(launch_checks.parse_version(core.mpi_library_version())[0], {})
    late = [f"{name}={_late[name]}" for name in settings if name in _late]
    shares_cores = core.local_size() > len(os.sched_getaffinity(0)) or len(core.host_ranks()) > 1
    if late and shares_cores and core.rank() == 0:
        _log.warning(
            "MPI was initialized before kvstore_plugin was imported, so calls of MPI in the script may wait spinning. "
            "Import kvstore_plugin first, or set %s.",
            " ".join(late),
        )
    _late.clear()


def _initialized() -> bool:
    """Whether MPI is initialized. Only mpi4py can have initialized it, except in a program that embeds Python."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized()


def _is_set(name: str, environment: MutableMapping[str, str]) -> bool:
    parameter = name[len(_PREFIX) :] if name.startswith(_PREFIX) else None
    in_file = parameter is not None and any(_names(path, parameter) for path in _parameter_files(environment))
    return name in environment or in_file


def _parameter_files(environment: MutableMapping[str, str]) -> list[Path]:
    """Open MPI's default files of parameters (its documentation, "Setting MCA parameter values")."""
    files = [Path(environment.get("HOME", "/"), ".openmpi", "mca-params.conf")]
    if "OPAL_PREFIX" in environment:
        files.append(Path(environment["OPAL_PREFIX"], "etc", "openmpi-mca-params.conf"))
    return files


def _names(path: Path, name: str) -> bool:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(rf"^\s*{re.escape(name)}\s*=", text, flags=re.MULTILINE) is not None
