"""The fixture ``mpirun``: a small script in a fresh mpirun, for tests about exit, crash, Ctrl-C and launch errors."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Callable

import pytest

from . import launcher
from .processes import Launch, send_signal


@dataclasses.dataclass
class Result:
    """A finished mpirun: exit code (negative: ended by that signal), its outputs, and its duration in seconds."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def text(self) -> str:
        """Both outputs, for an assertion's message."""
        return f"exit code {self.code} after {self.seconds:.1f} s\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class Running:
    """A running mpirun; `MpiRun.start` makes one."""

    def __init__(self, arguments: list[str], env: dict[str, str], directory: Path, cwd: str | None) -> None:
        self._out = (directory / "stdout").open("wb")
        self._err = (directory / "stderr").open("wb")
        self._began = time.monotonic()
        self._launch = Launch(arguments, env, stdout=self._out, stderr=self._err, cwd=cwd)
        self.pid = self._launch.process.pid
        self.directory = directory  # outputs, and files of mpirun itself

    def members(self) -> list[int]:
        """Ids of the living processes of this launch: mpirun, its ranks, and what they started."""
        return self._launch.members()

    def send_signal(self, number: int) -> None:
        """Send a signal only to mpirun, as Ctrl-C in a shell does first."""
        send_signal(self.pid, number)

    def read(self) -> tuple[str, str]:
        """The output so far on stdout and stderr."""
        texts = []
        for file in (self._out, self._err):
            texts.append(Path(file.name).read_text(errors="replace"))
        return texts[0], texts[1]

    def wait_for(self, text: str, timeout: float = 60.0) -> None:
        """Wait until stdout holds `text`; fail the test when the time is over or the program ends without it."""
        deadline = time.monotonic() + timeout
        while text not in self.read()[0]:
            ended = self._launch.process.poll() is not None
            if time.monotonic() > deadline or (ended and text not in self.read()[0]):
                out, err = self.read()
                self.kill()
                pytest.fail(f"mpirun never printed {text!r}:\n--- stdout\n{out}\n--- stderr\n{err}")
            time.sleep(0.02)

    def wait(self, timeout: float = 60.0) -> Result:
        """Wait for the end; after `timeout` seconds from the start, fail the test with the stacks of all ranks."""
        try:
            code = self._launch.process.wait(max(0.0, self._began + timeout - time.monotonic()))
        except subprocess.TimeoutExpired:
            for pid in self.members():
                if pid != self.pid:
                    send_signal(pid, signal.SIGUSR1)
            time.sleep(0.5)  # for the stacks to arrive
            out, err = self.read()
            self.kill()
            pytest.fail(f"mpirun did not end within {timeout:.0f} s:\n--- stdout\n{out}\n--- stderr\n{err}")
        seconds = time.monotonic() - self._began
        return Result(code, *self.read(), seconds)

    def kill(self) -> None:
        """End every process of this launch."""
        self._launch.kill()

    def close(self) -> None:
        """Kill remaining processes and close the files."""
        self.kill()
        self._out.close()
        self._err.close()


class MpiRun:
    """Runs scripts under mpirun, and ends their processes with the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._all: list[Running] = []

    def __call__(self, ranks: int, script: str | Path, *arguments: str, timeout: float = 60.0, **options) -> Result:
        """Run `script` in `ranks` processes and wait for its end.

        Parameters
        ----------
        ranks : int
            Number of processes; 0 runs Python without mpirun.
        script : str or Path
            Source text (it is dedented), the path of a file, or ``'-m module'``.
        *arguments : str
            The script's own arguments.
        timeout : float
            In seconds; a run that takes longer fails the test with the outputs and the stacks of all ranks.
        **options
            As for `start`.

        Returns
        -------
        Result
        """
        return self.start(ranks, script, *arguments, **options).wait(timeout)

    def start(
        self,
        ranks: int,
        script: str | Path,
        *arguments: str,
        env: dict[str, str] | None = None,
        options: tuple[str, ...] = (),
        python: tuple[str, ...] = (),
        cwd: str | None = None,
        command: list[str] | Callable[[list[str]], list[str]] | None = None,
    ) -> Running:
        """Start without waiting; `options` are mpirun's, `python` the interpreter's, `command` replaces mpirun's line.

        `command` may also be a function that makes the whole line of the program's. A variable with the value None in
        `env` is removed.
        """
        directory = self._directory / f"run{len(self._all)}"
        directory.mkdir()
        if isinstance(script, str) and script.startswith("-m "):
            program = [sys.executable, *python, *script.split(), *arguments]
        else:
            if not isinstance(script, Path):
                text, script = script, directory / "script.py"
                script.write_text(textwrap.dedent(text))
            program = [sys.executable, *python, str(script), *arguments]
        if command is not None:
            program = command(program) if callable(command) else [*command, *program]
        elif ranks > 0:
            program = launcher.command(ranks, program, tuple(options))
        variables = launcher.environment(directory, {k: v for k, v in (env or {}).items() if v is not None})
        for name, value in (env or {}).items():
            if value is None:
                variables.pop(name, None)
        # An empty folder, so that python -m finds the installed package and not the source tree.
        running = Running(program, variables, directory, cwd or str(directory))
        self._all.append(running)
        return running

    def close(self) -> None:
        """End everything that was started."""
        for running in self._all:
            running.close()
