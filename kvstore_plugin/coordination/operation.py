"""This rank's part in one operation of a process set: its turn, which it takes with work or with a refusal.

Ranks are matched by name, and under one name by the order of their calls. A rank whose arguments are wrong must
therefore take its turn as well, with the reason, or the others would wait for it and all later turns would be crossed.

Calls that wait (allgather, barrier, add_process_set and the like) all take their turns under one name of the process
set. So ranks that wait in different calls meet there, find that their labels differ, and get an error that shows both.
"""

from __future__ import annotations

import operator
import re
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from ..compat import errors
from ..compat.argument_errors import ArgumentTypeError, ArgumentValueError
from ..compat.mxnet import MXNetError
from ..world import process
from ..world.process_set import check
from . import deadlock_check

# Called when a turn under a name has failed, on all ranks of the process set.
when_failed: dict[str, Callable[[], None]] = {}

# Priorities travel as 32 bits.
_LARGEST_PRIORITY = 2**31 - 1

_GIVEN_UP = re.compile(r"was given up by rank \d+ .*not called it: \[([\d, ]*)\]", re.DOTALL)


class Limit(NamedTuple):
    """How long a rank waits for others that do not come, and the setting that says so."""

    seconds: float
    setting: str


class Turn:
    """A context in which an operation is checked and started; an exception in it before that becomes a refusal.

    Parameters
    ----------
    process_set : ProcessSet
        Whose ranks take part.
    name : str
        What they are matched by; begins with the scope of the set.
    call : str
        What the other ranks are told that was refused, for example ``"allreduce 'x'"``.

    Raises
    ------
    ValueError
        This process is not in the process set. Nobody is told, since nobody waits.
    RuntimeError
        kvstore_plugin is not initialized.
    """

    __slots__ = ("_taken", "call", "core", "name")

    def __init__(self, process_set: Any, name: str, call: str) -> None:
        self.core = process_set.core
        self.core.rank()
        self.name, self.call = name, call
        self._taken = False

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and not self._taken:
            self._taken = True
            self.core.refuse(self.name, f"{self.call}: {str(error) or kind.__name__}")
            self._tell()

    def push(self, function: Callable, *arguments: Any, **options: Any) -> None:
        """Start the operation with one of the core's functions, which takes the name first.

        Raises
        ------
        ValueError
            The core does not take the arrays.
        MXNetError
            The operation has failed, with an engine that runs it at once.
        """
        try:
            function(self.name, *arguments, **options)
        except MXNetError:
            self._taken = True
            raise
        except (RuntimeError, ValueError) as error:
            raise ArgumentValueError(f"{error}.") from error
        self._taken = True

    def leave_out(self, reason: str, result: Any) -> Any:
        """Take the turn without work, and return `result`; ranks that have work get an error with the reason."""
        self._taken = True
        self.core.refuse(self.name, f"{self.call}: {reason}")
        return result

    def submit(self, function: Callable, *arguments: Any, **options: Any) -> Any:
        """Start the operation with one of the core's functions for numpy arrays, and return its work."""
        work = function(self.name, *arguments, **options)
        self._taken = True
        return work

    def meet(
        self,
        label: str,
        numbers: Sequence[int] = (),
        limit: Limit | None = None,
        look: Callable[[], None] | None = None,
    ) -> np.ndarray:
        """Wait for the other ranks, which show each other some numbers.

        Whoever waits long looks whether others wait for this rank in another call; then all of them get an error.

        Parameters
        ----------
        label : str
            The call, with what all ranks must agree on.
        numbers : sequence of int, optional
            Equally many on all ranks with this label, of 64 bits.
        limit : Limit, optional
            After this time the call is given up if some ranks have not come to it.
        look : callable, optional
            Called without arguments now and then while this waits; may give the call up.

        Returns
        -------
        ndarray of int64, shape (size, len(numbers))
            Row r is what rank r of the process set has passed.

        Raises
        ------
        MXNetError
            A rank is in another call that waits or in a step, has refused, has not come in time, or is gone.
        """
        rows = np.zeros((self.core.size(), len(numbers)), dtype=np.int64)
        rows[self.core.rank()] = numbers
        result = np.empty_like(rows)
        work = self.submit(self.core.submit_allreduce, [rows], [result], label=label)
        try:
            if limit is not None:
                wait(work, lambda: self._give_up(limit), limit.seconds)
            else:
                wait(work, lambda: self._look(look))
        except MXNetError as error:
            self._tell()
            if limit is None:
                deadlock_check.failed(str(error))
            raise
        return result

    def _look(self, look: Callable[[], None] | None) -> None:
        if look is not None:
            look()
        deadlock_check.look(self.core, self.name, self.call)

    def _give_up(self, limit: Limit) -> None:
        missing = sorted({rank for one in self.core.waiting(self.name) for rank in one[2]})
        if missing:
            # From here on nobody is waited for: the core ends the call on all ranks, if it does not succeed now.
            self.core.give_up(
                self.name,
                f"{self.call} was given up by rank {process.rank()} after {limit.seconds:g} s ({limit.setting}), since "
                f"these ranks had not called it: {missing}",
            )

    def _tell(self) -> None:
        if self.name in when_failed:
            when_failed[self.name]()


