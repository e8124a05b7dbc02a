"""What the core counts for the names of operations that one object of this rank makes, until nobody here makes them.

A rank may drop its counts of a name when it will never use that name again: nobody waits then for a turn of its that it
could number wrongly. Others may go on, and wait for it or not as if it still counted. So names that are numbered
(stores, trainers) go with their object, but those that a user gives an operation stay until shutdown(): they may come
again, on some ranks before others know that the last turn has ended everywhere.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from ..world import process
from ..world.process_set import ProcessSet, global_process_set
from . import deadlock_check, operation


class KeptNames:
    """Keeps what is counted for all names of a scope; whoever may yet use one of them holds a reference.

    Parameters
    ----------
    process_set : ProcessSet
        Whose operations they are.
    *scopes : str
        With which the names begin, and no others; never used again before the next init().
    """

    __slots__ = ("__weakref__",)

    def __init__(self, process_set: Any, *scopes: str) -> None:
        for scope in scopes:
            weakref.finalize(self, forget, process_set, scope, process.generation).atexit = False


def forget(process_set: Any, scope: str, generation: int, comes_back: bool = False) -> None:
    """Drop what is known of a scope, and unless it comes back, what the core counts; not after another init()."""
    if generation != process.generation:
        return  # these names are somebody else's now
    deadlock_check.forget_states(scope)
    if comes_back:
        return
    with contextlib.suppress(RuntimeError, ValueError):  # shut down, or the set was removed
        process_set.core.forget(f"{scope}/")


def numbered(process_set: ProcessSet, kind: str) -> str:
    """Begins the names of the operations of the next store, trainer and so on that the members of a set make.

    Parameters
    ----------
    process_set : ProcessSet
        The members count by themselves, since other ranks make others.
    kind : str
        What is counted, for example ``'trainer'``.
    """
    own = f"{kind}{process_set.next_number(kind)}"
    return own if process_set is global_process_set else f"{process_set.scope}.{own}"


def numbered_alike(turn: operation.Turn, process_set: ProcessSet, kind: str, label: str) -> str:
    """As `numbered`, but all ranks meet, and count on alike where they have counted differently.

    A rank that was alone in a call has made one that failed, and the others have not.
    """
    counts = turn.meet(label, [process_set.numbers().get(kind, 0)])
    process_set.skip_to({kind: int(counts.max())})
    return numbered(process_set, kind)
