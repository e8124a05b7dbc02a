"""The keys of a store that all workers hold alike: only these are divided over the workers by an optimizer.

All workers must make the same division. But init() or broadcast() may fail on one worker alone. So the first update
after such calls compares what the workers hold. Whether a comparison is due follows from the program's calls, which are
the same on all workers, and not from their success.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from ..compat import errors
from ..compat.mxnet import MXNetError
from ..coordination import agreement, operation
from ..world import process
from ..world.process_set import ProcessSet


class EqualKeys:
    """The keys that all workers hold alike, as of the last comparison.

    Parameters
    ----------
    process_set : ProcessSet
    scope : str
        The prefix of the operations' names.

    Attributes
    ----------
    differ : bool
        Whether the workers held different keys in the last comparison.
    """

    def __init__(self, process_set: ProcessSet, scope: str) -> None:
        self.differ = False
        self._process_set = process_set
        self._scope = scope
        self._name = f"{scope}/keys"
        self._changes = 0  # calls so far that may change what a worker holds
        self._compared = 0  # the number of these calls that the last comparison has covered
        self._alike: set[str] = set()  # names of keys
        self._unlike: dict[str, str] = {}  # reasons, by the names of keys that this worker holds
        self._comparison: _Comparison | None = None  # not yet ended
        self._lock = threading.Lock()

    def changed(self) -> None:
        """Note a call that may change what a worker holds. All workers make it, even if it fails."""
        self._changes += 1

    def is_due(self) -> bool:
        """Whether the next update compares: the same on all workers."""
        return self._compared != self._changes or self._comparison is not None

    def compare(
        self,
        held: Callable[[], Mapping[str, str]],
        call: str,
        name: str = "",
        limit: operation.Limit | None = None,
        look: Callable[[str], None] | None = None,
    ) -> None:
        """Compare what the workers hold, if that is due. Waits for all workers.

        If an exception interrupts the wait, the next call continues it: the other workers know the result.

        Parameters
        ----------
        held : callable
            Returns a text for each key that this worker holds, by the key's name. Equal texts: the workers hold the
            same.
        call : str
            This worker's call, for errors.
        name, limit, look : optional
            As for `operation.exchange`; `look` gets the name.

        Raises
        ------
        MXNetError
            A worker has refused, has not arrived in time, or has left the job. The comparison stays due.
        """
        with self._lock:
            while self.is_due():
                one = self._comparison
                try:
                    if one is None:
                        changes = self._changes
                        terms = (self._process_set, name or self._name, call, limit, look)
                        one = self._comparison = _Comparison(changes, held(), *terms)
                    self._end(one, one.run())
                except BaseException as error:
                    if one is None or not one.has_begun():
                        self.refuse(f"{call}: {errors.reason_of(error)}", name)
                    elif not one.is_interrupted(error):
                        self._comparison = None
                        if errors.code_of(error) == "given_up" and process.rank() in error.ranks:
                            continue  # the call was given up before this worker arrived: take the next turn
                    raise

    def begin_again(self) -> None:
        """After a new init(): compare with the workers of this init()."""
        self._comparison = None
        self._changes += 1

    def refuse(self, reason: str, name: str = "") -> None:
        """Refuse the comparison that is due: it fails on the other workers, with the reason."""
        if self._comparison is not None and not self._comparison.has_begun():
            self._comparison = None
        if self._compared != self._changes and (self._comparison is None or self._comparison.changes != self._changes):
            self._process_set._core.refuse(name or self._name, reason)

    def alike(self, name: str) -> bool:
        """Whether all workers hold this key alike."""
        return name in self._alike

    def check(self, name: str) -> None:
        """Raise an MXNetError if this worker and another one hold different values under a key."""
        if name in self._unlike:
            raise MXNetError(self._unlike[name])

    def _end(self, one: _Comparison, lacking: Mapping[str, Sequence[int]]) -> None:
        """Process the result of a comparison; after an interruption, once more."""
        ranks = self._process_set.ranks
        self._unlike = {
            name: f"Key {name[len(self._scope) + 1 :]} cannot be updated: rank {process.rank()} holds "
            f"{one.held[name]}, and rank {ranks[others[0]]} does not. Such a call has failed or differed on one of "
            "them. Call init() or broadcast() for this key again, with the same shape and dtype on all workers."
            for name, others in lacking.items()
            if others
        }
        self._alike = {name for name, others in lacking.items() if not others}
        self.differ = one.differ
        self._compared = one.changes
        self._comparison = None


class _Comparison:
    """One comparison: an exchange, and a second one if the workers differ. Each can be continued after an exception."""

    def __init__(
        self,
        changes: int,
        held: Mapping[str, str],
        process_set: ProcessSet,
        name: str,
        call: str,
        limit: operation.Limit | None,
        look: Callable[[str], None] | None,
    ) -> None:
        self.changes = changes
        self.held = held
        self.differ = False
        self._process_set = process_set
        self._name = name
        self._call = call
        self._limit = limit
        self._look = look
        self._turns: list[operation.Turn] = []

    def run(self) -> dict[str, list[int]]:
        """For each key that this worker holds, the ranks within the set that do not hold the same."""
        if self._process_set.size() == 1:
            return {name: [] for name in self.held}
        digests = {name: agreement.digest([name, text]) for name, text in self.held.items()}
        numbers = sorted(digests.values())
        met = self._exchange(0, self._name, [agreement.digest([str(number) for number in numbers]), len(numbers)])
        if agreement.first_that_differs(met) is None:
            return {name: [] for name in digests}
        self.differ = True
        most = int(met[:, 1].max())
        # Another name: a refusal of the next comparison must not take the turn of this exchange.
        met = self._exchange(1, f"{self._name}/each", [*numbers, *[0] * (most - len(numbers))])
        return {name: np.flatnonzero((met != number).all(axis=1)).tolist() for name, number in digests.items()}

    def has_begun(self) -> bool:
        """Whether this worker has taken a turn in this comparison."""
        return any(turn.is_taken() for turn in self._turns)

    def is_interrupted(self, error: BaseException) -> bool:
        """Whether the exception has interrupted this comparison on this worker alone, so that it goes on later."""
        return not isinstance(error, MXNetError) and not any(turn.is_refused() for turn in self._turns)

    def _exchange(self, number: int, name: str, numbers: Sequence[int]) -> Any:
        look = None if self._look is None else lambda: self._look(name)
        if number < len(self._turns):
            return self._turns[number].resume(self._limit, look)
        with operation.Turn(self._process_set, name, self._call) as turn:
            self._turns.append(turn)
            return turn.meet("a comparison of the keys in a store", numbers, self._limit, look)
