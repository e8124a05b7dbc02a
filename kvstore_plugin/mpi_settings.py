"""Settings without which an MPI behaves badly on a machine that others use too.

mykv's own thread never waits inside MPI, and what it sends needs no setting to fill the wire. But a script's own calls
of MPI wait there, and Open MPI waits spinning: ranks that outnumber the cores then wait for each other's time slices
(an exchange of 4 KB over TCP between two ranks on two cores took 12.8 ms so, and 0.1 ms if the waiting one yields).
MPICH and Intel MPI yield by themselves, or are told by their launcher.

An MPI reads its settings from the environment when it is initialized: importing the package sets them, unless the user
did, in the environment, on the command line of mpirun (which uses the environment) or in Open MPI's file of parameters.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import Any, MutableMapping

from . import launch

_log = logging.getLogger("kvstore_plugin")

# Name of a parameter of Open MPI and the value that it gets.
_OPEN_MPI = {"mpi_yield_when_idle": "1"}
_PREFIX = "OMPI_MCA_"

_late: list[str] = []  # what could not be set any more


def apply(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set, if MPI still reads it; otherwise remember what is missing."""
    missing = {name: value for name, value in _OPEN_MPI.items() if not _is_set(name, environment)}
    if _initialized():
        _late[:] = [f"{_PREFIX}{name}={value}" for name, value in missing.items()]
        return
    for name, value in missing.items():
        environment[_PREFIX + name] = value


def warn_if_late(core: Any) -> None:
    """Log one line on rank 0 where MPI was initialized before it could be told, and its waiting can cost something."""
    is_open_mpi = launch.parse_version(core.mpi_library_version())[0] == "Open MPI"
    shares_cores = core.local_size() > len(os.sched_getaffinity(0)) or len(core.host_ranks()) > 1
    if _late and is_open_mpi and shares_cores and core.rank() == 0:
        _log.warning(
            "MPI was initialized before kvstore_plugin was imported: import kvstore_plugin first, or set %s, so that "
            "calls of MPI in the script do not wait spinning.",
            " ".join(_late),
        )
    _late.clear()


def _initialized() -> bool:
    """Whether MPI is initialized; only mpi4py can have done that in a Python program that is not embedded."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and module.Is_initialized()


def _is_set(name: str, environment: MutableMapping[str, str]) -> bool:
    return _PREFIX + name in environment or any(_names(path, name) for path in _parameter_files(environment))


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