def exchange(
    process_set: Any,
    name: str,
    call: str,
    label: str = "",
    numbers: Sequence[int] = (),
    limit: Limit | None = None,
    look: Callable[[], None] | None = None,
) -> np.ndarray:
    """Wait for the other ranks, which show each other some numbers: a turn and its `meet` in one call.

    Parameters
    ----------
    process_set : ProcessSet
        Whose ranks take part.
    name : str
        What they are matched by.
    call : str
        For errors: what this rank is in.
    label : str, optional
        Must be the same on all ranks; where it is not, the error shows what two of them have.
    numbers, limit, look
        As for `Turn.meet`. A call that was given up counts for nobody: a rank that comes later takes part in the next.

    Returns
    -------
    ndarray of int64, shape (size, len(numbers))
        Row r is what rank r of the process set has passed.

    Raises
    ------
    MXNetError
        As for `Turn.meet`.
    """
    while True:
        with Turn(process_set, name, call) as turn:
            try:
                return turn.meet(label, numbers, limit, look)
            except MXNetError as error:
                given_up = _GIVEN_UP.search(str(error)) if limit is not None else None
                if given_up is None or str(process.rank()) not in given_up.group(1).split(", "):
                    raise  # otherwise it was given up before this rank came


def named(process_set: Any, name: Any, call: str) -> Turn:
    """The turn in an operation that a user has given a name, or none.

    Raises
    ------
    TypeError, ValueError
        `process_set` is none that this process can use; or `name` is neither a str nor an int nor None, in which case
        the next turn without a name is refused.
    """
    check(process_set)
    if name is None:
        return Turn(process_set, f"{process_set.scope}/unnamed", call)
    if isinstance(name, (str, int)):
        return Turn(process_set, f"{process_set.scope}/call/{name}", described(call, name))
    with named(process_set, None, call):
        raise ArgumentTypeError(f"The name of an operation must be a str, not {type(name).__name__}.")


def waiting(process_set: Any, call: str) -> Turn:
    """The turn in a call that waits for the other ranks."""
    check(process_set)
    return Turn(process_set, waiting_name(process_set), call)


def waiting_name(process_set: Any) -> str:
    """What the ranks are matched by in calls that wait."""
    return f"{process_set.scope}/waiting"


def gathering(process_set: Any, name: Any, call: str) -> Turn:
    """The turn in an operation on which the ranks have agreed in a call that waits."""
    return Turn(process_set, f"{process_set.scope}/{call if name is None else f'call/{name}'}", described(call, name))


def checked_priority(priority: Any) -> int:
    """A value of the argument `priority`.

    Raises
    ------
    TypeError, ValueError
        It is no int, or has more than 32 bits.
    """
    try:
        number = operator.index(priority)
    except TypeError:
        raise ArgumentTypeError(f"priority must be an int, not {type(priority).__name__}.") from None
    if not -_LARGEST_PRIORITY <= number <= _LARGEST_PRIORITY:
        raise ArgumentValueError(
            f"priority must be between -{_LARGEST_PRIORITY} and {_LARGEST_PRIORITY}, not {number}."
        )
    return number


def described(call: str, name: Any) -> str:
    """A call as labels and errors show it: with its name, where it has one."""
    return call if name is None else f"{call} {str(name)!r}"


def wait(work: Any, look: Callable[[], None] | None = None, *first_look: float) -> None:
    """Wait for work of the core, with the arguments of process.wait().

    Raises
    ------
    MXNetError
        It has failed.
    """
    try:
        process.wait(work, look, *first_look)
    except MXNetError:
        raise
    except RuntimeError as error:
        raise errors.any_failure(MXNetError(str(error))) from None
