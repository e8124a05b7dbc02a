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
from typing import Any, Callable, ContextManager, Sequence

import numpy as np

from ..compat import errors
from ..compat.mxnet import MXNetError
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
    continue to count. After another init() of the same ranks, an object of all ranks keeps its number; in another
    process set the ranks must use the objects in the same order.

    If an exception interrupts the wait in the first use, the next use continues it.

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
    number : int
        The number in `shown`.
    """

    def __init__(self, process_set: Any, kind: str, call: str, is_copy: bool = False) -> None:
        self._process_set = process_set = counted_in(process_set)
        self._kind = kind
        self._call = call
        self._made_in = _present(process_set)
        self.number = process_set._next_copy(kind) if is_copy else process_set._next_number(kind)
        self.shown = _prefix(process_set, kind, self.number)
        self._met_in: Any = None
        self._turn: operation.Turn | None = None  # of an exchange that has not been processed
        self._turn_in: Any = None

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
        # Not the name of blocking calls, since MXNet's threads call this too.
        name = f"{one._scope}/first use of {self._kind}"
        with self._lock():
            return self._exchange(lambda: operation.Turn(one, name, self._call), more)[1] if self.is_due() else None

    def meet_in(self, begin: Callable[[], operation.Turn], more: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Like `meet`, even if the members have agreed, and in a turn that `begin` returns.

        Returns
        -------
        ndarray of int64, shape (size,)
            The number of each member's object.
        ndarray of int64, shape (size, len(more))
        """
        with self._lock():
            return self._exchange(begin, more)

    def _exchange(self, begin: Callable[[], operation.Turn], more: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        own = self._told()
        met = self._met(begin, [*own, *more]) if self._process_set.size() > 1 else np.array([[*own, *more]])
        try:
            numbers = self._agree(met[:, : len(own)])
        except RuntimeError:  # raised on all members
            self._turn = None
            raise
        self._turn = None
        return numbers, met[:, len(own) :]

    def _met(self, begin: Callable[[], operation.Turn], numbers: Sequence[int]) -> np.ndarray:
        """All members' numbers. After an interrupted wait, those of that exchange: other members know its result."""
        while True:
            try:
                if self._turn is not None and self._turn_in == _present(self._process_set):
                    return self._turn.resume()
                self._turn, self._turn_in = None, _present(self._process_set)
                with begin() as self._turn:
                    return self._turn.meet(self._call, numbers)
            except MXNetError as error:
                self._turn = None
                if errors.code_of(error) != "given_up" or process.rank() not in error.ranks:
                    raise  # otherwise the exchange was given up before this rank arrived: take the next turn
            except BaseException:  # for example Ctrl-C
                if self._turn is not None and (self._turn.is_refused() or not self._turn.is_taken()):
                    self._turn = None
                raise

    def _lock(self) -> ContextManager:
        """Held from _told() to _agree(), so that the sent counts include those of the previous agreement."""
        return _locks.setdefault(self._process_set, {}).setdefault(self._kind, threading.Lock())

    def _told(self) -> list[int]:
        """The values that this rank sends to the other members when they agree on the name."""
        one, kind = self._process_set, self._kind
        known = _UNKNOWN
        if self._made_in == _present(one) and self.number >= one._base(kind):
            known = _COUNTED
        elif self._met_in is not None and self._met_in[0] != process.generation:
            known = _AGREED if process.has_same_ranks_as(self._met_in[0]) else _UNKNOWN
        copies = agreement.digest([str(number) for number in one._copied(kind)])
        return [self.number, known, one._counted().get(kind, 0), one._base(kind), copies]

    def _agree(self, told: np.ndarray) -> np.ndarray:
        """Process all members' values, a row for each, and return the number of each member's object."""
        numbers, known, counts, _, _ = told.T
        were_agreed = known == _AGREED
        # The numbers in a process set begin again when the set is added again.
        is_kept = were_agreed.all() and self._process_set is global_process_set
        if were_agreed.any() and not is_kept and not (were_agreed.all() and (numbers == numbers[0]).all()):
            raise RuntimeError(
                f"{self._call}: the ranks use different objects after init(). Their numbers were {numbers.tolist()} "
                "before. Use the objects in the same order on all workers, or create new objects."
            )
        if not is_kept and ((told[:, 2:] != told[0, 2:]).any() or (known != _COUNTED).any()):
            self.number = int(counts.max())
            self._process_set._skip_to({self._kind: self.number + 1})
            numbers = np.full_like(numbers, self.number)
        self.renamed(self.number)
        return numbers

    def renamed(self, number: int) -> None:
        """Adopt a number on which all members have agreed."""
        self.number = number
        # The name comes first: another thread uses the name as soon as is_due() is False.
        self.shown = _prefix(self._process_set, self._kind, number)
        self._made_in = self._met_in = _present(self._process_set)


# What is known about an object's number.
_UNKNOWN = 0  # members may have counted differently before
_COUNTED = 1  # the object was created in this init(), and the members have counted equally since `_base`
_AGREED = 2  # the members have agreed on it in an earlier init() of the same ranks

_locks: weakref.WeakKeyDictionary[ProcessSet, dict[str, threading.Lock]] = weakref.WeakKeyDictionary()


def _present(process_set: ProcessSet) -> tuple:
    """Identifies the current init() and the current addition of a process set."""
    return process.generation, process_set.process_set_id
