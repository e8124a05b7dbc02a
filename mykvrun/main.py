"""The main program of the command mykvrun."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from . import reachable, restarts, worker_notes
from .attempt import Ended, Losses, run_once
from .command_line import Request, parse
from .commands import Command, inside_slurm, mpirun_command, srun_command
from .errors import LaunchError
from .job import Job
from .messages import is_terminal, say, write
from .mpi import OPEN_MPI, Mpi, find_mpi
from .output import OPEN_MPI_4, OPEN_MPI_LINES, OPEN_MPI_PIECES, SRUN, Marks, Output, hydra_marks
from .rank_files import RankFiles
from .restarts import Restarts
from .shown_ranks import ShownRanks
from .signals import EndSignals, end_with_caller

# Options of mpirun and srun for the workers' output. Each option may occur only once.
_OUTPUT = ("output", "tag-output", "prepend-rank", "prepend-pattern", "label", "l", "unbuffered", "u")

# Variables of Slurm, PBS, LSF and Grid Engine, from which mpirun itself learns the hosts.
_ALLOCATIONS = ("SLURM_JOB_ID", "SLURM_JOBID", "PBS_NODEFILE", "LSB_HOSTS", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")


def main(arguments: list[str] | None = None) -> int:
    """Start a job, and return its exit status: 0, or that of the worker that failed first; 2 if it cannot start."""
    try:
        request = parse(sys.argv[1:] if arguments is None else arguments)
        if request.ignored:
            say(f"{', '.join(request.ignored)}: no effect with mykv.")
        if request.caller is not None:
            end_with_caller(request.caller)
        mpi = find_mpi()
        jobs = [request.job]
        if request.is_check:
            test = replace(request.job, program=[sys.executable, "-m", "kvstore_plugin.selftest"], elastic=False)
            jobs = [test] if request.job.program == [sys.executable] else [test, request.job]
        for job in jobs:
            status = _run(job, mpi, request, request.restarts if job is request.job else Restarts())
            if status != 0:
                break
        return status
    except LaunchError as error:
        say(str(error))
        return 2


def _run(job: Job, mpi: Mpi, request: Request, again: Restarts) -> int:
    """Start a job, restart it if it fails, and wait for it; or only print its command."""
    uses_srun = _uses_srun(job, request)
    if request.min_workers and (uses_srun or not job.hosts):
        raise LaunchError("--min-workers chooses among the hosts of -H or --hostfile, which mpirun reaches by ssh.")
    if request.is_dry_run:
        _print(_command(job, mpi, uses_srun))
        return 0
    losses = Losses()
    with EndSignals() as signals:

        def start(number: int) -> Ended:
            try:
                now = reachable.on_hosts_that_answer(job, request.min_workers) if request.min_workers else job
            except reachable.TooFewHosts as error:
                return Ended(1, str(error), may_mend=True)
            if again.most or restarts.VARIABLE in os.environ:  # the variable may be that of an outer job
                now = replace(now, variables={**now.variables, restarts.VARIABLE: str(number)})
            return _attempt(now, mpi, request, number, losses, signals)

        return restarts.run_again(start, again, signals)


def _all_here(job: Job) -> bool:
    """Whether all workers certainly run on this host: the user's options or an allocation may add other hosts."""
    return job.is_local and not job.mpi_arguments and not any(name in os.environ for name in _ALLOCATIONS)


def _attempt(job: Job, mpi: Mpi, request: Request, number: int, losses: Losses, signals: EndSignals) -> Ended:
    """Start a job once, and wait for it."""
    uses_srun = _uses_srun(job, request)
    read = replace(job, reading=_reading(job, request, uses_srun), mark=_mark())
    command = _command(read, mpi, uses_srun)
    _check_program(job, command)
    if request.is_verbose:
        _print(command)
    folders = request.folders.of_attempt(number, job.workers or 1)
    output = Output(
        _marks(read, mpi, bool(uses_srun)) if read.reading else None,
        prefix=job.tag_output,
        timestamps=request.timestamps,
        is_elastic=job.elastic,
        files=RankFiles(folders, job.workers or 1, losses.note) if any(folders) else None,
        ranks=ShownRanks(request.ranks),
        shows_all=request.is_verbose or os.environ.get("MYKV_VERBOSE") == "1",
    )
    with tempfile.TemporaryDirectory(prefix="mykvrun-") as folder:
        notes = Path(folder)
        ended = run_once(command, output, notes, losses, signals, _all_here(job))
        joined = worker_notes.ranks_with(notes, worker_notes.JOINED)
    only_tells = not {"-h", "--help", "--version"}.isdisjoint(job.program)
    if ended.status == 0 and job.is_local and (job.workers or 1) > 1 and not joined and not only_tells:
        say(
            "no worker has called init() of mykv, so each worker worked alone. Give gluon.Trainer or Module "
            "the store 'mykv', or use a DistributedTrainer of kvstore_plugin."
        )
    return ended


def _command(job: Job, mpi: Mpi, uses_srun: str) -> Command:
    return srun_command(job, mpi, uses_srun) if uses_srun else mpirun_command(job, mpi)


def _print(command: Command) -> None:
    variables = [f"{name}={value}" for name, value in command.variables.items()]
    write(sys.stdout, shlex.join([*(["env", *variables] if variables else []), *command.arguments]))


def _uses_srun(job: Job, request: Request) -> str:
    """The program srun if it starts the job, otherwise ''."""
    srun = shutil.which("srun")
    if request.launcher == "srun" and not srun:
        raise LaunchError("--launcher srun: there is no srun on PATH.")
    wants_srun = request.launcher == "srun" or (request.launcher == "auto" and inside_slurm() and not job.elastic)
    return srun if srun and wants_srun else ""


def _reading(job: Job, request: Request, uses_srun: str) -> str:
    """How the ranks' output is read: in a terminal as it arrives, so that progress bars move, otherwise in lines."""
    own = next((word for word in job.mpi_arguments if word.lstrip("-") in _OUTPUT), None)
    if own and (any(request.folders) or request.ranks is not None):
        raise LaunchError(
            f"{own} in --mpi-args hides which rank writes what. Leave it out, or leave out --ranks, --output-filename "
            "and --log-dir."
        )
    if own:
        return ""
    in_lines = job.tag_output or request.timestamps or any(request.folders) or not is_terminal(sys.stderr)
    # srun marks whole lines only, so a progress bar would not move.
    return "lines" if in_lines or (uses_srun and request.ranks is not None) else "" if uses_srun else "pieces"


def _mark() -> str:
    return f"mykvrun-{secrets.token_hex(4)}-"


def _marks(job: Job, mpi: Mpi, uses_srun: bool) -> Marks:
    if uses_srun:
        return SRUN
    if mpi.kind != OPEN_MPI:
        return hydra_marks(job.mark)
    if mpi.major < 5:
        return OPEN_MPI_4
    return OPEN_MPI_PIECES if job.reading == "pieces" else OPEN_MPI_LINES


def _check_program(job: Job, command: Command) -> None:
    """Raise an error if the workers' program is missing, unless workers may run on another host or in another
    folder."""
    if not job.is_local or inside_slurm() or job.mpi_arguments:
        return
    path = command.variables.get("PATH", os.environ.get("PATH", os.defpath))
    name = job.program[0]
    if not shutil.which(name, path=os.pathsep.join([path, os.curdir])):  # Open MPI looks in the current folder too
        raise LaunchError(f"The program {name!r} was not found, or may not be executed. No worker has been started.")
