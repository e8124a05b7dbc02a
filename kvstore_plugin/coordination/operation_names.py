"""Keeps the core's turn counts of names as long as an object of this rank may use the names.

A rank may drop its counts of a name when it will never use that name again: then no turn of this rank can get a wrong
number. Other ranks are not affected. So a rank drops the counts of numbered names (stores, trainers) when their object
is deleted. The counts of users' names for operations stay until shutdown(): a name may be reused on some ranks before
other ranks know that its last turn has ended everywhere.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, ContextManager, Sequence

import numpy as np

from ..world import process
from ..world.process_set import ProcessSet, global_process_set
from . import agreement, operation

# Number of calls under one name whose backward passes have different names. Further calls reuse the names, but their
# labels differ: mismatched operations fail, and are never summed.
BACKWARD_NAMES = 256


class KeptNames:
    """Keeps the turn counts of all names of some scopes; every object that may use the names holds a reference.

    Parameters
    ----------
    process_set : ProcessSet
        The process set of the operations.
    *scopes : str
        The prefixes of the names. No other names begin with them, and they are not reused before the next init().
    """

    __slots__ = ("__weakref__",)

    def __init__(self, process_set: Any, *scopes: str) -> None:
        for scope in scopes:
            weakref.finalize(self, forget, process_set, scope, process.generation).atexit = False


def forget(process_set: Any, scope: str, generation: int, comes_back: bool = False) -> None:
    """Drop the core's counts of a scope, unless the scope may be used again or init() was called again."""
    if comes_back or generation != process.generation:  # another object may have these names
        return
    with contextlib.suppress(RuntimeError, ValueError):  # shut down, or the set was removed
        process_set._core.forget(f"{scope}/")


def numbered(process_set: ProcessSet, kind: str) -> str:
    """The name prefix for the operations of the next object of a kind that the members create.

    Parameters
    ----------
    process_set : ProcessSet
        Each set has separate counts, since ranks outside of the set create other objects.
    kind : str
        The counted kind, for example ``'trainer'``.
    """
    return _prefix(process_set, kind, process_set._next_number(kind))


def counted_in(process_set: Any) -> ProcessSet:
    """The set that counts an object with this argument `process_set`; the set of all ranks if the argument is wrong."""
    return process_set if isinstance(process_set, ProcessSet) else global_process_set


def _prefix(process_set: ProcessSet, kind: str, number: int) -> str:
    own = f"{kind}{number}"
    return own if process_set is global_process_set else f"{process_set._scope}.{own}"


def numbered_alike(
    turn: operation.Turn, process_set: ProcessSet, kind: str, label: str, more: Sequence[int] = ()
) -> tuple[str, np.ndarray]:
    """Like `numbered`, but after an exchange, in which all ranks take the largest of their counts.

    The counts differ after a call by a single rank: the call has failed, but that rank has counted it.

    Returns
    -------
    str
    ndarray of int64, shape (size, len(more))
        Row r holds the values of `more` that rank r has passed.
    """
    met = turn.meet(label, [process_set._counted().get(kind, 0), *more])
    process_set._skip_to({kind: int(met[:, 0].max())})
    return numbered(process_set, kind), met[:, 1:]


class FirstUse:
    """The name of an object, on which the members of a process set agree when they first use the object.

    Created before a constructor's checks, so that a failing constructor is counted on all ranks.

    Members may have created different numbers of objects, for example if a constructor has failed on one rank, or one
    rank has copied a network. So no member can determine the name alone: in the first use the members exchange their
    counts, and which numbers copies have. If these are equal, an object keeps the number of its creation, even if
    threads use several objects in different orders. Otherwise the object gets a new number, from which all members
    continue to count.

    Parameters
    ----------
    process_set : ProcessSet
        Each set has separate counts, since ranks outside of the set create other objects. If the argument is wrong, the
        set of all ranks counts the object.
    kind : str
        The counted kind, for example ``'optimizer'``.
    call : str
        The first use, for errors, for example ``'the first update() of a DistributedOptimizer'``.
    is_copy : bool, optional
        Whether the object is a copy or unpickled: members may make as many copies at different times.

    Attributes
    ----------
    shown : str
        The prefix of the names of the object's operations; before the first use the prefix that this rank expects.
    """

    def __init__(self, process_set: Any, kind: str, call: str, is_copy: bool = False) -> None:
        self._process_set = process_set = counted_in(process_set)
        self._kind = kind
        self._call = call
        self._made_in = _present(process_set)
        self._number = process_set._next_copy(kind) if is_copy else process_set._next_number(kind)
        self.shown = _prefix(process_set, kind, self._number)
        self._met_in: Any = None

    def is_due(self) -> bool:
        """Whether the members have not agreed on this object's name since the last init()."""
        return self._met_in != _present(self._process_set)

    def name(self) -> str:
        """Return `shown`, on which the members have agreed. Waits for all members if they have not agreed yet."""
        self.meet()
        return self.shown

    def meet(self, more: Sequence[int] = ()) -> np.ndarray | None:
        """Agree on the name if is_due(), and return all members' values of `more`, a row for each; otherwise None."""
        one = self._process_set
        with self.lock():
            if not self.is_due():
                return None
            told = np.array([[*self.told(), *more]])
            if one.size() > 1:
                name = f"{one._scope}/first use of {self._kind}"  # not the name of blocking calls, since
                told = operation.exchange(one, name, self._call, self._call, told[0])  # MXNet's threads call this too
            own, rest = np.split(told, [told.shape[1] - len(more)], axis=1)
            self.agree(own)
        return rest

    def lock(self) -> ContextManager:
        """The lock to hold from told() to agree(), so that the sent counts include those of the previous agreement."""
        return _locks.setdefault(self._process_set, {}).setdefault(self._kind, threading.Lock())

    def told(self) -> list[int]:
        """The values that this rank sends to the other members when they agree on the name."""
        one, kind = self._process_set, self._kind
        is_known = self._made_in == _present(one) and self._number >= one._base(kind)
        copies = agreement.digest([str(number) for number in one._copied(kind)])
        return [self._number if is_known else -1, one._counted().get(kind, 0), one._base(kind), copies]

    def agree(self, told: np.ndarray) -> np.ndarray:
        """Process all members' values, a row for each, and return the number of each member's object."""
        numbers, counts, bases, _ = told.T
        if (told[:, 1:] != told[0, 1:]).any() or (numbers < bases).any():
            self._number = int(counts.max())
            self._process_set._skip_to({self._kind: self._number + 1})
            numbers = np.full_like(numbers, self._number)
        # renamed() sets the name first: another thread uses the name as soon as is_due() is False.
        self.renamed(_prefix(self._process_set, self._kind, self._number))
        return numbers

    def renamed(self, name: str) -> None:
        """Adopt a name on which all members have agreed."""
        self.shown = name
        self._made_in = self._met_in = _present(self._process_set)


_locks: weakref.WeakKeyDictionary[ProcessSet, dict[str, threading.Lock]] = weakref.WeakKeyDictionary()


def _present(process_set: ProcessSet) -> tuple:
    """Identifies the current init() and the current addition of a process set."""
    return process.generation, process_set.process_set_id
