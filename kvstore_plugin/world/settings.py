"""The settings. No other Python file reads environment variables of the package.

====================== =========  ===============================================================================
variable               default    meaning
====================== =========  ===============================================================================
MYKV_PART_BYTES        524288     arrays larger than this (bytes) are sent in parts of this size
MYKV_STAGING_BYTES     4194304    memory (bytes) for parts under way, per rank
MYKV_NETWORK_BYTES     4194304    memory (bytes) for data from other hosts, per rank
MYKV_FAN_OUT           16         hosts that each host hears from while they agree on what is ready
MYKV_EXCHANGE          auto       how large values cross between hosts: direct, grid; auto: grid from 65 hosts
MYKV_COMPRESS_BYTES    65536      arrays of fewer bytes are not compressed between hosts
MYKV_TABLE_PLACES      65536      operations under way on a host; more wait in their own rank
MYKV_VIRTUAL_HOSTS     1          treat the ranks of one host as this many hosts that share no memory (for tests)
MYKV_EXIT_WAIT_S       5          how long (seconds) a rank that exits waits for its own operations, twice at most
MYKV_RESPAWN_WAIT_S    120        how long (seconds) workers wait for the replacement of a dead one
MYKV_STALL_WARN_S      60         operations that wait this long (seconds) for other ranks are logged; 0: never
MYKV_STALL_ABORT_S     1800       operations that wait this long (seconds) fail on all ranks; 0: never
MYKV_CHECKPOINT_WAIT_S 60         how long (seconds) workers wait for others that do not save or load with them
MYKV_GPU               auto       arrays on GPUs: nccl, host (memory), or auto: NCCL if all ranks can use it
MYKV_GPU_HOSTS         nccl       NCCL uses its own network between hosts; the only value
MYKV_KERNELS           best       sums use the best instructions here (best), or avx512, avx2 or generic (for tests)
MYKV_TIMELINE                     file in which rank 0 records a timeline from init() on; {rank}: every rank
MYKV_REPORT            0          1: rank 0 prints the statistics at the end; more: also at intervals of this length
MYKV_RESTART           0          number of restarts of this job by mykvrun --max-restarts; mykvrun sets it
MYKV_VERBOSE           0          1: mykvrun shows all that workers and the launcher write to stderr
MYKV_AUTO_REGISTER     1          0: the store 'mykv' is known to MXNet only after import kvstore_plugin
MYKV_CUDA_LIBRARY                 file of the CUDA runtime, instead of the one found
MYKV_NCCL_LIBRARY                 file of NCCL, instead of the one found
====================== =========  ===============================================================================

init() reads all settings by read(), and they keep their values until init() is called again. So a wrong value makes
init() fail on all ranks, not a training job after hours.

All ranks must have the same values of MYKV_PART_BYTES, MYKV_NETWORK_BYTES, MYKV_FAN_OUT, MYKV_EXCHANGE and
MYKV_COMPRESS_BYTES, MYKV_VIRTUAL_HOSTS, MYKV_STALL_ABORT_S and MYKV_GPU, which is checked. Variables of launchers
(``OMPI_COMM_WORLD_SIZE`` and the like) are not settings; launch_checks.py reads them.
"""

from __future__ import annotations

import difflib
import math
import os
from typing import Any, Callable, NamedTuple

_MOST_BYTES = 2**60  # far below 2**63, since the core adds and doubles such numbers in 64 bits
_MOST_COUNT = 2**31 - 1
_MOST_SECONDS = 10**9  # 30 years; the core counts nanoseconds in 64 bits


class _Setting(NamedTuple):
    """A variable's parser, its default, and its name in the core."""

    parse: Callable[[str, str], Any]
    default: Any = None
    option: str | None = None


