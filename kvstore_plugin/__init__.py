"""mykv: synchronous data-parallel training of MXNet networks over shared memory and MPI.

Importing the package registers the store, ``mx.kv.create('mykv')``. It does not initialize MPI: the store,
`DistributedTrainer` and `broadcast_parameters` do that when they are first used, or init().

One logger, ``kvstore_plugin``, carries all messages.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from .compression import Compression
from .process import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from .process_set import ProcessSet, global_process_set

__all__ = [
    "Compression",
    "DistributedTrainer",
    "MyKV",
    "ProcessSet",
    "add_process_set",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
]

try:
    __version__ = metadata.version("mykv")
except metadata.PackageNotFoundError:  # imported from a source tree
    __version__ = "0+not.installed"


def _is_selftest() -> bool:
    """Whether this is ``python -m kvstore_plugin.selftest``, which reports what is missing and must not fail for it."""
    try:
        arguments = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    module = f"{__name__}.selftest"
    return f"-m{module}" in arguments or ("-m", module) in zip(arguments, arguments[1:])


try:
    from .kvstore import MyKV
    from .membership import add_process_set, remove_process_set
    from .parameters import broadcast_parameters
    from .trainer import DistributedTrainer
except ImportError:
    if not _is_selftest():
        raise
