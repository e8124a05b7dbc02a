"""What the command mykvrun does from its first to its last line."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Iterator, TextIO

from . import worker_notes, workers
from .command_line import Request, parse
from .commands import Command, inside_slurm, mpirun_command, srun_command
from .errors import LaunchError
from .job import Job
from .mpi import OPEN_MPI, Mpi, find_mpi
from .output import (
    OPEN_MPI_4,
    OPEN_MPI_LINES,
    OPEN_MPI_PIECES,
    SRUN,
    FailedWorker,
    Marks,
    Output,
    Stream,
    folder_of,
    hydra_marks,
    relay,
)
from .sinks import Sink, raw, write_all

# Options of mpirun and srun for their output, which they take once.
_OUTPUT = ("output", "tag-output", "prepend-rank", "prepend-pattern", "label", "l", "unbuffered", "u")


def main(arguments: list[str] | None = None) -> int:
    """Start a job, and return its exit status: 0, or that of the worker that failed first; 2 where it cannot start."""
    try:
        request = parse(sys.argv[1:] if arguments is None else arguments)
        if request.ignored:
            _say(f"{', '.join(request.ignored)}: no effect with mykv.")
        mpi = find_mpi()
        jobs = [request.job]
        if request.is_check:
            test = replace(request.job, program=[sys.executable, "-m", "kvstore_plugin.selftest"], elastic=False)
            jobs = [test] if request.job.program == [sys.executable] else [test, request.job]
        for job in jobs:
            status = _run(job, mpi, request)
            if status != 0:
                break
        return status
    except LaunchError as error:
        _say(str(error))
        return 2


def _run(job: Job, mpi: Mpi, request: Request) -> int:
    """Start a job and wait for it, or only print its command."""
    uses_srun = _uses_srun(job, request)
    read = job if request.is_dry_run else replace(job, reading=_reading(job, request, uses_srun), mark=_mark())
    command = srun_command(read, mpi, uses_srun) if uses_srun else mpirun_command(read, mpi)
    if not request.is_dry_run:
        _check_program(job, command)
    if request.is_dry_run or request.is_verbose:
        variables = [f"{name}={value}" for name, value in command.variables.items()]
        _print(sys.stdout, shlex.join([*(["env", *variables] if variables else []), *command.arguments]))
    if request.is_dry_run:
        return 0
    losses = _Losses()
    output = Output(
        _marks(read, mpi, bool(uses_srun)) if read.reading else None,
        prefix=job.tag_output,
        timestamps=request.timestamps,
        is_elastic=job.elastic,
        folder=_folder(request.output_folder, job.workers or 1),
        workers=job.workers or 1,
        shows_all=request.is_verbose or os.environ.get("MYKV_VERBOSE") == "1",
        on_loss=losses.note,
    )
    with tempfile.TemporaryDirectory(prefix="mykvrun-") as folder:
        notes = Path(folder)
        status = _start(command, output, notes, losses)
        joined = worker_notes.ranks_with(notes, worker_notes.JOINED)
        if status == 0 and job.is_local and (job.workers or 1) > 1 and not joined:
            _say(
                "no worker has called init() of mykv, so each worker worked alone. Give gluon.Trainer or Module "
                "the store 'mykv', or use a DistributedTrainer of kvstore_plugin."
            )
    return status


def _uses_srun(job: Job, request: Request) -> str:
    """The program srun where it starts the job, else ''."""
    srun = shutil.which("srun")
    if request.launcher == "srun" and not srun:
        raise LaunchError("--launcher srun: there is no srun on PATH.")
    wants_srun = request.launcher == "srun" or (request.launcher == "auto" and inside_slurm() and not job.elastic)
    return srun if srun and wants_srun else ""


def _reading(job: Job, request: Request, uses_srun: str) -> str:
    """How the ranks' output is read: in a terminal as it comes, since progress bars shall move, else in lines."""
    if any(word.lstrip("-") in _OUTPUT for word in job.mpi_arguments):
        return ""
    in_lines = job.tag_output or request.timestamps or request.output_folder or not _is_terminal(sys.stderr)
    # srun marks whole lines only, so a progress bar would not move.
    return "lines" if in_lines else "" if uses_srun else "pieces"


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


def _folder(name: str | None, workers: int) -> Path | None:
    """The folder of --output-filename, which exists then."""
    if not name:
        return None
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"The folder {name} of --output-filename cannot be made: {error.strerror}.") from None
    for path in (Path(name) / folder_of(rank, workers) for rank in range(workers)):
        if path.exists() and not path.is_dir():
            raise LaunchError(f"{path} is a file, but --output-filename needs a folder there: move the file away.")
    return Path(name)


class _Losses:
    """What could not be written. The job goes on, unless the reader of stdout or stderr has gone, as with mpirun."""

    def __init__(self) -> None:
        self._launcher: subprocess.Popen[bytes] | None = None
        self._told: set[tuple[int | None, bool]] = set()
        self.status = 0  # of mykvrun, where the job itself has ended well

    def watch(self, launcher: subprocess.Popen[bytes]) -> None:
        """End this launcher's job if nobody reads its output any more."""
        self._launcher = launcher

    def note(self, name: str, error: OSError) -> None:
        """Tell of an error, once for each kind."""
        if isinstance(error, BrokenPipeError):
            self.status = 128 + signal.SIGPIPE
            if self._launcher is not None:
                self._launcher.send_signal(signal.SIGTERM)
            return
        self.status = self.status or 1
        kind = (error.errno, name in ("stdout", "stderr"))
        if kind not in self._told:
            self._told.add(kind)
            _say(
                f"{name} cannot be written: {error.strerror}. Output of the workers is missing there. The job goes on."
            )


