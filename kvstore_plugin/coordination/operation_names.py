"""How long the core keeps the turn counts of names: as long as an object of this rank may use the names.

A rank may drop its counts of a name when it will never use that name again: then no turn of this rank can get a wrong
number. For the other ranks nothing changes. So the counts of numbered names (stores, trainers) go with their object.
The counts of names that a user gives to operations stay until shutdown(): a name may come again, on some ranks before
other ranks know that its last turn has ended everywhere.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Sequence

import numpy as np

from ..world import process
from ..world.process_set import ProcessSet, global_process_set
from . import deadlock_check, operation


class KeptNames:
    """Keeps the turn counts of all names of some scopes; every object that may use the names holds a reference.

    Parameters
    ----------
    process_set : ProcessSet
        The process set of the operations.
    *scopes : str
        The prefixes of the names, and of no other names; never used again before the next init().
    """

    __slots__ = ("__weakref__",)

    def __init__(self, process_set: Any, *scopes: str) -> None:
        for scope in scopes:
            weakref.finalize(self, forget, process_set, scope, process.generation).atexit = False


def forget(process_set: Any, scope: str, generation: int, comes_back: bool = False) -> None:
    """Drop what is known of a scope, and the core's counts unless the scope comes back; not after another init()."""
    if generation != process.generation:
        return  # other objects have these names now
    deadlock_check.forget_states(scope)
    if comes_back:
        return
    with contextlib.suppress(RuntimeError, ValueError):  # shut down, or the set was removed
        process_set._core.forget(f"{scope}/")


def numbered(process_set: ProcessSet, kind: str) -> str:
    """The prefix of the operations' names for the next store, trainer and so on that the members of a set make.

    Parameters
    ----------
    process_set : ProcessSet
        Has counts of its own, since other ranks make other objects.
    kind : str
        What is counted, for example ``'trainer'``.
    """
    own = f"{kind}{process_set._next_number(kind)}"
    return own if process_set is global_process_set else f"{process_set._scope}.{own}"


def numbered_alike(
    turn: operation.Turn, process_set: ProcessSet, kind: str, label: str, more: Sequence[int] = ()
) -> tuple[str, np.ndarray]:
    """As `numbered`, but after a meeting in which all ranks take the largest of their counts.

    The counts differ after a call that a single rank has made: the call has failed, but that rank has counted it.

    Returns
    -------
    str
    ndarray of int64, shape (size, len(more))
        What the ranks have passed as `more`.
    """
    met = turn.meet(label, [process_set._counted().get(kind, 0), *more])
    process_set._skip_to({kind: int(met[:, 0].max())})
    return numbered(process_set, kind), met[:, 1:]
