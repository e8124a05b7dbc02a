"""Small exchanges of whole numbers, by which the ranks find out whether they are about to do the same.

Operations are matched by name, so ranks with other sets of names would wait for each other for ever. These exchanges
block until all ranks have come to them; none happens in a step of ordinary training.
"""

from __future__ import annotations

import hashlib
from typing import Sequence

import numpy as np

from . import process


def extremes(name: str, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """For each number the smallest and the largest that a rank has passed.

    Parameters
    ----------
    name : str
        What the ranks are matched by.
    numbers : sequence of int
        Equally many on all ranks, each above -2**63 and below 2**63.

    Returns
    -------
    two ndarrays of int64, shape (len(numbers),)

    Raises
    ------
    mykv_core.Error
        A rank refused, has left, or does something else under this name.
    """
    mine = np.array([numbers, numbers], dtype=np.int64)
    mine[0] *= -1
    result = np.empty_like(mine)
    process.wait(process.core.submit_allreduce(name, [mine], [result], "max"))
    return -result[0], result[1]


def check_names(carrier: str, names: Sequence[str], what: str) -> None:
    """Raise an error on every rank unless all ranks pass the same names in the same order.

    Parameters
    ----------
    carrier : str
        The name that the exchange itself goes under.
    names : sequence of str
        The names to compare.
    what : str
        What the names are, for the error, for example ``'parameters of trainer0'``.

    Raises
    ------
    RuntimeError
        They differ; the sentence says how many there are here and elsewhere.
    mykv_core.Error
        As for `extremes`.
    """
    (lowest, few), (highest, many) = extremes(carrier, [_digest(names), len(names)])
    if lowest != highest:
        elsewhere = f"between {few} and {many}" if few != many else f"{many} too, but others,"
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise RuntimeError(
            f"The {what} are not the same on all ranks: rank {process.rank()} has {len(names)} ({shown}), "
            f"and the ranks have {elsewhere} of them."
        )


def is_same(carrier: str, texts: Sequence[str]) -> bool:
    """Whether all ranks pass the same texts.

    Parameters
    ----------
    carrier : str
        The name that the exchange itself goes under.
    texts : sequence of str
        What to compare.

    Raises
    ------
    mykv_core.Error
        As for `extremes`.
    """
    (lowest,), (highest,) = extremes(carrier, [_digest(texts)])
    return bool(lowest == highest)


def _digest(texts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\n".join(texts).encode(), digest_size=7).digest(), "big")
