"""Waits for MXNet's engine with a time limit.

MXNet has no wait with a limit, so a thread waits, and the caller continues after the limit. The thread is started
once per process, at the first init(), since Python 3.12 cannot start threads while it exits. One thread is enough:
waitall() waits for the whole engine, so a second waiter would not return earlier.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Callable

_Wait = Callable[[Callable[[], None]], None]


class _Waiter:
    """A thread that waits for MXNet's engine on request."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._wait: _Wait | None = None
        self._asked = self._done = 0
        self._forgotten = 0  # number of errors since the last call of ask()
        threading.Thread(target=self._run, name="kvstore_plugin-drain", daemon=True).start()

    def ask(self, wait: _Wait, seconds: float | None) -> int:
        with self._condition:
            self._wait = wait
            self._asked += 1
            mine = self._asked
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._done >= mine, seconds)
            forgotten, self._forgotten = self._forgotten, 0
            return forgotten

    def _count(self) -> None:
        with self._condition:
            self._forgotten += 1

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._asked > self._done)
                wait, asked = self._wait, self._asked
            with contextlib.suppress(Exception):  # if this thread ended, every later wait would last until its limit
                wait(self._count)
            with self._condition:
                self._done = asked
                self._condition.notify_all()


_waiter: _Waiter | None = None


def begin() -> None:
    """Start the thread."""
    global _waiter
    try:
        _waiter = _Waiter()
    except RuntimeError:  # init() is called while Python 3.12 exits
        _waiter = None


def wait(wait_for_all: _Wait, seconds: float | None) -> int:
    """Run a wait until its end, or for at most `seconds`; returns the number of errors that MXNet has dropped so far.

    Parameters
    ----------
    wait_for_all : callable
        Waits for the engine, and calls its argument once for each error that MXNet drops.
    seconds : float or None
        None for no limit.
    """
    if _waiter is not None:
        return _waiter.ask(wait_for_all, seconds)
    errors: list[None] = []
    wait_for_all(lambda: errors.append(None))
    return len(errors)
