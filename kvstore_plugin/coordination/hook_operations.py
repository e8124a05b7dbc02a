"""The names of the operations that a communication hook starts.

A hook runs once for each bucket of gradients in a step. The name of its operation number k consists of the bucket's
name and k, and the operation has the same turn as the bucket in this step. So a rank whose hook fails can refuse the
operations that it has not started, and no rank can match these operations with operations of another step.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterator

_local = threading.local()


class HookOperations:
    """The operations of one run of a hook.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that reduce the bucket.
    bucket : str
        The name whose last turn the operations take.
    expected : int or None
        The number of operations that the other ranks expect. None: the other ranks wait until this rank tells them.
    agree_on_more : callable
        Called without arguments before the hook starts more operations than expected; raises an error unless the hook
        does so on all ranks.
    """

    def __init__(self, process_set: Any, bucket: str, expected: int | None, agree_on_more: Callable[[], None]) -> None:
        self.process_set = process_set
        self.bucket = bucket
        self.expected = expected
        self.by_hook = 0  # number of operations that the hook has started
        self.started = 0  # number of operations that the hook has started or this rank has refused
        self._agree_on_more = agree_on_more

    def next_of_hook(self) -> str:
        """The name of the operation that the hook is starting.

        Raises
        ------
        MXNetError
            The hook starts more operations than expected, and not on all ranks.
        """
        if self.started == self.expected:
            self._agree_on_more()
            self.expected = None
        self.by_hook += 1
        return self.next_name()

    def next_name(self) -> str:
        """The name of the next operation."""
        name = name_of(self.bucket, self.started)
        self.started += 1
        return name

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager in which this thread runs the hook."""
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
