"""The interface of the objects that reduce a trainer's gradients, and their common base.

In each process set a trainer has a reducer for its dense gradients and a reducer for its row_sparse gradients. Another
reducer sums the gradients of its local parameters.
"""

from __future__ import annotations

import enum
import functools
import weakref
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np

from ..compat import errors
from ..compat.mxnet import MXNetError, NDArray, Parameter
from ..coordination import operation
from ..parameters import deferred_init
from ..parameters.naming import Named
from ..world import process
from ..world import process_set as process_sets
from ..world.process_set import ProcessSet
from .bucket_plan import Comparison, Reduction
from .fence import Fence
from .squares import Piece, Squares

_NO_UPDATE = "no update() after allreduce_grads()"  # the label of a rank that leaves update() out


UPDATE_REFUSED = (
    "update() is refused, since allreduce_grads() has failed on this worker. Call backward and allreduce_grads() again "
    "before update()."
)


RefuseNext = Callable[[str, np.ndarray], None]


class Comparing(enum.Enum):
    """Whether compare() is called after allreduce(), and where."""

    NOTHING = 0  # compare() is not called
    STEP = 1  # in step(), only to sum a number: the sums of the gradients have compared the workers' steps
    UPDATE = 2  # in update(), which the user calls


class Reducer:
    """Reduces the gradients of some parameters of one trainer. Most methods of this base class are no-ops.

    Attributes
    ----------
    have_values : sequence of Parameter
        Parameters that had values on all ranks when the trainer was created.
    values_may_differ : bool
        Whether the ranks' values may differ on purpose: the trainer never broadcasts them.
    fences : sequence of Fence
        Fences after the updates that each worker makes itself; see step_guard.py.
    compared : sequence
        What compare() or a refusal has started since the last allreduce(). Empty: compare() must still be called.
    turns : int
        How many steps this rank has begun or refused. If allreduce() fails and this number is unchanged, the caller
        refuses the step.
    is_begun : bool
        Whether the last allreduce() has begun all sums, even if it has failed afterwards: the other ranks update.
    is_begun_in_part : bool
        Whether the last allreduce() has failed after some sums, from which the other ranks may update in a step.
    """

    have_values: Sequence[Parameter] = ()
    values_may_differ = False
    fences: Sequence[Fence] = ()
    compared: Sequence[Any] = (None,)
    turns = 0
    is_begun = True
    is_begun_in_part = False

    def allreduce(self, ignore_stale: bool, label: str, compares: Comparing) -> None:
        """Replace each gradient, on every device, by its mean over the workers of the sum over a worker's devices.

        Dense gradients: returns at once, unless `ignore_stale` is set, or it is the first step, or the set of gradients
        has changed. Row_sparse gradients: waits until the gradients of all workers are written and summed.

        Parameters
        ----------
        ignore_stale : bool
            A stale gradient (no backward has written it since the last update) counts as zeros, or as no rows. A
            gradient that is stale on all workers is not reduced. A gradient that is fresh on some worker is marked as
            fresh on all workers.
        label : str
            Text that must be equal on all ranks in this step.
        compares : Comparing
            Whether compare() follows, and in which method.

        Raises
        ------
        DeferredInitializationError
            A parameter has no values yet; the other ranks get an MXNetError that names the parameter.
        MXNetError
            The ranks' steps differ, or a row_sparse gradient carries an error on some rank.
        ValueError
            A gradient of this rank is wrong, or the process set was removed. The other ranks get an
            MXNetError with the same reason.
        """
        raise NotImplementedError

    def update(self) -> None:
        """Update the parameters by the optimizer on the store, from the sums of allreduce(). Returns at once."""

    def updated(self) -> None:
        """Call this after updates that each worker makes by itself. Not after AMP has skipped them."""

    def compare(self, label: str) -> None:
        """Make an update fail on all ranks, before it changes a weight, if the ranks' updates differ. Returns at once.

        Parameters
        ----------
        label : str
            Text that must be equal in the updates of all ranks.

        Raises
        ------
        MXNetError
            The preceding allreduce() has failed, and this rank knows it.
        """

    def refuse_comparison(self, reason: str) -> None:
        """Refuse the turn of compare(): the other ranks' update fails with the reason."""

    def pieces(self, only_fresh: bool) -> list[Piece]:
        """This worker's share of the dense gradients, for the global norm, in the order in which backward writes them.

        With `only_fresh`, without stale gradients.
        """
        return []

    def to_scale(self, only_fresh: bool) -> list[NDArray]:
        """The dense arrays from which update() updates the weights; with `only_fresh` without stale gradients."""
        return []

    def has_rows(self) -> bool:
        """Whether there are row_sparse gradients."""
        return False

    def squares_of_rows(self, only_fresh: bool) -> float:
        """The sum of squares of the row_sparse gradients, on one worker of the process set; 0.0 on other workers."""
        return 0.0

    def scale_rows(self, factor: float) -> None:
        """Multiply the row_sparse gradients of the last squares_of_rows() by a factor."""

    def refuse_update(self, reason: str) -> None:
        """Refuse updates that allreduce() has begun and update() has not completed, so that no rank waits for them."""

    def drop_updates(self) -> None:
        """Leave out the updates that allreduce() has begun. All workers must do so."""

    def refuse(self, reason: str) -> None:
        """Refuse a step: it fails on the other ranks with the reason."""

    def is_left_out_by_all(self) -> bool:
        """Tell the other ranks that this rank leaves out the update for which compare() is due. Waits for the others.

        Returns
        -------
        bool
            Whether all ranks leave it out. If not, the other ranks have counted an update, which fails on all of them.
        """
        return True

    def has_begun(self) -> bool:
        """Whether the other ranks may count an update that this rank skips."""
        return False

    def await_comparison(self) -> None:
        """Wait for the last compare().

        Raises
        ------
        MXNetError
            The ranks' updates differ, or a rank has refused its update. All ranks of the process set get an error.
        """

    def share_freshness(self) -> None:
        """Mark a parameter as fresh on all workers if some worker has used it since the last update.

        Waits for the other ranks. In an update outside of step() it follows the comparison only if that has succeeded:
        then all ranks make this call.
        """

    def refuse_freshness(self, reason: str) -> None:
        """Refuse the turn of share_freshness()."""

    def awaited_by(self) -> list[int]:
        """The ranks that have begun a step or an update that this rank has not begun."""
        return []

    def refuse_awaited(self, reason: str) -> None:
        """Refuse the operation that the other ranks wait for: an update, or the next step."""

    def release(self) -> None:
        """Release the state of the process set, which has ended."""


