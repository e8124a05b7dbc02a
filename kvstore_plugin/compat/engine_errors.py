"""Reserves capacity in the error vector of MXNet's engine, so that it is not reallocated while many operations fail.

The engine notes the error of each operation in a vector, ThreadedEngine::global_exception_refs_, without a lock. The
core serializes the failures of its own operations (csrc/mxnet/bridge.cpp). But at the same time the engine's threads
finish MXNet's operations that read failed results, and search the vector for the errors: this is safe only if the
vector is not reallocated. A vector keeps its memory, even when waitall() empties it.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

from ..world import core as core_loader

# This number of errors makes the vector double its capacity from 1024 to 2048. These errors stay in the vector, as null
# pointers, until waitall() is called. So 1023 more errors fit before waitall(), and 2048 after waitall().
_ERRORS = 1025

_made = False


def make_room(compat: ModuleType) -> None:
    """Make _ERRORS operations fail, once per process; takes a few milliseconds. Other errors are not affected."""
    global _made
    if _made:
        return
    core = core_loader.load()
    array = compat.mx.nd.zeros(1, ctx=compat.mx.cpu())
    for _ in range(_ERRORS):
        core.push_failing(array.handle.value, "an error that makes room for others")
        with contextlib.suppress(compat.MXNetError):
            array.wait_to_read()  # so waitall() does not raise the error
    _made = True
