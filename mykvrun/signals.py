"""Signals that end a job: mykvrun passes them to the launcher, and does not restart the job afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Iterator

from . import sinks
from .messages import is_terminal

# For each signal to mykvrun, the signal to the launcher. After SIGTERM and SIGHUP the launcher ends its workers.
# SIGQUIT would end only the launcher.
_SENT_AS = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGHUP,
    signal.SIGQUIT: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
}
_LOOK_S = 0.1


def end_with_caller(descriptor: int) -> None:
    """End the job by SIGTERM when the other end of a pipe is closed, for example because its process has ended."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(descriptor, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


class EndSignals:
    """Context manager that catches the signals of `_SENT_AS`.

    Attributes
    ----------
    received : int
        The first signal that has arrived; 0 if none has.
    """

    def __init__(self) -> None:
        self.received = 0
        self._launcher: subprocess.Popen[bytes] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> EndSignals:
        self._before = {number: signal.signal(number, self._take) for number in _SENT_AS}
        return self

    def __exit__(self, *_: object) -> None:
        sinks.is_ending = False
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def sent_to(self, launcher: subprocess.Popen[bytes]) -> Iterator[None]:
        """Pass the signals on to this launcher, including a signal that has arrived since the last launcher ended."""
        self._launcher = launcher
        if self.received:
            launcher.send_signal(signal.SIGTERM)
        try:
            yield
        finally:
            self._launcher = None

    def wait(self, seconds: float) -> None:
        """Wait for this time, or until a signal has arrived."""
        deadline = time.monotonic() + seconds
        while not self.received and time.monotonic() < deadline:
            time.sleep(min(_LOOK_S, seconds))

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number
        sinks.is_ending = True
        # Ctrl-C in a terminal reaches the launcher directly.
        if self._launcher is not None and not (number == signal.SIGINT and is_terminal(sys.stdin)):
            self._launcher.send_signal(_SENT_AS[signal.Signals(number)])
