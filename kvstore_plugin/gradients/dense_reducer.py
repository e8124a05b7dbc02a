"""Reduces the dense gradients of one trainer to their mean over the ranks of a process set.

The ranks have agreed on the operations (planned_reducer.py). `DenseReducer` pushes them in each step, and refuses them
if the step fails on this rank. The ranks exchange the stale flags of a step under the name of the first operation, like
questions about the plan.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from typing import Any, Callable, Sequence

import numpy as np

from ..compat import errors
from ..compat.mxnet import MXNetError, NDArray, Parameter, fill_with_zeros
from ..coordination import agreement
from ..coordination.operation import Turn, exchange, late_refusals, settle_refusals
from ..parameters import load_tracking, trainer_state
from ..world import process
from . import equal_batches
from .bucket_memory import GradientMemory
from .bucket_plan import BucketMember, Operation
from .fence import Fence, SumsCheck
from .planned_reducer import PlannedReducer
from .reducer import Comparing, RefuseNext, Task
from .squares import Piece, Squares, share_of

_data_of = operator.attrgetter("_data")
_grad_of = operator.attrgetter("_grad")
_priority_of = operator.attrgetter("priority")

living: weakref.WeakSet[DenseReducer] = weakref.WeakSet()  # for the statistics


class DenseReducer(PlannedReducer):
    """Reduces the dense gradients of one trainer over one process set.

    Parameters
    ----------
    task : Task
        The dense parameters, and how to reduce their gradients.
    memory : GradientMemory, optional
        A GradientMemory whose own() was called with the parameters. By default a new one; own_gradients() calls own().
    """

    def __init__(self, task: Task, memory: GradientMemory | None = None) -> None:
        super().__init__(task, memory)
        # This step's operations, each with the keys to update; None: all keys.
        self._to_update: list[tuple[Operation, set[int] | None]] = []
        self._sums = SumsCheck(task.scope)
        self._compares = Comparing.NOTHING  # the argument of the last allreduce()
        self._fence = Fence(self._parameters, task.scope)  # for update(), whose compare() involves all arrays
        self._equal_batches: equal_batches.EqualBatches | None = None  # the check of the first steps; None afterwards
        living.add(self)

    def watch_batches(self) -> None:
        """Warn once if the first steps show that all workers train on the same batches."""
        self._equal_batches = equal_batches.of(self._reduction)

    def _moved(self) -> bool:
        """Whether a parameter has new gradients since the last step: after cast, reset_ctx, grad_req or its first use.

        Not after a reset_ctx() that concerns this rank alone: then bucket_memory.py keeps the gradients.
        """
        if not self._operations or self._world != (process.generation, self._process_set.process_set_id):
            return True
        return not all(map(operator.is_, map(_grad_of, self._parameters), self._seen))

    def allreduce(self, ignore_stale: bool, label: str, compares: Comparing) -> None:
        if late_refusals:  # of an exchange that a signal handler has interrupted in an earlier step
            settle_refusals(self._names()[0])
        self.is_begun, self.is_begun_in_part, self._pending = False, False, None
        self._compares = compares
        self._when_updated.clear()
        if self._moved():
            self._look_again()
        elif not all(map(operator.is_, map(_data_of, self._parameters), self._seen_weights)):
            self._follow_weights()
        if load_tracking.any_of(self._parameters):
            self._meet_loaded()
        operations = self._operations
        if ignore_stale:
            operations, members = self.share_freshness(clear=True)
            keys = {member.key for member in members}
        if compares is Comparing.UPDATE:
            self._sums.begin()
        if self._reduction.store_optimizer is not None:
            self._to_update = [(operation, keys if ignore_stale else None) for operation in operations]
        chosen = set(map(id, operations))
        self.fences = self._fences
        if self._fences and compares is Comparing.UPDATE:
            self.fences = [self._fence]
            self._fence.ends_step = bool(chosen)
        for fence, operation in zip(self._fences, self._operations):
            fence.ends_step = id(operation) in chosen
        watch, self._equal_batches = self._equal_batches if not ignore_stale else None, None
        if watch is not None:
            watch.before(operations)
        self._push_all(operations, label)
        if watch is not None:
            self._equal_batches = watch.after()

    def _meet_loaded(self) -> None:
        """Wait until all ranks have loaded parameters or states. Uses the turn of the next step's first operation.

        Raises
        ------
        MXNetError
            Another rank has not loaded them, or has loaded others. All ranks get the error; on ranks that have loaded
            nothing the gradients carry it. Or a value on this rank carries an error.
        """
        label = load_tracking.label(self._parameters)
        numbers = [] if self.values_may_differ else load_tracking.numbers_of(self._named)

        def compare(name: str) -> None:
            met = exchange(self._process_set, name, label, label, numbers)
            if numbers:
                load_tracking.check_numbers(self._named, met, self._process_set)

        self._ask(compare)
        load_tracking.forget(self._parameters)

    def _push_all(self, operations: Sequence[Operation], label: str) -> None:
        # By these marks of operations the core counts steps, and measures the time of sums and updates. "some" marks
        # the operations of a step, "last" the operation whose gradients, near the input, backward writes last.
        mark, priorities = process.core.set_step_phase, [*map(_priority_of, operations)]
        last = priorities.index(max(priorities)) if operations else 0
        begun: list[Any] = []  # grows by an element in the instruction that starts an operation, see operation.start()
        turns, is_hooked = self.turns + 1, self._reduction.hook is not None
        if is_hooked:
            for operation in operations:
                operation.hooked.started = []
        try:
            self.compared = self._none_compared()
            mark("some")
            before = operations if is_hooked else operations[:last]
            begun.extend(map(operator.methodcaller("push", label), before))
            mark("last")
            begun.extend(map(operator.methodcaller("push", label), operations[len(before) :]))
            # Buckets end after all hooks: if the last hook fails, no worker uses a gradient.
            if is_hooked:
                for number, operation in enumerate(operations):
                    mark("last" if number == last else "some")
                    operation.hooked.end()
            self.turns, self.is_begun, self._pending = turns, True, None
        except BaseException as error:  # including those of signal handlers
            self.turns, self.is_begun, self._pending = turns, len(begun) == len(operations), None
            # With a hook no rank uses a gradient; with an optimizer on the store, owners send the weights again.
            is_alone = not is_hooked and self._reduction.store_optimizer is None
            self.is_begun_in_part = is_alone and bool(begun) and not self.is_begun
            self._refuse_unpushed(operations, len(begun), error)
            raise
        finally:
            mark("")

    def _refuse_unpushed(self, operations: Sequence[Operation], pushed: int, error: BaseException) -> None:
        """After an error in a step whose first `pushed` operations have started: refuse the rest of the step."""
        reason = errors.reason_of(error)
        if pushed < len(operations):
            # The failed operation has taken its turn if its hook has started an operation; if it has no hook, if
            # NaiveEngine has run it or its update has begun.
            failed = operations[pushed]
            has_begun = isinstance(error, MXNetError)
            if failed.hooked is not None:
                reason = failed.hooked.reason(error)
                has_begun = bool(failed.hooked.started)
            elif failed.update is not None:
                has_begun = has_begun or failed.update.is_begun()
            pushed += has_begun
        self._refuse_rest(operations[:pushed], operations[pushed:], reason)

    def update(self) -> None:
        if not self._to_update:
            return
        mark = process.core.set_step_phase  # for the statistics, as in _push_all()
        try:
            begun = [(one.update, keys) for one, keys in self._to_update]
            # Counts for learning rate schedules; empty if the order of updates makes no difference to them.
            reached = self._reduction.store_optimizer.counts_reached(begun)
            mark("weights")
            while self._to_update:
                operation, keys = self._to_update[0]
                operation.update.apply(keys, reached)
                self._to_update.pop(0)
        except BaseException as error:  # including those of signal handlers
            self.refuse_update(f"the update has failed on that rank: {error}")
            raise
        finally:
            mark("")

    def pieces(self, only_fresh: bool) -> list[Piece]:
        if self._reduction.store_optimizer is not None:
            return [Piece(gradient, 0, gradient.size) for gradient in self.to_scale(only_fresh)]
        in_order = sorted(self._operations, key=_priority_of)
        rank, size = self._process_set.rank(), self._process_set.size()
        shares = (share_of([one._grad[0] for one in _counted([made], only_fresh)], rank, size) for made in in_order)
        return [piece for share in shares for piece in share]

    def to_scale(self, only_fresh: bool) -> list[NDArray]:
        if self._reduction.store_optimizer is not None:
            in_order = sorted(self._to_update, key=lambda one: one[0].priority)
            return [gradient for one, keys in in_order for gradient in one.update.own_gradients(keys)]
        return [gradient for parameter in _counted(self._operations, only_fresh) for gradient in parameter._grad]

    def updated(self) -> None:
        while self._when_updated:
            self._when_updated.popitem()[1]()

    def refuse_update(self, reason: str) -> None:
        begun, self._to_update = self._to_update, []
        for operation, _ in begun:
            if operation.update.is_begun():
                operation.update.refuse_weights(reason)

    def drop_updates(self) -> None:
        for operation, _ in self._to_update:
            operation.update.drop()
        self._to_update = []

    def _refuse_comparison_of(self, reason: str) -> None:
        """Refuse the comparison of a refused step, if the last step had a comparison: other ranks will start one."""
        self.compared = self._none_compared()
        self.leave_out_comparison(reason)

    def _none_compared(self) -> list[Any]:
        """For `compared`, in a step whose comparison has not started."""
        return [] if self._compares is not Comparing.NOTHING and self._operations else [None]

    def _refuse_rest(self, pushed: Sequence[Operation], others: Sequence[Operation], reason: str) -> None:
        """Refuse the rest of a step after some of its operations were pushed."""
        self._to_update = [(one, None) for one in pushed if one.update is not None]
        self.refuse_update(reason)
        for operation in pushed:
            if operation.hooked is not None:
                operation.hooked.refuse_rest(reason)
        for operation in others:
            operation.refuse(self._process_set._core, reason)
        self._refuse_comparison_of(reason)

    def compare(self, label: str) -> None:
        failure = self._sums.failure() if self._compares is Comparing.UPDATE else None
        if failure is not None:
            self.refuse_comparison(failure)
            _clear_errors(self._parameters)
            raise MXNetError(failure)
        super().compare(label)

    def sum_with_comparison(self, squares: Squares, add_up: Callable[[int], None]) -> None:
        super().sum_with_comparison(squares, add_up)
        if self._compares is Comparing.NOTHING:
            self._compares = Comparing.STEP  # if this rank refuses the next step, it refuses a comparison too

    def refuse(self, reason: str) -> None:
        self.leave_out_comparison(reason)
        self.redefer(reason)
        self.is_begun = self.is_begun_in_part = False
        self.turns += 1
        self.refuse_operations(reason)

    def share_freshness(self, clear: bool = False) -> tuple[list[Operation], list[BucketMember]]:
        """The members that are fresh on some worker, and their operations.

        `clear`: a step follows with these operations, and the members' stale gradients here are set to zero.
        """
        active = [member for operation in self._operations for member in operation.members]
        if not active:
            return [], []
        flags = [trainer_state.is_fresh(member.parameter) for member in active]
        _, fresh = self._ask(
            lambda exchange_name: agreement.extremes(self._process_set, exchange_name, flags),
            self.refuse_operations if clear else _refuse_nothing,
        )
        chosen, used = _with_fresh(self._operations, fresh)
        for member in used:
            for weight, gradient in zip(member.parameter._data, member.parameter._grad):
                if not weight._fresh_grad:
                    if clear:
                        fill_with_zeros(gradient)
                    weight._fresh_grad = True
        return chosen, used

    def _ask(self, exchange: Callable[[str], Any], refuse_next: RefuseNext | None = None) -> Any:
        turns = self.turns
        try:
            return super()._ask(exchange, refuse_next)
        except BaseException as error:
            sentence = f"The ranks do not take the same step of {self._scope}: {errors.reason_of(error)}"
            if self.turns != turns:
                self._pending = None
                if self._exchange_has_failed and refuse_next is not _refuse_nothing:
                    self.refuse_after_failed_exchange(sentence)
            if isinstance(error, MXNetError) or type(error) is RuntimeError:
                raise MXNetError(sentence) from None  # the message contains its text
            raise

    def _first_turn(self, name: str, refuse_next: RefuseNext | None) -> Turn:
        turn = _FirstTurn(self, refuse_next, self._process_set, name, f"a step of {self._scope}")
        self._pending = (turn, refuse_next) if refuse_next not in (None, _refuse_nothing) else None
        return turn

    def refuse_after_failed_exchange(self, reason: str) -> None:
        """Refuse the rest of a step whose first turn an exchange has taken, which has failed on all ranks."""
        # Other ranks may wait for the weights of the first operation, and for the later operations.
        if self._operations and self._operations[0].hooked is not None:
            self._operations[0].hooked.begin_again()
        self._refuse_rest(self._operations[:1], self._operations[1:], reason)

    def refuse_operations(self, reason: str, met: np.ndarray | None = None) -> None:
        """Refuse the operations that the other ranks start in this step.

        `met`: the freshness of the gradients on all ranks, if it decides about the operations.
        """
        pending, self._pending = self._pending, None
        if met is None and pending is not None and pending[0].met is not None:  # the exchange has begun
            turn, refuse_next = pending
            refuse_next(reason, turn.met)
            return
        operations = self._operations
        if met is not None:
            operations = _with_fresh(self._operations, met.max(axis=0))[0]
        if not self._operations:
            self._process_set._core.refuse(self._exchange_name, reason)
        for operation in operations:
            operation.refuse(self._process_set._core, reason)
        self._refuse_comparison_of(reason)

    def __getstate__(self) -> dict:
        return {
            **super().__getstate__(),
            "_to_update": [],
            "_equal_batches": None,
        }


def _refuse_nothing(reason: str, met: np.ndarray) -> None:
    """For an exchange in update(), which no operation follows."""


class _FirstTurn(Turn):
    """The turn of a step's first operation after an exchange. A refusal is one of the whole step."""

    __slots__ = ("_reducer", "_refuse_next")

    def __init__(self, reducer: DenseReducer, refuse_next: RefuseNext | None, *given: Any) -> None:
        super().__init__(*given)
        self._reducer = reducer
        self._refuse_next = refuse_next

    def _post_refusal(self, reason: str) -> None:
        if self._refuse_next is None:
            self._reducer.refuse_operations(reason)
        else:
            self._refuse_next(reason, self.met)

    def _after_failed_meeting(self, reason: str) -> None:
        self._reducer.refuse_after_failed_exchange(reason)


def _with_fresh(operations: Sequence[Operation], fresh: Sequence[bool]) -> tuple[list[Operation], list[BucketMember]]:
    """The operations with fresh gradients, and their fresh members. `fresh`: a flag for each member."""
    flags, chosen, used = iter(fresh), [], []
    for operation in operations:
        of_operation = [member for member in operation.members if next(flags)]
        if of_operation:
            chosen.append(operation)
        used += of_operation
    return chosen, used


def _counted(operations: Sequence[Operation], only_fresh: bool) -> list[Parameter]:
    """Parameters of operations, in the same order on all ranks; with `only_fresh` only those with fresh gradients."""
    active = [member.parameter for operation in operations for member in operation.members]
    return [member for member in active if not only_fresh or trainer_state.is_fresh(member)]


def _clear_errors(parameters: Sequence[Parameter]) -> None:
    """Read the gradients: an unread error would stay in them, and fail all later sums."""
    for parameter in parameters:
        for gradient in parameter._grad or ():
            with contextlib.suppress(MXNetError):
                gradient.wait_to_read()
