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

from . import optimizer_states, order, process


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
    order.forget_states(optimizer_states.meeting_name(scope))
    if comes_back:
        return
    with contextlib.suppress(RuntimeError, ValueError):  # shut down, or the set was removed
        process_set.core.forget(f"{scope}/")
