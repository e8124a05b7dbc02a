"""One mpirun of a target's workers: started with all output in a file, ended within a limit, nothing left of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

from harness import launcher
from harness.processes import Launch, send_signal

_TAIL = 3000  # characters of output that a failure shows


@dataclasses.dataclass
class Ended:
    """A job that is over: exit code, all output, seconds that it took, and whether it had to be killed."""

    code: int
    text: str
    seconds: float
    hung: bool

    @property
    def tail(self) -> str:
        """The end of the output."""
        return self.text[-_TAIL:]


class Job:
    """Workers under one mpirun.

    Parameters
    ----------
    ranks : int
    module : str
        The workers' module, as for ``python -m``.
    *arguments
        Of the module.
    hosts : int, optional
        MYKV_VIRTUAL_HOSTS.
    env : dict, optional
        More variables.
    options : tuple of str, optional
        Of mpirun.
    has_folder : bool, optional
        Whether temporary files, the MPI's among them, lie in `directory`; else where the variables say, as a user's.
    command : callable, optional
        Makes the command line that starts the workers from that of one; by default an mpirun on this machine.

    Attributes
    ----------
    directory : Path
        A folder that is removed with the job.
    """

    def __init__(
        self,
        ranks: int,
        module: str,
        *arguments: object,
        hosts: int = 1,
        env: dict | None = None,
        options: tuple[str, ...] = (),
        has_folder: bool = True,
        command: Callable[[list[str]], list[str]] | None = None,
    ) -> None:
        self.ranks = ranks
        self.directory = Path(tempfile.mkdtemp(prefix="mykv-torture-"))
        program = [sys.executable, "-m", module, *map(str, arguments)]
        folder = {"TMPDIR": str(self.directory)} if has_folder else {}
        own = {"MYKV_VIRTUAL_HOSTS": str(hosts), **folder, **(env or {})}
        self._output = (self.directory / "output").open("wb")
        self._begin = time.monotonic()
        line = command(program) if command else launcher.command(ranks, program, options)
        variables = launcher.environment(self.directory if has_folder else None, own)
        self.launch = Launch(line, variables, self._output, subprocess.STDOUT, str(self.directory))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.launch.kill()
        self._output.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def text(self) -> str:
        """The job's output so far."""
        return (self.directory / "output").read_text(errors="replace")

    def ended(self) -> bool:
        """Whether mpirun has ended."""
        return self.launch.process.poll() is not None

    def until(self, text: str, seconds: float) -> bool:
        """Wait for a text in the output; False if the job or the time ends without it."""
        deadline = time.monotonic() + seconds
        while text not in self.text():
            if self.ended() or time.monotonic() > deadline:
                return text in self.text()
            time.sleep(0.02)
        return True

    def pids(self) -> dict[int, int]:
        """Process ids by rank, from the ranks' `say_pid`."""
        return {int(rank): int(pid) for rank, pid in re.findall(r"pid of (\d+): (\d+)", self.text())}

    def wait(self, seconds: float) -> Ended:
        """Wait for the end; processes that take longer show their stacks and are killed."""
        hung = False
        try:
            self.launch.process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            hung = True
            for pid in self.launch.members():
                if pid != self.launch.process.pid and "python" in _command_of(pid):
                    send_signal(pid, signal.SIGCONT)
                    send_signal(pid, signal.SIGUSR1)
            time.sleep(1.0)
            self.launch.kill()
        return Ended(self.launch.process.returncode, self.text(), time.monotonic() - self._begin, hung)

    def shared_files(self) -> set[str]:
        """Files of /dev/shm that processes of the job have mapped or open."""
        found = set()
        for pid in self.launch.members():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                found.update(re.findall(r"(/dev/shm/\S+)", maps))
        return found


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def say_pid(rank: int) -> None:
    """Tell the job, from a worker, which process this is."""
    say(f"pid of {rank}: {os.getpid()}")


def say(text: str) -> None:
    """Write a line that those of other ranks cannot cut."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
