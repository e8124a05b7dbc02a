"""Tells the core which operations are the sums of a training step, for the statistics.

The core counts a step, and times how long the sums and the updates take, by these marks. Nothing else depends on them.
"""

from __future__ import annotations

import contextlib
from typing import Iterator

from ..world import process


@contextlib.contextmanager
def part(kind: str) -> Iterator[None]:
    """Mark the operations that this thread pushes within the context.

    Parameters
    ----------
    kind : str
        ``'last'``: the first operation reduces the gradients that backward writes last, and the others belong to the
        same step. ``'some'``: all of them belong to a step. ``'weights'``: they send updated weights.
    """
    mark = process.core.set_step_part
    mark(kind)
    try:
        yield
    finally:
        mark("")


def next_is_last() -> None:
    """Within `part`: the next operation reduces the gradients that backward writes last."""
    process.core.set_step_part("last")
