"""The one place that reads environment variables of the package, so that this table is complete.

====================== =========  ===============================================================================
variable               default    meaning
====================== =========  ===============================================================================
MYKV_PART_BYTES        524288     arrays larger than this (bytes) travel in parts of this size
MYKV_STAGING_BYTES     4194304    memory (bytes) for parts under way, per rank
MYKV_NETWORK_BYTES     4194304    memory (bytes) for what other hosts send, per rank
MYKV_COMPRESS_BYTES    65536      arrays of fewer bytes are not compressed between hosts
MYKV_TABLE_PLACES      65536      operations under way on a host; more wait in their own rank
MYKV_VIRTUAL_HOSTS     1          treat the ranks of one host as this many hosts that share no memory (for tests)
MYKV_EXIT_WAIT_S       5          how long (seconds) a rank that exits waits for its own operations, twice at most
MYKV_STALL_WARN_S      60         operations that wait so long (seconds) for other ranks are logged; 0: never
MYKV_STALL_ABORT_S     0          operations that wait so long (seconds) fail on all ranks; 0: never
MYKV_CHECKPOINT_WAIT_S 60         how long (seconds) workers wait for others that do not save or load with them
MYKV_GPU               auto       arrays on GPUs go by nccl, by host (memory), or auto: by NCCL where it serves all
MYKV_GPU_HOSTS         nccl       between hosts they go by NCCL's own network, or by arena: through host memory and MPI
MYKV_KERNELS           best       sums use the best instructions here (best), or avx512, avx2 or generic (for tests)
MYKV_CUDA_LIBRARY                 file of the CUDA runtime, in place of what is found
MYKV_NCCL_LIBRARY                 file of NCCL, in place of what is found
====================== =========  ===============================================================================

MYKV_PART_BYTES, MYKV_NETWORK_BYTES, MYKV_COMPRESS_BYTES, MYKV_VIRTUAL_HOSTS, MYKV_GPU and MYKV_GPU_HOSTS must be the
same on all ranks, which is checked. Variables of launchers (``OMPI_COMM_WORLD_SIZE`` and the like) are not settings;
launch.py reads them.
"""

from __future__ import annotations

import difflib
import math
import os
from typing import NamedTuple

_MOST_BYTES = 2**60  # far below what the core's 64 bits hold, since it adds and doubles
_MOST_COUNT = 2**31 - 1
_MOST_SECONDS = 10**9  # 30 years; the core counts nanoseconds in 64 bits

# Variable -> (name of the option in mykv_core.init, smallest and largest value that make sense).
_CORE_OPTIONS = {
    "MYKV_PART_BYTES": ("part_bytes", 4096, _MOST_BYTES),
    "MYKV_STAGING_BYTES": ("staging_bytes", 4096, _MOST_BYTES),
    "MYKV_NETWORK_BYTES": ("network_bytes", 4096, _MOST_BYTES),
    "MYKV_COMPRESS_BYTES": ("compress_bytes", 0, _MOST_BYTES),
    "MYKV_TABLE_PLACES": ("table_places", 1, _MOST_COUNT),
    "MYKV_VIRTUAL_HOSTS": ("virtual_hosts", 1, _MOST_COUNT),
}


# Variable -> (name of the option, what it may be).
_GPU_OPTIONS = {
    "MYKV_GPU": ("gpu", ("auto", "nccl", "host")),
    "MYKV_GPU_HOSTS": ("gpu_hosts", ("nccl", "arena")),
}

_KERNELS = ("best", "avx512", "avx2", "generic")

_OTHERS = (
    "MYKV_EXIT_WAIT_S",
    "MYKV_STALL_WARN_S",
    "MYKV_STALL_ABORT_S",
    "MYKV_CHECKPOINT_WAIT_S",
    "MYKV_KERNELS",
    "MYKV_CUDA_LIBRARY",
    "MYKV_NCCL_LIBRARY",
)


def misspelled() -> list[tuple[str, str]]:
    """Variables that are set and mean nothing, each with the one that it looks like."""
    known = [*_CORE_OPTIONS, *_GPU_OPTIONS, *_OTHERS]
    found = []
    for variable in sorted(os.environ):
        if variable.startswith("MYKV_") and variable not in known:
            found += [(variable, nearest) for nearest in difflib.get_close_matches(variable, known, 1, 0.8)]
    return found


def core_options() -> dict[str, int | str]:
    """Options for ``mykv_core.init``: those that the environment sets, the others keep the core's defaults.

    Raises
    ------
    ValueError
        A variable holds something else than a whole number from its smallest to its largest value, or than one of its
        words.
    """
    options: dict[str, int | str] = {}
    for variable, (option, smallest, largest) in _CORE_OPTIONS.items():
        text = os.environ.get(variable)
        if text is not None:
            options[option] = _whole_number(variable, text, smallest, largest)
    for variable, (option, words) in _GPU_OPTIONS.items():
        text = os.environ.get(variable)
        if text is not None:
            options[option] = _word(variable, text, words)
    return options


def kernels() -> str:
    """Name of the instruction set that the core's kernels shall use, or 'best'.

    Raises
    ------
    ValueError
        The variable holds another word.
    """
    return _word("MYKV_KERNELS", os.environ.get("MYKV_KERNELS", "best"), _KERNELS)


class GpuLibraries(NamedTuple):
    """Files that take the place of what would be found; '' for none."""

    cuda: str
    nccl: str


def gpu_libraries() -> GpuLibraries:
    """Where the environment says that the CUDA runtime and NCCL are."""
    return GpuLibraries(os.environ.get("MYKV_CUDA_LIBRARY", ""), os.environ.get("MYKV_NCCL_LIBRARY", ""))


def exit_wait_seconds() -> float:
    """Seconds that a rank which exits waits for its own unfinished operations before it leaves the others."""
    return float(_whole_number("MYKV_EXIT_WAIT_S", os.environ.get("MYKV_EXIT_WAIT_S", "5"), 0, _MOST_SECONDS))


class StallLimits(NamedTuple):
    """How long (seconds) operations may wait for other ranks; 0: for ever."""

    warn: float
    abort: float


def stall_limits() -> StallLimits:
    """When operations that wait are logged, and when they fail.

    Raises
    ------
    ValueError
        A variable holds no number of at least 0.
    """
    return StallLimits(_seconds("MYKV_STALL_WARN_S", 60), _seconds("MYKV_STALL_ABORT_S", 0))


def checkpoint_wait_seconds() -> float:
    """Seconds that a worker waits for the others to come to a call that saves or loads optimizer states."""
    return _seconds("MYKV_CHECKPOINT_WAIT_S", 60)


def _word(variable: str, text: str, words: tuple[str, ...]) -> str:
    if text not in words:
        raise ValueError(f"{variable} must be one of {', '.join(words)}, but it is {text!r}.")
    return text


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST_SECONDS:
        raise ValueError(f"{variable} must be a number of seconds of at least 0{_limit(value)}, but it is {text!r}.")
    return value


def _limit(value: float, largest: int = _MOST_SECONDS) -> str:
    """What a message says of the largest value, where that is the reason."""
    return f" and at most {largest}" if value > largest else ""


def _whole_number(variable: str, text: str, smallest: int, largest: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not smallest <= value <= largest:
        limit = "" if value is None else _limit(value, largest)
        raise ValueError(f"{variable} must be a whole number of at least {smallest}{limit}, but it is {text!r}.")
    return value
