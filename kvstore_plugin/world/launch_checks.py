"""Checks how this process was launched.

Mistakes that are silent without these checks: an mpirun of one MPI that starts processes linked to another MPI (each
process then sees only itself, and trains alone), a launcher that binds each rank to one core of many, and a program
that uses no store of this package although it was launched on several workers.
"""

from __future__ import annotations

import builtins
import logging
import multiprocessing
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Mapping

from mykvrun import cores, worker_notes

from . import training_warnings

_log = logging.getLogger("kvstore_plugin")
_told_of_one_worker = False

# Patterns by which MPI implementations are recognized in the text of MPI_Get_library_version(), or of the build
# (build_backend/mykv_mpi.py), and the implementations' names. The group of a pattern is the major version.
_IMPLEMENTATIONS = (
    (r"Open MPI v(\d+)", "Open MPI"),
    (r"Intel(?:\(R\) MPI Library| MPI) (?:for \S+ OS, Version )?(\d+)", "Intel MPI"),
    (r"MVAPICH\S*\s+(?:Version\s*:?\s*)?(\d+)", "MVAPICH"),
    (r"CRAY MPICH version (\d+)", "Cray MPICH"),
    (r"MPICH(?: Version:)?\s*(\d+)", "MPICH"),
)

# The plugin for `srun --mpi=`, for MPI builds of the vendors and of PyPI; a cluster's own build may accept others too.
_SLURM_PLUGINS = {"Open MPI": "pmix", "MPICH": "pmi2", "Intel MPI": "pmi2", "MVAPICH": "pmi2"}

# Variables with the number of processes, each with the variable for the rank.
_RANK_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}

# Steps with this number or a larger one were not started by srun: as unsigned 32-bit numbers, the batch script is step
# -5, and an interactive step -6.
_FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0


def parse_version(text: str) -> tuple[str, str]:
    """Implementation and major version named in the output of ``MPI_Get_library_version``.

    Returns
    -------
    tuple of str
        For example ``('Open MPI', '5')``; for an unknown MPI the first line of the text and ``''``.
    """
    for pattern, name in _IMPLEMENTATIONS:
        found = re.search(pattern, text)
        if found:
            return name, found.group(1)
    return text.strip("\0 \n").partition("\n")[0], ""


def first_line(text: str) -> str:
    """Name and full version from the output of ``MPI_Get_library_version``."""
    return " ".join(text.strip("\0 \n").partition("\n")[0].partition(",")[0].split())


def _short(text: str) -> str:
    return " ".join(parse_version(text)).strip()


def check_library(built: str, loaded: str, abi: str = "") -> None:
    """Refuse an MPI library of another kind or major version than the core was built against.

    Parameters
    ----------
    built, loaded : str
        Outputs of ``MPI_Get_library_version``: of the build's library, and in this process.
    abi : str, optional
        The ABI of a core from a wheel. Such a core was chosen for the loaded library, so there is nothing to compare.

    Raises
    ------
    RuntimeError
        The implementations or major versions differ.
    """
    if not abi and parse_version(built) != parse_version(loaded):
        raise RuntimeError(
            f"kvstore_plugin._core was built against {_short(built)}, but this process has loaded {_short(loaded)}. "
            f"Start it with {_short(built)} (PATH, LD_LIBRARY_PATH, modules), or build mykv again with the mpicc of "
            f"{_short(loaded)}."
        )


def check_same_library(core: str, mpi4py: str) -> None:
    """Refuse an mpi4py that uses another MPI library than the core.

    Raises
    ------
    RuntimeError
        The two outputs of ``MPI_Get_library_version`` differ.
    """
    if core.strip("\0 \n") != mpi4py.strip("\0 \n"):
        raise RuntimeError(
            f"mpi4py uses {_short(mpi4py)}, but kvstore_plugin._core uses {_short(core)}. Install both for the same "
            "MPI (pip install --no-cache-dir --force-reinstall --no-binary mpi4py mpi4py builds mpi4py with the mpicc "
            "on PATH)."
        )


