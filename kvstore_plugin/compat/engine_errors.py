"""Room for the errors of MXNet's engine, so that it need not look for more while many operations fail.

The engine notes the error of each operation in a vector, ThreadedEngine::global_exception_refs_, without a lock. The
core lets its operations fail one after another (csrc/mxnet/bridge.cpp). But operations of MXNet on their results end
meanwhile on threads of the engine, and look whether their error is in there: that is safe as long as the vector stays
where it is. A vector keeps its memory, also when waitall() empties it.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

from ..world import core as core_loader

# Those that make room stay in the vector, as null, until waitall() is called. Vectors double, from 1024 to 2048 here:
# there is room for 1023 more, and for 2048 after waitall().
_ERRORS = 1025

_made = False


def make_room(compat: ModuleType) -> None:
    """Let so many operations fail, once in a process; takes some milliseconds. Errors of others stay as they are."""
    global _made
    if _made:
        return
    core = core_loader.load()
    array = compat.mx.nd.zeros(1, ctx=compat.mx.cpu())
    for _ in range(_ERRORS):
        core.push_failing(array.handle.value)
        with contextlib.suppress(compat.MXNetError):
            array.wait_to_read()  # which takes the error out of what waitall() would raise
    _made = True
