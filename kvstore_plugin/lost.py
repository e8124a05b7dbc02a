"""WorkersLost: what operations end with where a worker has died and the others can go on (docs/elastic.md)."""

from __future__ import annotations

from .mxnet_compat import MXNetError, mx


class WorkersLost(MXNetError):
    """A worker's process has ended, and what needed it has failed on all others: `run_elastic` goes on without it."""


# The core's errors reach Python through MXNet's engine as texts that begin with this name.
mx.base.register_error(WorkersLost)
