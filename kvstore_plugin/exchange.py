"""Calls that wait: all ranks of a process set meet in them, show each other what they ask for, and go on if it fits.

Each of them takes the next number of its process set, whatever it does, so that ranks that wait in different calls meet
and find out: all get an error that names both. Names could not do that, since every rank would wait under its own.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from . import process
from .mxnet_compat import MXNetError


def together(process_set: Any, label: str, numbers: Sequence[int]) -> np.ndarray:
    """Show the other ranks some numbers, and wait until all have done so.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that meet; this one is a member.
    label : str
        The call with what all ranks must agree on, for example ``"barrier"``.
    numbers : sequence of int
        Equally many on all ranks with this label, each of 64 bits.

    Returns
    -------
    ndarray of int64, shape (process_set.size(), len(numbers))
        Row r is what rank r of the set has passed.

    Raises
    ------
    MXNetError
        A rank is in another call, has refused, or is gone.
    """
    core = process_set.core
    rows = np.zeros((core.size(), len(numbers)), dtype=np.int64)
    rows[core.rank()] = numbers
    result = np.empty_like(rows)
    try:
        process.wait(core.submit_allreduce(_next_name(process_set), [rows], [result], label=label))
    except MXNetError:
        raise
    except RuntimeError as error:
        raise MXNetError(str(error)) from None
    return result


def refuse(process_set: Any, reason: str) -> None:
    """Take this rank's turn in a call that waits with a refusal: the other ranks' call fails with `reason`."""
    process_set.core.refuse(_next_name(process_set), reason)


def _next_name(process_set: Any) -> str:
    return f"{process_set.scope}/waiting/{process_set.next_number('waiting')}"