def _check_program(job: Job, command: Command) -> None:
    """An error where the workers' program is not here, unless workers may run on another host or in another folder."""
    if not job.is_local or inside_slurm() or job.mpi_arguments:
        return
    path = command.variables.get("PATH", os.environ.get("PATH", os.defpath))
    name = job.program[0]
    if not shutil.which(name, path=os.pathsep.join([path, os.curdir])):  # Open MPI looks in the current folder too
        raise LaunchError(f"The program {name!r} was not found, or may not be executed. No worker has been started.")


def _start(command: Command, output: Output, notes: Path, losses: _Losses) -> int:
    """Run a command, pass on its output and signals, and say at the end which worker failed.

    ``notes`` is a folder for `worker_notes`.
    """
    env = {**os.environ, **command.variables, worker_notes.VARIABLE: str(notes)}
    workers.adopt_orphans()
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command.arguments, env=env, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise LaunchError(f"{command.arguments[0]} cannot be started: {error.strerror}.") from None
    assert process.stdout and process.stderr
    losses.watch(process)
    with workers.guarded(process), _passing_on_signals(process):
        threads = [
            threading.Thread(
                target=relay,
                args=(source, Sink.of_stream(stream, name, losses.note), Stream(output, name, _is_terminal(stream))),
            )
            for name, source, stream in (("stdout", process.stdout, sys.stdout), ("stderr", process.stderr, sys.stderr))
        ]
        for thread in threads:
            thread.start()
        code = process.wait()
        if code < 0:
            workers.end_orphans()
        for thread in threads:
            thread.join()
    output.close()
    status = code if code >= 0 else 128 - code
    if status == 0 or losses.status > 128:
        return losses.status
    first = None if output.is_elastic else _first_failure(output.failed, worker_notes.ends(notes))
    status = first.status if first else status
    has_joined = output.failed is not None and output.failed.rank in worker_notes.ranks_with(notes, worker_notes.JOINED)
    _say_who_failed(status, output, first, has_joined)
    return status


def _first_failure(failed: FailedWorker | None, ends: list[worker_notes.End]) -> worker_notes.End | None:
    """How the worker that failed first has ended; None if no worker has told it.

    ``failed`` is the worker that the launcher names. If it has told nothing, as after a signal or os._exit(), it ended
    without having learnt of another worker's end. Launchers end the other workers by SIGTERM, which is
    no cause.
    """
    if failed is not None and all(end.rank != failed.rank for end in ends):
        return None
    failures = [end for end in ends if end.status != 0]
    causes = [end for end in failures if end.status != 128 + signal.SIGTERM]
    return next(iter([*causes, *failures]), None)


@contextlib.contextmanager
def _passing_on_signals(process: subprocess.Popen) -> Iterator[None]:
    """SIGTERM and SIGHUP go to the launcher, which ends its workers; Ctrl-C in a terminal reaches it by itself.

    SIGQUIT would end the launcher alone, so the launcher gets SIGTERM.
    """

    def pass_on(number: int, _frame: object) -> None:
        process.send_signal(number)

    def wait_on(_number: int, _frame: object) -> None:
        if not _is_terminal(sys.stdin):
            process.send_signal(signal.SIGINT)

    def end(_number: int, _frame: object) -> None:
        process.send_signal(signal.SIGTERM)

    handlers = {signal.SIGTERM: pass_on, signal.SIGHUP: pass_on, signal.SIGINT: wait_on, signal.SIGQUIT: end}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_who_failed(status: int, output: Output, first: worker_notes.End | None, has_joined: bool = False) -> None:
    failed = output.failed
    if first is not None:
        failed = FailedWorker(first.rank, failed.host if failed and failed.rank == first.rank else "")
    how = f"signal {status - 128}" if 128 < status < 160 else f"status {status}"
    if failed is None:
        _say(f"the job ended with {how}.")
        return
    where = f" on {failed.host}" if failed.host else ""
    if output.is_elastic:  # the ranks of new workers begin at 0 again
        _say(
            f"a worker{where} died, and the job ended with {how}. The others may have finished all the same: let the "
            "script write down that it is done."
        )
        return
    lines = [] if output.shows_end_of(failed.rank) else output.last_lines(failed.rank)
    it = f"rank {failed.rank}{where}"
    if first is not None:
        ended = f"{it} ended with {first.how}. It"
    elif failed.left_others and not has_joined:
        ended = f"{it} ended with status 0 before the end of init(), which all workers must call. It"
    else:
        ended = it
    _say(f"{ended} failed first, and the job ended with {how}." + (" Its last lines:" if lines else ""), *lines)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _say(text: str, *lines: str) -> None:
    """Write a message, and lines below it, to stderr, unless nobody reads it."""
    _print(sys.stderr, "\n  ".join([f"mykvrun: {text}", *lines]))


def _print(stream: TextIO | None, text: str) -> None:
    if stream is not None:
        with contextlib.suppress(OSError):
            write_all(raw(stream), f"{text}\n".encode(errors="replace"))
