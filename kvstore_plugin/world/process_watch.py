"""Processes of this machine, followed by pidfds, which the kernel makes readable when a process ends."""

from __future__ import annotations

import ctypes
import errno
import os
import select
from pathlib import Path
from typing import Sequence, Tuple

_SYS_PIDFD_OPEN = 434  # the same on all architectures; for Python 3.8, and builds without os.pidfd_open

Identity = Tuple[Tuple[str, str], int]  # identifies a process by its machine and its pid


def this_process() -> Identity:
    """The identity of this process. Its first item is the same for all processes of this machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return (boot, os.readlink("/proc/self/ns/pid")), os.getpid()
    except OSError:
        return ("", str(os.getpid())), os.getpid()


def pidfd(pid: int) -> int:
    """A descriptor that is readable when the process ends.

    Raises
    ------
    OSError
        There is no such process; or the kernel, or a container, has no pidfds.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    descriptor = int(ctypes.CDLL(None, use_errno=True).syscall(_SYS_PIDFD_OPEN, pid, 0))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


class Followed:
    """Follows the processes of a list that run on this machine, except this process.

    Parameters
    ----------
    processes : sequence of Identity
        In the order of their ranks.
    """

    def __init__(self, processes: Sequence[Identity]) -> None:
        here = this_process()
        self._poll = select.poll()
        self._wake, self._waken = os.pipe()
        self._poll.register(self._wake, select.POLLIN)
        self._ranks: dict[int, int] = {}  # by file descriptor
        self._gone: list[int] = []  # ranks that had ended before they could be followed
        for rank, (machine, pid) in enumerate(processes):
            if machine == here[0] and pid != here[1]:
                self._follow(rank, pid)

    def _follow(self, rank: int, pid: int) -> None:
        try:
            descriptor = pidfd(pid)
        except OSError as error:
            if error.errno in (errno.ESRCH, errno.EINVAL):  # EINVAL: only a process group still has the number
                self._gone.append(rank)
            return  # without pidfds only MPI can notice the end of the process
        self._ranks[descriptor] = rank
        self._poll.register(descriptor, select.POLLIN)

    def ended(self, milliseconds: int | None) -> list[int]:
        """Ranks that have ended, each returned once; waits up to `milliseconds` for an end, or until wake()."""
        gone, self._gone = self._gone, []
        ready = [one for one in self._poll.poll(0 if gone else milliseconds) if one[0] in self._ranks]
        for descriptor, _ in ready:
            self._poll.unregister(descriptor)
        # Without POLLIN: other code has closed the descriptor, and the process has not ended.
        return gone + [self._ranks[descriptor] for descriptor, event in ready if event & select.POLLIN]

    def wake(self) -> None:
        """Make ended() return at once from now on, even if no process has ended."""
        os.write(self._waken, b"x")

    def close(self) -> None:
        """Stop following. No thread may be in ended()."""
        for descriptor in (self._wake, self._waken, *self._ranks):
            os.close(descriptor)
