"""WorkersLost: the error of operations after a worker has died, if the others can go on (docs/elastic.md)."""

from __future__ import annotations

from typing import Any

from ..world import failure_detector
from .mxnet import MXNetError, mx


class WorkersLost(MXNetError):
    """A worker's process has ended, and its operations have failed on all others: `run_elastic` goes on without it."""


# The core's errors reach Python through MXNet's engine as texts that begin with this name.
mx.base.register_error(WorkersLost)


def check() -> None:
    """Raise a WorkersLost if a worker was lost."""
    sentence = failure_detector.lost()
    if sentence:
        raise WorkersLost(f"{sentence}.")


def any_failure(error: BaseException) -> Any:
    """A WorkersLost in place of an error of the core or of MXNet if a worker was lost; otherwise the error."""
    sentence = failure_detector.lost()
    return WorkersLost(f"{error} ({sentence})") if sentence and not isinstance(error, WorkersLost) else error
