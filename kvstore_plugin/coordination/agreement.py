"""Small exchanges in which the ranks of a process set check that they agree.

Operations are matched by name, so ranks that use different names would deadlock. The exchanges block until all ranks
have called them (operation.py). An ordinary training step makes no exchange.
"""

from __future__ import annotations

import hashlib
from typing import Sequence

import numpy as np

from ..world import process
from ..world.process_set import ProcessSet
from . import operation

_MOST_SHOWN = 5  # maximum number of names in an error


def extremes(
    process_set: ProcessSet, name: str, numbers: Sequence[int], label: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """The minimum and the maximum of each number over the ranks.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that call this function.
    name : str
        The name by which the exchange is matched.
    numbers : sequence of int
        Of 64 bits; the same number of them on all ranks.
    label : str, optional
        A text that must be the same on all ranks; otherwise the error shows the labels of two ranks.

    Returns
    -------
    two ndarrays of int64, shape (len(numbers),)

    Raises
    ------
    MXNetError
        A rank has failed before the exchange, has left the job, waits in another call, or uses this name for another
        operation.
    """
    rows = operation.exchange(process_set, name, label or name, label, numbers)
    return rows.min(axis=0), rows.max(axis=0)


def check_names(
    process_set: ProcessSet,
    exchange_name: str,
    names: Sequence[str],
    what: str,
    label: str = "",
    shown: Sequence[str] | None = None,
    remedy: str = "",
) -> None:
    """Raise an error on every rank unless all ranks pass the same names in the same order.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that call this function.
    exchange_name : str
        The name of the exchange itself.
    names : sequence of str
        The names to compare.
    what : str
        Description of the names for the error, for example ``'parameters of trainer0'``.
    label : str, optional
        As for `extremes`.
    shown : sequence of str, optional
        Names that the error shows instead of `names`, if the user knows other names.
    remedy : str, optional
        Added at the end of the error.

    Raises
    ------
    RuntimeError
        The names differ. The error shows how many names this rank and another rank have, and this rank's last names.
    MXNetError
        As for `extremes`.
    """
    (lowest, few), (highest, many) = extremes(process_set, exchange_name, [digest(names), len(names)], label)
    if lowest != highest:
        other = many if len(names) == few else few
        elsewhere = f"another rank has {other}" if few != many else f"all ranks have {many}, but they differ"
        last = list(shown if shown is not None else names)[-_MOST_SHOWN:]
        listed = f" ({'the last ' if len(last) < len(names) else ''}{', '.join(last)})" if last else ""
        raise RuntimeError(
            f"The {what} are not the same on all ranks: rank {process.rank()} has {len(names)}{listed}, and "
            f"{elsewhere}. Build the same network on all ranks, with the same parameters trained, in the same order."
            f"{remedy and ' '}{remedy}"
        )


def check_options(process_set: ProcessSet, exchange_name: str, options: Sequence[str], what: str) -> None:
    """Raise an error on every rank, which shows the options that differ, unless all ranks pass the same options.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that call this function.
    exchange_name : str
        The name of the exchange itself.
    options : sequence of str
        Such as ``"num_groups=0"``.
    what : str
        The owner of the options in the error, for example ``'trainer0'``.

    Raises
    ------
    RuntimeError
        The options differ.
    MXNetError
        As for `extremes`.
    """
    _, (most,) = extremes(process_set, exchange_name, [len(options)])
    digests = [digest([option]) for option in options] + [0] * (int(most) - len(options))
    met = operation.exchange(process_set, exchange_name, exchange_name, numbers=digests)
    other = first_that_differs(met)
    if other is None:
        return
    first = 0
    common = set(met[first]) & set(met[other])
    mine = ", ".join(option for option in options if digest([option]) not in common) or "none of them"
    texts = [_of_rank(process_set, exchange_name, mine, rank) for rank in (first, other)]
    ranks = process_set.ranks
    advice = "Give the same optimizer, with the same settings, and the same arguments on all workers."
    if all("devices: " in text for text in texts):
        advice = "Initialize the network on the same number of devices on all workers."
    raise RuntimeError(
        f"The options of {what} must be the same on all workers, but rank {ranks[first]} has {texts[0]}, and rank "
        f"{ranks[other]} has {texts[1]}. {advice}"
    )


def first_that_differs(met: np.ndarray) -> int | None:
    """The first rank of a set whose numbers in an exchange differ from rank 0's; None if all ranks have the same."""
    differ = np.flatnonzero((met != met[0]).any(axis=1))
    return int(differ[0]) if differ.size else None


def bytes_of_rank(process_set: ProcessSet, exchange_name: str, mine: np.ndarray | None, root: int) -> np.ndarray:
    """Send the bytes of the set's rank `root` to all ranks of the set. Waits for all ranks.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that call this function.
    exchange_name : str
        The name of the exchange itself.
    mine : ndarray of uint8, or None
        The bytes; only those of the root are used.
    root : int

    Returns
    -------
    ndarray of uint8
        `mine` itself on the root.

    Raises
    ------
    MXNetError
        As for `extremes`.
    """
    is_root = process_set.rank() == root
    _, (length,) = extremes(process_set, exchange_name, [mine.size if is_root else 0])
    received = mine if is_root else np.empty(length, dtype=np.uint8)
    if process_set.size() > 1:
        with operation.Turn(process_set, exchange_name, exchange_name) as turn:
            work = turn.broadcast(root, received, received)
        operation.wait(work)
    return received


def _of_rank(process_set: ProcessSet, exchange_name: str, text: str, root: int) -> str:
    """Send the text of a rank to all ranks of the set."""
    mine = np.frombuffer(text.encode(), dtype=np.uint8)
    return bytes_of_rank(process_set, exchange_name, mine, root).tobytes().decode()


def as_integers(numbers: Sequence[float]) -> list[int]:
    """Reinterpret floats as integers, for an exchange."""
    return np.array(numbers, dtype=np.float64).view(np.int64).tolist()


def as_floats(integers: Sequence[int]) -> list[float]:
    """Reinterpret integers as floats: the inverse of `as_integers`."""
    return np.array(integers, dtype=np.int64).view(np.float64).tolist()


def digest(texts: Sequence[str]) -> int:
    """A hash of the texts, above 0 and below 2**57."""
    return 1 + int.from_bytes(hashlib.blake2b("\n".join(texts).encode(), digest_size=7).digest(), "big")
