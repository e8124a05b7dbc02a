"""Code blocks that Ctrl-C and other signals do not interrupt.

Python runs signal handlers between any two lines of the main thread, and many of them raise: KeyboardInterrupt, or an
exception of the user after SIGTERM. If an exception interrupted code between the start of an operation and the use of
its result, or between the starts of two operations that belong together, this rank's values would differ from those of
the other ranks.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Any, Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Context manager that delays Python's signal handlers until its end. A no-op outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():  # no handler runs in this thread
        yield
        return
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    waiting: dict[int, Any] = {}  # frames by the number of the signal, in the order of arrival

    def note(number: int, frame: Any) -> None:
        waiting[number] = frame

    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        with contextlib.ExitStack() as calls:  # calls all handlers, even if one raises
            for number, frame in reversed(list(waiting.items())):
                calls.callback(handlers[number], number, frame)
