"""A block of code that Ctrl-C and other signals do not break off.

Python runs signal handlers between any two lines of the main thread, and many of them raise: KeyboardInterrupt, or an
exception of the user's own after SIGTERM. Where a rank has begun an operation, and has not yet used the result or
begun the operation that belongs to it, an exception would leave its values different from those of the other ranks.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Any, Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A context in which Python's signal handlers wait until its end. A no-op outside of the main thread."""
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
        with contextlib.ExitStack() as calls:  # all of them, even if one raises
            for number, frame in reversed(list(waiting.items())):
                calls.callback(handlers[number], number, frame)