class WeakMethod:
    """Calls a method of an object without keeping the object alive; a no-op after the object's end.

    A trainer refers to its reducers, which call methods of the trainer. Ordinary references to these methods would
    create cycles: an unused trainer, with its buckets, would live until the garbage collector runs.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = weakref.ref(owner)
        self._name = name

    def __call__(self, *given: Any) -> Any:
        owner = self._owner()
        return None if owner is None else getattr(owner, self._name)(*given)

    def __reduce__(self) -> tuple:
        return WeakMethod, (self._owner(), self._name)  # in the copy of an object it calls the copy's method


class Task(NamedTuple):
    """What a reducer reduces, and how.

    Attributes
    ----------
    scope : str
        Prefix of the names of all operations, for example ``'trainer0'``.
    named : sequence of Named
        Parameters with names that are the same on all ranks. Parameters near the network's input get a higher
        priority: the next forward pass needs them first.
    reduction : Reduction
        How gradients are reduced, the same on all ranks.
    when_moved : callable
        Called without arguments when parameters may have new arrays, before the reducer reads the arrays.
    keys : dict of int
        The key of each parameter in the optimizer on the store, by the parameter's id().
    """

    scope: str
    named: Sequence[Named]
    reduction: Reduction
    when_moved: Callable[[], None]
    keys: Mapping[int, int]


class SharedReducer(Reducer):
    """Reduces gradients over a process set. Subclasses choose the operations."""

    def __init__(self, task: Task) -> None:
        self._scope = task.scope
        self._named = task.named
        self._reduction = task.reduction
        self._when_moved = task.when_moved
        self._process_set = task.reduction.process_set
        self._parameters = [item.value for item in task.named]
        # How often each parameter had been initialized when the last check found values on all ranks.
        self._times = [deferred_init.times(parameter) for parameter in self._parameters]
        self._comparison = Comparison(self._process_set)
        self.compared: list[Any] = [None]
        self._exchange_has_failed = False  # whether the last failed exchange gives no rank a result
        self._summed: tuple[Squares, Callable[[int], None]] | None = None  # the number to sum, and its setter

    def _names(self) -> list[str]:
        """Names of the operations that the other ranks expect next from this rank. Exchanges use the first name."""
        raise NotImplementedError

    def _arrays_to_compare(self) -> tuple[list[NDArray], int]:
        """The arrays that wait for a comparison, and its priority."""
        raise NotImplementedError

    def _has_gradients(self) -> bool:
        """Whether there are gradients to reduce; otherwise nothing is compared or refused."""
        return True

    def _has_met(self) -> bool:
        """Whether in an earlier step all ranks have had values of all parameters that need gradients."""
        raise NotImplementedError

    @property
    def process_set(self) -> ProcessSet:
        """The ranks over which gradients are reduced."""
        return self._process_set

    def sum_with_comparison(self, squares: Squares, add_up: Callable[[int], None]) -> None:
        """Make each comparison sum a number over the ranks. `add_up`, given a priority, sets the number first."""
        self._summed = squares, add_up

    def compare(self, label: str) -> None:
        # After allreduce(), the comparison takes the turn of allreduce()'s first operation. Otherwise it takes the next
        # turn of this operation's name.
        if not self._has_gradients():
            return
        name = self._names()[0]
        own, turn_of, started = (name, "", []) if self.compared else (f"{name}/update", name, self.compared)
        squares = None
        try:
            written, priority = self._arrays_to_compare()
            if self._summed is not None:
                squares, add_up = self._summed
                add_up(priority)
        except BaseException as error:
            self._refuse_update(errors.reason_of(error))
            raise
        try:
            self._comparison.push(started, own, written, priority, label, turn_of, squares)
        except BaseException as error:
            if operation.must_refuse(started, error):
                self._refuse_update(errors.reason_of(error))
            started.append(None)
            raise

    def _refuse_update(self, reason: str) -> None:
        self.refuse_comparison(f"update() has failed on that rank: {reason}")

    def refuse_comparison(self, reason: str) -> None:
        if not self._has_gradients():
            return
        name = self._names()[0]
        if self.compared:
            self._process_set._core.refuse(name, reason)
        else:  # once, even if an exception of a signal handler follows
            refuse = functools.partial(self._process_set._core.refuse, f"{name}/update", reason, turn_of=name)
            operation.start(self.compared, refuse)

    def await_comparison(self) -> None:
        if self._has_gradients():
            for array in self._arrays_to_compare()[0][:1]:  # all of them carry the same error
                array.wait_to_read()

    def refuse_freshness(self, reason: str) -> None:
        if self._has_gradients():
            self._process_set._core.refuse(self._names()[0], reason)

    def is_left_out_by_all(self) -> bool:
        name = self._names()[0]
        turn = operation.Turn(self._process_set, f"{name}/update", "allreduce_grads()", turn_of=name)
        self.compared = turn.started
        try:
            with turn:
                turn.meet(_NO_UPDATE)
        except MXNetError:
            return False
        return True

    def leave_out_comparison(self, reason: str) -> None:
        """Refuse the comparison of the last allreduce(), if it is still due."""
        if not self.compared:
            self.refuse_comparison(reason)

    def awaited_by(self) -> list[int]:
        core, names = self._process_set._core, self._names()
        come = core.waiting_for_this(names)
        if not self.compared:
            come += core.waiting_for_this([f"{names[0]}/update"], turn_of=names[0])
        return sorted({rank for ranks in come for rank in ranks})

    def refuse_awaited(self, reason: str) -> None:
        if self.compared:
            self.refuse(reason)
        else:
            self.refuse_comparison(reason)

    def _ask(self, exchange: Callable[[str], Any], refuse_next: RefuseNext | None = None) -> Any:
        """Run an exchange under the name of the first operation, which the other ranks start if they do not ask.

        If the exchange fails, it has taken the turn of the step.

        Parameters
        ----------
        exchange : callable
            Given the name, runs the exchange.
        refuse_next : callable, optional
            Given a reason and the result of the exchange, refuses what follows it, in place of the step's operations.
            It is called if this rank does not go on after the exchange, and the other ranks do.
        """
        name = self._names()[0]
        following = operation.Following(lambda: self._first_turn(name, refuse_next))
        try:
            with following:
                return exchange(name)
        except BaseException:
            self.turns += following.is_taken()
            self._exchange_has_failed = following.has_failed()
            raise

    def _first_turn(self, name: str, refuse_next: RefuseNext | None) -> operation.Turn:
        """The turn that the ranks take after an exchange: that of the step's first operation."""
        return operation.Turn(self._process_set, name, f"a step of {self._scope}")

    def _check_values(self) -> None:
        """Raise an error on all ranks if a parameter has values on some ranks only, or needs a gradient without values.

        All ranks make this check together, in the first step and after all ranks have initialized parameters.
        """
        process.rank()  # raises after shutdown()
        process_sets.check(self._process_set)  # it may have been removed
        self._when_moved()
        times = [deferred_init.times(parameter) for parameter in self._parameters]
        lacks = any(parameter._grad is None and parameter.grad_req != "null" for parameter in self._parameters)
        if self._has_met() and not lacks and times == self._times:
            return
        call = f"a step of {self._scope}, whose parameters were just initialized"

        def exchange(numbers: list[int]) -> np.ndarray:
            try:
                return self._ask(lambda name: operation.exchange(self._process_set, name, call, call, numbers))
            except MXNetError as error:
                self.redefer(str(error))
                raise

        self.check_values(exchange)

    def check_values(self, exchange: Callable[[list[int]], np.ndarray]) -> None:
        """Raise an error on all ranks if a parameter needs a gradient and has no values on some rank.

        `exchange`, given this rank's numbers, returns the numbers of all ranks, a row for each rank.
        """
        times = [deferred_init.times(parameter) for parameter in self._parameters]
        are_new = [now != then for now, then in zip(times, self._times)]
        named = [(item.name, item.value) for item in self._named]
        deferred_init.check_values(self._process_set, named, are_new, exchange)
        self._times = times

    def redefer(self, reason: str) -> None:
        """Before the first step: make parameters deferred again, on all ranks, if some rank has no values of them."""
        if not self._has_met():
            deferred_init.redefer(self._parameters, self._times, self.have_values, reason)

    def __getstate__(self) -> dict:
        return {**self.__dict__, "compared": [None]}
