"""An exception of a signal handler at a chosen line of the package, played by a trace function."""

from __future__ import annotations

import contextlib
import sys


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
