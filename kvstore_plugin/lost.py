"""WorkersLost: what operations end with where a worker has died and the others can go on (docs/elastic.md)."""

from __future__ import annotations

from typing import Any

from . import liveness
from .mxnet_compat import MXNetError, mx


class WorkersLost(MXNetError):
    """A worker's process has ended, and what needed it has failed on all others: `run_elastic` goes on without it."""


# The core's errors reach Python through MXNet's engine as texts that begin with this name.
mx.base.register_error(WorkersLost)


def check() -> None:
    """Raise a WorkersLost if a worker was lost."""
    sentence = liveness.lost()
    if sentence:
        raise WorkersLost(f"{sentence}.")


def any_failure(error: BaseException) -> Any:
    """A WorkersLost in place of an error of the core or of MXNet where a worker was lost; otherwise the error."""
    sentence = liveness.lost()
    return WorkersLost(f"{error} ({sentence})") if sentence and not isinstance(error, WorkersLost) else error
