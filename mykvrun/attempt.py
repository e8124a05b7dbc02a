"""Runs one job: the launcher as a process, and the search for the worker that failed first."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

from . import worker_notes, workers
from .commands import Command
from .errors import LaunchError
from .messages import is_terminal, say
from .output import FailedWorker, Output, Stream, relay
from .signals import EndSignals
from .sinks import Sink

# Exit statuses that mean a wrong command, if the worker has not reached the end of init(). 2: wrong options, or no file
# of this name (Python, argparse). 126 and 127: a shell cannot execute, or does not find, the command.
_STATUS_OF_MISTAKES = (2, 126, 127)


class Ended(NamedTuple):
    """How a job has ended."""

    status: int  # mykvrun's exit status
    failure: str = ""  # a message; "": nothing has failed, or no process reads mykvrun's output
    last_lines: tuple[str, ...] = ()  # last lines of the failed worker's output, unless they were just shown
    may_mend: bool = False  # whether the same command may succeed the next time

    def tell(self, then: str = "") -> None:
        """Report the failure, followed by the text `then`."""
        if self.failure:
            say(f"{self.failure}{then}" + (" Its last lines:" if self.last_lines else ""), *self.last_lines)


class Losses:
    """Handles failed writes of output. The job continues, unless no process reads stdout or stderr, as with mpirun."""

    def __init__(self) -> None:
        self._launcher: subprocess.Popen[bytes] | None = None
        self._told: set[tuple[int | None, bool]] = set()
        self.status = 0  # mykvrun's exit status if the job itself has succeeded

    def watch(self, launcher: subprocess.Popen[bytes]) -> None:
        """End this launcher's job if no process reads its output any more."""
        self._launcher = launcher

    def note(self, name: str, error: OSError) -> None:
        """Report an error, once per kind."""
        if isinstance(error, BrokenPipeError):
            self.status = 128 + signal.SIGPIPE
            if self._launcher is not None:
                self._launcher.send_signal(signal.SIGTERM)
            return
        self.status = self.status or 1
        kind = (error.errno, name in ("stdout", "stderr"))
        if kind not in self._told:
            self._told.add(kind)
            say(f"{name} cannot be written: {error.strerror}. Output of the workers is missing there. The job goes on.")


def run_once(
    command: Command, output: Output, notes: Path, losses: Losses, signals: EndSignals, all_here: bool
) -> Ended:
    """Run a command, pass on its output and signals, and find out which worker has failed.

    ``notes`` is an empty folder for `worker_notes`. ``all_here``: all workers run on this host.
    """
    code = _status(command, output, notes, losses, signals, all_here)
    status = code if code >= 0 else 128 - code
    if status == 0 or losses.status > 128:
        return Ended(losses.status)
    if signals.received:
        name = signal.Signals(signals.received).name
        return Ended(128 + signals.received, f"the job was ended by {name}{' (Ctrl-C)' * (name == 'SIGINT')}.")
    first = None if output.is_elastic else first_failure(output.failed, worker_notes.ends(notes))
    status = first.status if first else status
    joined = worker_notes.ranks_with(notes, worker_notes.JOINED)
    rank = first.rank if first else output.failed.rank if output.failed else None
    is_mistake = output.tells_mistake or (status in _STATUS_OF_MISTAKES and rank not in joined)
    has_joined = output.failed is not None and output.failed.rank in joined
    return failure(status, output, first, has_joined)._replace(may_mend=not is_mistake)


def _status(command: Command, output: Output, notes: Path, losses: Losses, signals: EndSignals, all_here: bool) -> int:
    """The launcher's status, once all output of its workers is passed on."""
    env = {**os.environ, **command.variables, worker_notes.VARIABLE: str(notes)}
    workers.adopt_orphans()
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(command.arguments, env=env, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise LaunchError(f"{command.arguments[0]} cannot be started: {error.strerror}.") from None
    assert process.stdout and process.stderr
    losses.watch(process)
    with workers.guarded(process) as guard, signals.sent_to(process):
        threads = [
            threading.Thread(
                target=relay,
                args=(source, Sink.of_stream(stream, name, losses.note), Stream(output, name, is_terminal(stream))),
            )
            for name, source, stream in (("stdout", process.stdout, sys.stdout), ("stderr", process.stderr, sys.stderr))
        ]
        for thread in threads:
            thread.start()
        # wait_for() needs workers that are descendants of the launcher. On other hosts daemons start the workers.
        code = workers.wait_for(process) if all_here else process.wait()
        if code is None:
            say(
                f"the launcher was killed, since it had not ended {workers.WITHOUT_WORKERS_S:.0f} seconds after its "
                "last worker."
            )
            code = 1
        elif code < 0:
            workers.end_orphans(but=guard)
        for thread in threads:
            thread.join()
    output.close()
    return code


# In a worker's error: the end of another worker, whose own note is missing if it was on another host.
_TOLD = re.compile(r"\brank (?P<rank>[0-9]+) ended with (?P<how>.+)")


def first_failure(failed: FailedWorker | None, ends: list[worker_notes.End]) -> worker_notes.End | None:
    """How the first failed worker has ended; None if it has left no note.

    ``failed``: the worker that the launcher names. If it left no note, as after a signal or os._exit(), it did not fail
    because of another worker, so it is the first. Launchers end the other workers by SIGTERM, which is not a cause.
    """
    failures = [end for end in ends if end.status != 0]
    causes = [end for end in failures if end.status != 128 + signal.SIGTERM]
    first = next(iter([*causes, *failures]), None)
    told = _TOLD.search(first.how) if first else None
    if first and told and all(end.rank != int(told["rank"]) for end in ends):
        return first._replace(rank=int(told["rank"]), how=told["how"])
    if failed is None or any(end.rank == failed.rank for end in ends):
        return first
    # A worker whose error names the killed worker has failed because of it.
    is_certain = not failed.is_uncertain or not causes or re.search(rf"\brank {failed.rank}\b", causes[0].how)
    return None if is_certain else first


def failure(status: int, output: Output, first: worker_notes.End | None, has_joined: bool = False) -> Ended:
    """How a failed job has ended, with a message about the worker that failed first."""
    failed = output.failed
    if first is not None:
        failed = FailedWorker(first.rank, failed.host if failed and failed.rank == first.rank else "")
    names = {128 + number: f"signal {number:d} ({number.name})" for number in signal.Signals}
    how = names.get(status, f"status {status}")
    if failed is None:
        return Ended(status, f"the job ended with {how}.")
    where = f" on {failed.host}" if failed.host else ""
    if output.is_elastic:  # the ranks of new workers restart at 0
        return Ended(
            status,
            f"a worker{where} died, and the job ended with {how}. The others may still have finished: let the "
            "script record its success.",
        )
    lines = [] if output.shows_end_of(failed.rank) else output.last_lines(failed.rank)
    it = f"rank {failed.rank}{where}"
    if first is not None:
        ended = f"{it} ended with {first.how}{'' if first.how.endswith('.') else '.'} It"
    elif failed.left_others and not has_joined:
        ended = f"{it} ended with status 0 before the end of init(), which all workers must call. It"
    elif failed.left_others:
        ended = f"{it} ended with status 0 before the end of its script, for example by os._exit(0). It"
    else:
        ended = it
    return Ended(status, f"{ended} failed first, and the job ended with {how}.", tuple(lines))