def _whole(smallest: int, largest: int) -> Callable[[str, str], int]:
    """A parser of whole numbers in a range."""

    def parse(variable: str, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not smallest <= value <= largest:
            limit = "" if value is None else _limit(value, largest)
            raise ValueError(f"{variable} must be a whole number of at least {smallest}{limit}, but it is {text!r}.")
        return value

    return parse


def _one_of(*words: str) -> Callable[[str, str], str]:
    """A parser of words."""

    def parse(variable: str, text: str) -> str:
        if text not in words:
            raise ValueError(f"{variable} must be one of {', '.join(words)}, but it is {text!r}.")
        return text

    return parse


def _gpu_hosts(variable: str, text: str) -> str:
    if text == "arena":
        raise ValueError(
            f"{variable}=arena is no longer supported. Use the default, nccl, for NCCL's own network between hosts, or "
            "MYKV_GPU=host for host memory and MPI."
        )
    return _one_of("nccl")(variable, text)


def _number(text: str) -> float:
    """The number in a text; NaN if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _seconds(variable: str, text: str) -> float:
    value = _number(text)
    if not 0 <= value <= _MOST_SECONDS:
        limit = _limit(value, _MOST_SECONDS)
        raise ValueError(f"{variable} must be a number of seconds of at least 0{limit}, but it is {text!r}.")
    return value


def _report(variable: str, text: str) -> float:
    value = _number(text)
    if value != 0 and not 1 <= value <= _MOST_SECONDS:
        limit = _limit(value, _MOST_SECONDS)
        raise ValueError(
            f"{variable} must be 0 (no table), 1 (a table at the end) or a number of seconds above 1{limit} (a table "
            f"at this interval too), but it is {text!r}."
        )
    return value


def _file(variable: str, text: str) -> str:
    return text  # checked by gpu_libraries.py and timeline.py


def _limit(value: float, largest: int) -> str:
    """The part of a message about the largest value, if a larger value was given."""
    return f" and at most {largest}" if value > largest else ""


_TABLE = {
    "MYKV_PART_BYTES": _Setting(_whole(4096, _MOST_BYTES), option="part_bytes"),
    "MYKV_STAGING_BYTES": _Setting(_whole(4096, _MOST_BYTES), option="staging_bytes"),
    "MYKV_NETWORK_BYTES": _Setting(_whole(4096, _MOST_BYTES), option="network_bytes"),
    "MYKV_FAN_OUT": _Setting(_whole(1, _MOST_COUNT), option="fan_out"),
    "MYKV_EXCHANGE": _Setting(_one_of("auto", "direct", "grid"), option="exchange"),
    "MYKV_COMPRESS_BYTES": _Setting(_whole(0, _MOST_BYTES), option="compress_bytes"),
    "MYKV_TABLE_PLACES": _Setting(_whole(1, _MOST_COUNT), option="table_capacity"),
    "MYKV_VIRTUAL_HOSTS": _Setting(_whole(1, _MOST_COUNT), option="virtual_hosts"),
    "MYKV_GPU": _Setting(_one_of("auto", "nccl", "host"), option="gpu"),
    "MYKV_GPU_HOSTS": _Setting(_gpu_hosts),
    "MYKV_EXIT_WAIT_S": _Setting(_seconds, 5.0),
    "MYKV_RESPAWN_WAIT_S": _Setting(_seconds, 120.0),
    "MYKV_STALL_WARN_S": _Setting(_seconds, 60.0),
    "MYKV_STALL_ABORT_S": _Setting(_seconds, 1800.0),
    "MYKV_CHECKPOINT_WAIT_S": _Setting(_seconds, 60.0),
    "MYKV_KERNELS": _Setting(_one_of("best", "avx512", "avx2", "generic"), "best"),
    "MYKV_TIMELINE": _Setting(_file, ""),
    "MYKV_REPORT": _Setting(_report, 0.0),
    "MYKV_RESTART": _Setting(_whole(0, _MOST_COUNT), 0),
    "MYKV_VERBOSE": _Setting(_one_of("1", "0"), "0"),  # mykvrun/main.py reads it
    "MYKV_AUTO_REGISTER": _Setting(_one_of("1", "0"), "1"),  # mykvrun/auto_register.py reads it when Python starts
    "MYKV_CUDA_LIBRARY": _Setting(_file, ""),
    "MYKV_NCCL_LIBRARY": _Setting(_file, ""),
}

_read: dict[str, Any] = {}  # values of the last read(); None for a setting that has the core's default


def read() -> None:
    """Read all variables; the values are kept from now on.

    Raises
    ------
    ValueError
        A variable has a wrong value; the message names the variable, its value and what is allowed.
    """
    values = {variable: _parsed(variable) for variable in _TABLE}
    _read.update(values)


def _parsed(variable: str) -> Any:
    setting, text = _TABLE[variable], os.environ.get(variable)
    return setting.default if text is None else setting.parse(variable, text)


def value(variable: str) -> Any:
    """The value of a setting from the last read().

    Raises
    ------
    ValueError
        Before read(): the variable has a wrong value.
    """
    return _read[variable] if variable in _read else _parsed(variable)


def misspelled() -> list[tuple[str, str]]:
    """Variables that are set but unknown, each with the setting that it resembles."""
    found = []
    for variable in sorted(os.environ):
        if variable.startswith("MYKV_") and variable not in _TABLE:
            found += [(variable, nearest) for nearest in difflib.get_close_matches(variable, _TABLE, 1, 0.8)]
    return found


def core_options() -> dict[str, int | str]:
    """Options for ``kvstore_plugin._core.init`` that the environment sets; others keep the core's defaults.

    Raises
    ------
    ValueError
        Before read(): a variable has a wrong value.
    """
    options = {setting.option: value(variable) for variable, setting in _TABLE.items() if setting.option}
    return {option: value for option, value in options.items() if value is not None}
