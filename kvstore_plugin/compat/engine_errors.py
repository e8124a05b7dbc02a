"""Capacity for the errors of MXNet's engine, so that its vector is not reallocated while many operations fail.

The engine notes the error of each operation in a vector, ThreadedEngine::global_exception_refs_, without a lock. The
core serializes failures of its operations (csrc/mxnet/bridge.cpp). But meanwhile operations of MXNet on their results
end on threads of the engine, and search the vector for their error: that is safe only if the vector is not reallocated.
A vector keeps its memory, even when waitall() empties it.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

from ..world import core as core_loader

# The filler errors stay in the vector, as null, until waitall() is called. The vector doubles its capacity from 1024 to
# 2048: room for 1023 more errors, and for 2048 after waitall().
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
