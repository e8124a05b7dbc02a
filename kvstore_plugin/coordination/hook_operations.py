"""The names of the operations that a communication hook starts.

A hook runs once for each bucket of gradients in a step. Its operation number k has a name of the bucket and k, and the
turn that the bucket has in this step. So a rank whose hook fails can refuse the operations that it has not started, and
no rank can match them with operations of another step.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator

_local = threading.local()


class HookOperations:
    """The operations of one run of a hook.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that reduce the bucket.
    bucket : str
        The name whose last turn the operations take.
    """

    def __init__(self, process_set: Any, bucket: str) -> None:
        self.process_set = process_set
        self.bucket = bucket
        self.started = 0  # how many operations the hook has started, or refused

    def next_name(self) -> str:
        """The name of the hook's next operation."""
        name = name_of(self.bucket, self.started)
        self.started += 1
        return name

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which this thread runs the hook."""
        before, _local.running = running(), self
        try:
            yield
        finally:
            _local.running = before


def running() -> HookOperations | None:
    """The run of a hook that this thread is in; None outside of hooks."""
    return getattr(_local, "running", None)


def name_of(bucket: str, number: int) -> str:
    """The name of a hook's operation, counted from 0."""
    return f"{bucket}/hook/{number}"
