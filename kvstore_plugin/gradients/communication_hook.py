"""Communication hooks: a user's function reduces the buckets of a trainer's gradients, instead of this package.

A hook is called for each bucket of a step, in the same order on all ranks, in the thread that takes the step. The
backward pass may still be running: MXNet's engine computes the gradients, and the sums that the hook starts, later.

A bucket takes one turn in a step, in three parts. The first part is a comparison: the gradients wait until all ranks
are known to take the same step, and carry an error otherwise. The second part is the operations of the hook. The third
part is another comparison, of the number of operations that the hook has started. It follows after the hooks of all
buckets, so a hook that fails on one rank fails the step for all gradients of all ranks.

In the first step the ranks also exchange this number, and expect the same number in later steps. So a rank that refuses
a later step, or whose hook fails, knows which operations the other ranks start and wait for. Before a hook starts more
operations than expected, its rank asks the other ranks. A rank whose hook ends without more operations refuses this
question. If all ranks ask, they exchange the number again.

(The idea is from PyTorch's communication hooks of DistributedDataParallel.)
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Sequence

import numpy as np

from ..compat import arrays, errors
from ..compat.mxnet import MXNetError, NDArray, Parameter, mx
from ..coordination import hook_operations, operation
from ..coordination.hook_operations import HookOperations
from ..world import process
from ..world.process_set import ProcessSet
from .bucket_plan import Comparison, Operation, Reduction

_FAILED = 1  # sent in the exchange of the number by a rank whose hook has failed


class GradientBucket:
    """Gradients that a communication hook reduces over the workers: the argument of `communication_hook`.

    The hook replaces the values of `arrays` by the same bits on all workers, usually by `scale` times the sums over the
    workers. It may start `allreduce`, `broadcast`, `reducescatter` and their other forms over `process_set`. These
    operations are matched by their order in the hook, so each worker must start the same operations in the same order.
    When the hook is called, the arrays may not be computed yet: a hook that only calls operations and MXNet's operators
    never waits.

    Attributes
    ----------
    index : int
        The number of the bucket, from 0, among the buckets of its process set; the same on all workers. After
        parameters were frozen, cast or moved, the bucket of this number may have other parameters.
    arrays : list of NDArray
        The gradients, dense, of one device, to be changed in place. With several devices they are the sums over this
        worker's devices; each device gets a copy of the result.
    parameters : list of Parameter
        The parameters of `arrays`.
    names : list of str
        Names of the parameters that are the same on all workers.
    process_set : ProcessSet
        The workers that train these parameters.
    scale : float
        The factor by which the hook multiplies the sums over the workers: 1 / workers if the trainer expects means.
    priority : int
        A value for the argument `priority` of operations: higher if the next forward pass needs the parameters earlier.

    Examples
    --------
    >>> def halve(bucket):
    ...     for gradient in bucket.arrays:
    ...         gradient *= 0.5
    ...     bucket.allreduce_()
    >>> trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", communication_hook=halve)
    >>> with autograd.record():
    ...     loss = loss_of(net(images), labels).mean()
    >>> loss.backward()
    >>> trainer.step(1)
    """

    def __init__(
        self,
        reduction: Reduction,
        planned: Operation,
        index: int,
        gradients: Sequence[NDArray],
        when_updated: dict[Any, Callable[[], None]],
    ) -> None:
        self.index = index
        self.arrays: list[NDArray] = list(gradients)
        self.parameters: list[Parameter] = [member.parameter for member in planned.members]
        self.names: list[str] = [member.label for member in planned.members]
        self.process_set: ProcessSet = reduction.process_set
        self.scale: float = reduction.scale
        self.priority: int = max(member.priority for member in planned.members)
        self._push_in_place = planned.push_in_place
        # Functions without arguments, by keys that the hook chooses. They are called after the updates of the step,
        # unless the step fails or is skipped on all workers. The buckets of a process set share this dict.
        self._when_updated = when_updated

    def allreduce_(self) -> None:
        """Reduce all `arrays` in place, as the trainer does without a hook. Returns at once.

        Raises
        ------
        RuntimeError
            The method was called outside of a hook.
        """
        if hook_operations.running() is None:
            raise RuntimeError(
                "GradientBucket.allreduce_() was called outside of a communication hook. Call it in the hook, or use "
                "grouped_allreduce_()."
            )
        with operation.named(self.process_set, None, "GradientBucket.allreduce_") as turn:
            if self._push_in_place is not None:
                turn.push(self._push_in_place)
                return
            handles = arrays.handles(self.arrays)
            turn.push(turn.core.push_group, handles, handles, "sum", self.scale, self.priority)

    def __repr__(self) -> str:
        return f"GradientBucket({self.index}, {', '.join(self.names)})"


class HookedOperation:
    """The operation of a bucket that a hook reduces.

    Parameters
    ----------
    reduction : Reduction
        Its attribute `hook` is the hook.
    planned : Operation
        The operation that would reduce the bucket without a hook.
    number : int
        The number of the bucket.
    counts : dict of int
        Number of operations that the hook starts, by the bucket's name; the same names on all ranks.
    when_updated : dict of callable
        Functions to call after the updates of this step.

    Attributes
    ----------
    started : list
        Not empty if this rank has taken or refused the turn of this step.
    """

    def __init__(
        self,
        reduction: Reduction,
        planned: Operation,
        number: int,
        counts: dict[str, int],
        when_updated: dict[Any, Callable[[], None]],
    ) -> None:
        self._reduction = reduction
        self._planned = planned
        self._number = number
        self._counts = counts
        self._when_updated = when_updated
        self._process_set = reduction.process_set
        self._name = planned.name
        self._comparison = Comparison(reduction.process_set)
        self._priority = max(member.priority for member in planned.members)
        self._run = self._new_run()
        self._has_met = False  # whether this rank has exchanged the number in this turn, or need not do so
        self._may_ask = False  # whether this rank may still ask, in this turn, if all ranks start more operations
        self.started: list[Any] = []
        self._has_ended = True  # whether this rank has taken or refused all parts of the last turn

    def push(self, label: str) -> None:
        """Begin the turn of this step, and run the hook. After an error `started` tells whether the turn has begun."""
        self._begin()
        try:
            self._comparison.push(self.started, self._name, self._gradients(), self._priority, label)
        except BaseException as error:
            if operation.must_refuse(self.started, error):
                self._process_set._core.refuse(self._name, errors.reason_of(error))
            self.started.append(None)
            raise
        try:
            with arrays.not_recorded(), self._run.running():
                self._call()
        except BaseException as error:
            self._meet_after(error)
            raise
        fewer = "its communication hook has started fewer operations"
        self._meet(0, fewer, lambda: self._refuse_awaited(fewer))

    def end(self) -> None:
        """End the turn: the gradients wait until the hook has run on all ranks, or carry the error of a rank."""
        name = _end_of(self._name)
        label = f"the end of a communication hook that has started {self._run.by_hook} operations"
        started: list[Any] = []
        try:
            self._has_ended = True
            self._comparison.push(started, name, self._gradients(), self._priority, label, turn_of=self._name)
        except BaseException as error:
            if operation.must_refuse(started, error):
                self._refuse_end(errors.reason_of(error))
            raise

    def _refuse_end(self, reason: str) -> None:
        self._process_set._core.refuse(_end_of(self._name), reason, turn_of=self._name)

    def refuse(self, reason: str) -> None:
        """Refuse the turn of a step."""
        self._process_set._core.refuse(self._name, reason)
        self.begin_again()
        self.refuse_rest(reason)

    def refuse_rest(self, reason: str) -> None:
        """Refuse all parts of the last turn that this rank has not taken. A no-op if the turn has ended."""
        if self._has_ended:
            return
        self._has_ended = True
        if not self._has_met:
            self._has_met = True
            self._process_set._core.refuse(_meeting_of(self._name), reason)
        self._refuse_question(reason)
        self._refuse_operations(self._counts.get(self._name, 0), reason)
        self._refuse_end(reason)

    @staticmethod
    def reason(error: BaseException) -> str:
        """The reason that the other ranks get after push() has failed."""
        return f"its communication hook has failed with {type(error).__name__}: {error}"

    def begin_again(self) -> None:
        """Record that another call has taken the first part of a turn."""
        self._begin()
        self.started.append(None)

    def _begin(self) -> None:
        self._run = self._new_run()
        self._has_met = self._may_ask = self._name in self._counts
        self._has_ended = False

    def _new_run(self) -> HookOperations:
        return HookOperations(self._process_set, self._name, self._counts.get(self._name), self._ask_for_more)

    def _ask_for_more(self) -> None:
        """Wait until the hook starts more operations than expected on all ranks. Then this rank expects no number.

        Raises
        ------
        MXNetError
            The hook has ended on another rank, or has failed there.
        """
        expected = self._counts[self._name]
        if not self._may_ask:  # the hook has caught the error of an earlier question
            raise MXNetError(
                f"The communication hook has started different numbers of operations for one bucket: more than "
                f"{expected} on rank {process.rank()}. Start the same operations in the same order on all workers."
            )
        self._may_ask = False
        answer = mx.nd.zeros((1,))
        handles = arrays.handles([answer])
        label = f"a communication hook that starts more than {expected} operations for one bucket"
        try:
            push = self._process_set._core.push_allreduce
            push(_question_of(self._name), handles, handles, "sum", 1.0, self._priority, label, turn_of=self._name)
            answer.wait_to_read()
        except MXNetError as error:
            raise MXNetError(
                f"The communication hook has started different numbers of operations for one bucket: more than "
                f"{expected} on rank {process.rank()}, but not on all workers: {error}. Start the same operations in "
                "the same order on all workers."
            ) from error
        del self._counts[self._name]
        self._has_met = False

    def _gradients(self) -> list[NDArray]:
        return [gradient for member in self._planned.members for gradient in member.parameter._grad]

    def _call(self) -> None:
        """Call the hook, with one array for each parameter."""
        replicas = [member.parameter._grad for member in self._planned.members]
        totals = [arrays.total(array) for array in replicas]
        bucket = GradientBucket(self._reduction, self._planned, self._number, totals, self._when_updated)
        result = self._reduction.hook(bucket)
        if result is not None:
            raise TypeError(
                f"The communication hook has returned {type(result).__name__}, but its result is not used. Let it "
                "change bucket.arrays in place and return None."
            )
        for total, held in zip(totals, replicas):
            for gradient in held if len(held) > 1 else ():
                arrays.copy(total, gradient)

    def _meet_after(self, error: BaseException) -> None:
        """Like `_meet`, after the hook has failed on this rank. Then refuse the rest of the turn."""
        reason = self.reason(error)
        with contextlib.suppress(MXNetError):  # the caller raises the hook's error instead
            self._meet(_FAILED, reason, lambda: self._refuse_awaited(reason))
        self.refuse_rest(reason)

    def _meet(self, state: int, reason: str, look: Callable[[], None] | None = None) -> None:
        """If no number of operations is expected yet, tell the other ranks how many the hook has started.

        This rank refuses operations that only other ranks start, and gives the reason.

        Raises
        ------
        MXNetError
            The hook has started different numbers of operations, or another rank has refused the step.
        """
        self._refuse_question(reason)
        if self._has_met:
            self._refuse_operations(self._counts[self._name], reason)  # other ranks may wait for them
            return
        self._has_met = True
        call = f"the first run of a communication hook, on {self._name}"
        met = operation.exchange(
            self._process_set, _meeting_of(self._name), call, call, [self._run.started, state], look=look
        )
        counts, failed = met[:, 0], met[:, 1].astype(bool)
        complete = sorted(set(counts[~failed].tolist()))
        self._refuse_operations(int(counts.max()), reason)
        if len(complete) == 1:
            self._counts[self._name] = complete[0]
        elif complete:
            ranks = [int(np.flatnonzero(~failed & (counts == one))[0]) for one in complete[:2]]
            first, second = (f"{one} on rank {self._process_set.ranks[rank]}" for one, rank in zip(complete, ranks))
            raise MXNetError(
                f"The communication hook has started different numbers of operations for one bucket: {first}, but "
                f"{second}. Start the same operations in the same order on all workers."
            )

    def _refuse_question(self, reason: str) -> None:
        """Answer ranks that start more operations than expected: this rank does not."""
        if self._may_ask:
            self._may_ask = False
            self._process_set._core.refuse(_question_of(self._name), reason, turn_of=self._name)

    def _refuse_operations(self, count: int, reason: str) -> None:
        """Refuse those of the hook's first `count` operations that this rank has not started."""
        while self._run.started < count:
            self._process_set._core.refuse(self._run.next_name(), reason, turn_of=self._name)

    def _refuse_awaited(self, reason: str) -> None:
        """Refuse the operations that other ranks have started and this rank has not."""
        while True:
            name = hook_operations.name_of(self._name, self._run.started)
            if not self._process_set._core.waiting_for_this([name], turn_of=self._name)[0]:
                return
            self._refuse_operations(self._run.started + 1, reason)


def _meeting_of(name: str) -> str:
    """The name of the exchange in which ranks tell how many operations the hook has started."""
    return f"{name}/hooked"


def _question_of(name: str) -> str:
    """The name of the operation that asks whether all ranks start more operations than expected."""
    return f"{name}/more"


def _end_of(name: str) -> str:
    """The name of the comparison that ends the turn of a bucket."""
    return f"{name}/end"
