"""The one place that reads environment variables of the package, so that this table is complete.

=====================  =========  ===============================================================================
variable               default    meaning
=====================  =========  ===============================================================================
MYKV_PART_BYTES        524288     arrays larger than this (bytes) travel in parts of this size
MYKV_STAGING_BYTES     4194304    memory (bytes) for parts under way, per rank
MYKV_VIRTUAL_HOSTS     1          treat the ranks of one host as this many hosts that share no memory (for tests)
MYKV_EXIT_WAIT_S       5          how long (seconds) a rank that exits waits for its own unfinished operations
=====================  =========  ===============================================================================

MYKV_PART_BYTES and MYKV_VIRTUAL_HOSTS must be the same on all ranks, which is checked. Variables of launchers
(``OMPI_COMM_WORLD_SIZE`` and the like) are not settings; launch.py reads them.
"""

from __future__ import annotations

import os

# Variable -> (name of the option in mykv_core.init, smallest value that makes sense).
_CORE_OPTIONS = {
    "MYKV_PART_BYTES": ("part_bytes", 4096),
    "MYKV_STAGING_BYTES": ("staging_bytes", 4096),
    "MYKV_VIRTUAL_HOSTS": ("virtual_hosts", 1),
}


def core_options() -> dict[str, int]:
    """Options for ``mykv_core.init``: those that the environment sets, the others keep the core's defaults.

    Raises
    ------
    ValueError
        A variable holds something else than a whole number of at least its smallest value.
    """
    options = {}
    for variable, (option, smallest) in _CORE_OPTIONS.items():
        text = os.environ.get(variable)
        if text is not None:
            options[option] = _whole_number(variable, text, smallest)
    return options


def exit_wait_seconds() -> float:
    """Seconds that a rank which exits waits for its own unfinished operations before it leaves the others."""
    return float(_whole_number("MYKV_EXIT_WAIT_S", os.environ.get("MYKV_EXIT_WAIT_S", "5"), 0))


def _whole_number(variable: str, text: str, smallest: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < smallest:
        raise ValueError(f"{variable} must be a whole number of at least {smallest}, but it is {text!r}.")
    return value
