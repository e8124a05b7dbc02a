"""An exception of a signal handler at a chosen line of the package, played by a trace function."""

from __future__ import annotations

import contextlib
import signal
import sys

import pytest


class Interrupt(Exception):
    """Raised in place of a line."""


@contextlib.contextmanager
def raising_at(number, folders):
    """Raise at line `number`, counted from 0, of those that run in files below the folders; yields whether it did."""
    lines, raised = 0, []

    def trace(frame, event, argument):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(folders):
            return None
        if event == "line" and not raised:
            lines += 1
            if lines > number:
                raised.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                raise Interrupt("in a signal handler")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield raised
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def interrupted_after(seconds, error):
    """Expect that a signal handler interrupts the block after some seconds with an exception of this class."""

    def handle(*_):
        raise error("in a signal handler")

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(error):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
