"""Tracks all processes of a launch by a token in their environment, so that they can be ended.

mpirun puts its ranks into process groups of their own and a killed mpirun orphans them, so neither the group nor the
tree of parents finds them all. The environment does: a token in it is inherited by every descendant, and Linux shows
it in /proc/<pid>/environ.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Iterable

import pytest

_TOKEN_VARIABLE = "MYKV_TEST_LAUNCH"
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_TERM_GRACE = 3.0  # seconds that mpirun gets to end its ranks before they are killed one by one


class Launch:
    """A started command with all of its descendants.

    Parameters
    ----------
    arguments : list of str
        The command line.
    env : dict
        The whole environment.
    stdout, stderr : file or descriptor, optional
        As for `subprocess.Popen`.
    cwd : str, optional
    """

    def __init__(self, arguments: list[str], env: dict[str, str], stdout=None, stderr=None, cwd=None) -> None:
        self.token = uuid.uuid4().hex
        libc = ctypes.CDLL(None)

        def die_with_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        self.process = subprocess.Popen(
            arguments,
            env={**env, _TOKEN_VARIABLE: self.token},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def members(self) -> list[int]:
        """Ids of all running processes of this launch, including the first command."""
        return _with_variable(f"{_TOKEN_VARIABLE}={self.token}".encode())

    def kill(self) -> None:
        """End every process of this launch; returns when none is left."""
        if self.process.poll() is None:
            self.process.terminate()
        deadline = time.monotonic() + _TERM_GRACE
        while self.members() and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.05)
        while True:
            left = self.members()
            for pid in left:
                send_signal(pid, signal.SIGKILL)
            if not left:
                break
            time.sleep(0.05)
        self.process.wait()


def shared_memory() -> int:
    """Bytes of shared memory that this process has touched."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssShmem"))


def send_signal(pid: int, number: int) -> None:
    """`os.kill` that ignores ended processes."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def is_alive(pid: int) -> bool:
    """Whether a process runs: it has not ended, even if its parent has not waited for it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def descendants(pid: int) -> list[int]:
    """Ids of a process's children, and of theirs."""
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [one for child in children for one in (child, *descendants(child))]


def wait_until_ended(pids: Iterable[int], timeout: float = 20.0) -> None:
    """Wait until no process runs; fail the test after `timeout` seconds."""
    deadline, left = time.monotonic() + timeout, list(pids)
    while left := [pid for pid in left if is_alive(pid)]:
        if time.monotonic() > deadline:
            pytest.fail(f"the processes {left} still run after {timeout:.0f} s")
        time.sleep(0.1)


def _with_variable(assignment: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The environ of a zombie is empty, so what has ended and only waits for its parent is not counted.
                if assignment in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