def launched_processes(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """The number of processes according to the launcher's variables.

    Returns
    -------
    (str, int) or None
        The variable and the number; None if no launcher has set a variable.
    """
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        count = count_of(environment.get(variable, ""))
        if count is not None:
            return variable, count
    # In Slurm, a job script and a shell of salloc are "steps" too, and mpirun starts its daemons as a step. So this
    # function reads mpirun's variables first, and uses a step only if srun started the step, and this process in it.
    step = count_of(environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", "")))
    tasks = count_of(environment.get("SLURM_STEP_NUM_TASKS", ""))
    started_by_srun = step is not None and step < _FIRST_SPECIAL_SLURM_STEP and "SLURM_PROCID" in environment
    return ("SLURM_STEP_NUM_TASKS", tasks) if started_by_srun and tasks is not None else None


def launched_rank(environment: Mapping[str, str]) -> int | None:
    """This process's rank according to the launcher's variables; None in a single process."""
    launched = launched_processes(environment)
    if launched is None or launched[1] < 2:
        return None
    return count_of(environment.get(_RANK_VARIABLES[launched[0]], ""))


def count_of(text: str) -> int | None:
    """The number in a launcher's variable; None unless the text consists of 1 to 18 of the digits 0 to 9."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def outlives_processes(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether mpirun lets the job continue when one of its processes ends (``--with-ft ulfm``)."""
    return environment.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "enabled")


def check_size(mpi_size: int, library: str, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to work alone if a launcher started several processes.

    Parameters
    ----------
    mpi_size : int
        Size of MPI_COMM_WORLD.
    library : str
        Output of ``MPI_Get_library_version`` in this process.
    environment : mapping
        Environment variables.

    Raises
    ------
    RuntimeError
        MPI says 1 and the launcher says 2 or more.
    """
    launched = launched_processes(environment)
    if mpi_size == 1 and launched and launched[1] > 1:
        variable, count = launched
        plugin = _SLURM_PLUGINS.get(parse_version(library)[0], "...")
        srun = f" (or srun --mpi={plugin})" if "SLURM_PROCID" in environment else ""
        raise RuntimeError(
            f"The launcher started {count} processes ({variable}={count}), but {_short(library)}, the MPI of this "
            f"process, sees only one. Use the mpirun{srun} that belongs to this MPI, or build mykv and mpi4py for the "
            "MPI of your launcher."
        )


# Options of mpirun that give a rank all cores, or {0} cores. Intel MPI has -bind-to too, but ignores it.
_UNBINDING = {
    "Open MPI": "--bind-to none, or --map-by slot:PE={0}",
    "Intel MPI": "-genv I_MPI_PIN=0, or -genv I_MPI_PIN_DOMAIN={0}; with srun --cpus-per-task={0}",
    "MPICH": "-bind-to none, or -bind-to core:{0}; with srun --cpus-per-task={0}",
}


def warn_of_narrow_binding(local_rank: int, local_size: int, library: str) -> None:
    """Log a warning, once per host, when a rank may use fewer cores than the host could give to each of its ranks."""
    if local_rank != 0:
        return
    mine = len(os.sched_getaffinity(0))
    fair = cores.processors_of_job() // local_size
    if mine < fair:
        option = _UNBINDING.get(parse_version(library)[0], _UNBINDING["MPICH"]).format(fair)
        _log.warning(
            "The launcher binds this rank to %d of the %d cores that the host could give to each of its %d ranks: "
            "pass mpirun %s.",
            mine,
            fair,
            local_size,
            option,
        )


def warn_of_many_threads(local_rank: int, local_size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Log a warning, once per host, when the ranks of a host compute with more threads than it has cores.

    The threads of MXNet's operators spin while they wait for each other. If they outnumber the cores, a step takes
    several times as long: with 2 ranks on 2 cores a step of ResNet-18 takes 93 ms with 1 thread per rank, and 297 ms
    with 2 threads.
    """
    if local_rank != 0 or local_size < 2:
        return
    given = count_of(environment.get("OMP_NUM_THREADS", ""))
    threads = given or len(os.sched_getaffinity(0))  # without the variable OpenMP takes all processors
    if threads == 1:
        return
    processors = cores.processors_of_job()
    if threads * local_size > processors:
        _log.warning(
            "The %d ranks of this host compute with %d threads each (%s) on %d cores, which is slow: set "
            "OMP_NUM_THREADS=%d, or unset it and leave out --threads for mykvrun, which then sets it.",
            local_size,
            threads,
            f"OMP_NUM_THREADS={given}" if given else "OMP_NUM_THREADS is not set",
            processors,
            max(1, processors // local_size),
        )


def tell_of_one_worker(size: int, environment: Mapping[str, str] = os.environ) -> None:
    """Log a warning, once, in a script that was started without a launcher: one worker trains.

    No warning in notebooks, an interactive Python, tests and commands of this package, which usually have one worker.
    """
    global _told_of_one_worker
    main = sys.modules.get("__main__")
    is_alone = size == 1 and launched_processes(environment) is None and multiprocessing.parent_process() is None
    is_meant = (
        hasattr(sys, "ps1") or sys.flags.interactive or hasattr(builtins, "__IPYTHON__") or "pytest" in sys.modules
    )
    own = (getattr(main, "__package__", None) or "").startswith("kvstore_plugin")
    if _told_of_one_worker or not is_alone or is_meant or own or not hasattr(main, "__file__"):
        return
    _told_of_one_worker = True
    training_warnings.warn(
        "No launcher started this program, so it trains with one worker. For two workers: mykvrun -n 2 %s",
        shlex.join(_command()),
    )


def _command() -> list[str]:
    """This process's command line, with Python's file name only."""
    try:
        words = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        words = [sys.executable, *sys.argv]
    return ["python", *words[1:]]


def warn_of_separate_workers(environment: Mapping[str, str] = os.environ) -> None:
    """Log a warning on rank 0 of a job of several processes that end without having called init().

    mykvrun warns by itself. A process that a worker has started inherits the launcher's variables; it is not a worker.
    """
    launched = launched_processes(environment)
    if launched is None or launched[1] < 2 or worker_notes.VARIABLE in environment or _is_child_of_python():
        return
    variable, count = launched
    if environment.get(_RANK_VARIABLES[variable]) == "0":
        training_warnings.warn(
            "The launcher started %d workers, but this worker has never called init(): if it has trained, it has "
            "trained alone. Check the name in mx.kv.create('mykv') and give the store to gluon.Trainer or Module, or "
            "use a DistributedTrainer.",
            count,
        )


def _is_child_of_python() -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{os.getppid()}/exe")).startswith("python")
    except OSError:
        return False
