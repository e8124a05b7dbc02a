"""join: training goes on where workers run out of data at different steps.

A worker that has left the loop stands in for itself in the steps of the others: it contributes zeros to the sums of
gradients and makes the same updates, so that its parameters, optimizer states and counters, and its share of an
optimizer that is divided over the workers, stay what they would be if it had gone on. For that all workers tell each
other, at the beginning of each step, who takes it and how; nobody does so outside of join().

The idea is that of PyTorch's torch.distributed.algorithms.Join.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, NamedTuple

import numpy as np

from ..compat import arrays
from ..compat.mxnet import MXNetError, Parameter, fill_with_zeros
from ..coordination import operation, step_label
from ..parameters.naming import described_within
from ..world import process
from ..world.process_set import ProcessSet, global_process_set
from .trainer import DistributedTrainer

_CALL = "a step in join()"
# What a worker does next, as it tells the others.
_ENDED, _STEP, _ALLREDUCE, _UPDATE = range(4)
_METHODS = {_STEP: "step()", _ALLREDUCE: "allreduce_grads()", _UPDATE: "update()"}

_running: dict[ProcessSet, join] = {}


class _Plan(NamedTuple):
    """What the workers that have not ended are about to do, all the same."""

    kind: int
    trainer: int  # number in the arguments of join()
    factor: float  # what the update multiplies gradients by, of step() and update()
    learning_rate: float  # 0.0 where a scheduler has it
    ignore_stale: bool

    def numbers(self) -> list[int]:
        """The same, as numbers that travel."""
        floats = np.array([self.factor, self.learning_rate]).view(np.int64).tolist()
        return [self.kind, self.trainer, *floats, int(self.ignore_stale)]

    @classmethod
    def of(cls, numbers: np.ndarray) -> _Plan:
        """The plan that has these numbers."""
        kind, trainer, *floats, ignore_stale = numbers.tolist()
        factor, learning_rate = np.array(floats, dtype=np.int64).view(np.float64).tolist()
        return cls(kind, trainer, factor, learning_rate, bool(ignore_stale))

    def __str__(self) -> str:
        if self.kind == _ENDED:
            return "has ended"
        text = f"calls {_METHODS[self.kind]} of trainer {self.trainer}"
        if self.kind != _ALLREDUCE:
            text += f" with gradients times {self.factor!r}"
        if self.learning_rate:
            text += f" and learning rate {self.learning_rate!r}"
        return text + (", ignore_stale_grad=True" if self.ignore_stale else "")


_NOTHING = _Plan(_ENDED, 0, 0.0, 0.0, False)


class join:
    """A context in which workers may take different numbers of steps. Collective; each step in it waits.

    All workers write ``with join(trainer):`` around their training loops. Who ends its loop waits at the end of the
    ``with`` block for the others, and meanwhile takes part in their steps: it contributes zeros to the sums of
    gradients, and makes the same updates. When the last worker has ended, all go on, with the same parameters and
    optimizer states. Inside, step(), allreduce_grads() and update() of these trainers wait for the same call of all
    workers that have not ended.

    Parameters
    ----------
    *trainers : DistributedTrainer
        All that are stepped in the loop, of one process set, in the same order on all workers.
    divide_by_initial_world_size : bool, optional
        What gradients are averaged over when workers have ended: by default over all of the process set, as before, so
        that each sample has the same weight in an epoch; False: over those that have not ended. As in PyTorch.

    Attributes
    ----------
    last_rank : int or None
        After the block: the worker, as a global rank, that ended last; of several the highest. None if nobody took a
        step.
    steps : int
        How many updates of the trainers there were in the block, on all workers the same.

    Raises
    ------
    TypeError, ValueError
        A trainer is not a DistributedTrainer, is in a join() already, belongs to another process set than the others,
        or shares parameters with a part of its process set (`parameter_process_sets`).
    MXNetError
        The workers have unequal numbers of devices. Or, in the block, at its beginning or its end: the workers that
        have not ended do not take the same step with the same batch size and learning rate, one calls something else
        that waits (barrier, allreduce_metric, ...) while others are in a step, or one has left the block with an
        exception or has exited.

    Notes
    -----
    The learning rate is told to workers that have ended; what else the loop changes in an optimizer is not. Collective
    operations other than those of the trainers, and metrics, belong behind the block. Between allreduce_grads() and
    update() the gradients may be changed (clipped, say); those who have ended get the result. A worker without any data
    must have initialized its parameters, with their shapes: by in_units and the like, or by a batch of zeros before.

    Examples
    --------
    >>> with kvstore_plugin.join(trainer):
    ...     for data, label in loader:
    ...         with autograd.record():
    ...             loss = loss_function(net(data), label)
    ...         loss.backward()
    ...         trainer.step(batch_size)
    """

    def __init__(self, *trainers: DistributedTrainer, divide_by_initial_world_size: bool = True) -> None:
        self.last_rank: int | None = None
        self.steps = 0
        self._trainers = trainers
        self._divides_by_all = bool(divide_by_initial_world_size)
        self._failed = False  # on all workers: they know, and wait for nothing more
        process.require()
        try:
            self._process_set = _process_set_of(trainers)
        except (TypeError, ValueError) as error:
            operation.waiting(global_process_set, "join").leave_out(str(error), None)
            raise

    def __enter__(self) -> join:
        if self._process_set is None:
            return self
        with operation.waiting(self._process_set, "join") as turn:
            if self._process_set in _running:
                raise ValueError("There is a join() around this one: give all trainers to one join(first, second).")
            scopes = ", ".join(trainer._company.scope for trainer in self._trainers)
            turn.meet(f"join of {scopes}, divide_by_initial_world_size={self._divides_by_all}")
        _running[self._process_set] = self
        self._failed = False
        # Another call that waits, in the block, meets the others' steps, and fails with them. Who catches that is told
        # so in its next step, and nobody takes a turn for this join() any more.
        operation.when_failed[operation.waiting_name(self._process_set)] = self._note_failure
        for trainer in self._trainers:
            trainer._join = self
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._process_set is None:
            return
        try:
            if error is not None:
                self._fail(f"it has left the block with {kind.__name__}: {error}")
            else:
                self._stand_in()
        finally:
            _running.pop(self._process_set, None)
            operation.when_failed.pop(operation.waiting_name(self._process_set), None)
            for trainer in self._trainers:
                trainer._join = None

    def _note_failure(self) -> None:
        self._failed = True

    def take_part(self, trainer: DistributedTrainer, kind: int, factor: float, ignore_stale: bool) -> None:
        """Call a method of a trainer as soon as the others have said that they do the same."""
        number = next(number for number, one in enumerate(self._trainers) if one is trainer)
        plan = _Plan(kind, number, factor, _learning_rate(trainer), ignore_stale)
        self._perform(*self._meet(plan))

    def step(self, trainer: DistributedTrainer, factor: float, ignore_stale: bool) -> None:
        """The trainer's step()."""
        self.take_part(trainer, _STEP, factor, ignore_stale)

    def allreduce_grads(self, trainer: DistributedTrainer, ignore_stale: bool) -> None:
        """The trainer's allreduce_grads()."""
        self.take_part(trainer, _ALLREDUCE, 0.0, ignore_stale)

    def update(self, trainer: DistributedTrainer, factor: float, ignore_stale: bool) -> None:
        """The trainer's update()."""
        self.take_part(trainer, _UPDATE, factor, ignore_stale)

    def _meet(self, mine: _Plan) -> tuple[_Plan, np.ndarray]:
        """What is to be done, and the positions in the process set of those who have not ended."""
        if self._failed:
            raise MXNetError(
                "This join() has failed: the workers have lost step. Leave the block; calls that wait (barrier, "
                "allreduce_metric, ...) belong behind it."
            )
        self._failed = True  # whatever ends this exchange ends it on all workers
        with operation.waiting(self._process_set, "join") as turn:
            rows = turn.meet(_CALL, [*mine.numbers(), _device_count(self._trainers[mine.trainer])])
        rows, devices = rows[:, :-1], rows[:, -1]
        if (devices != devices[0]).any():
            other = int(np.flatnonzero(devices != devices[0])[0])
            raise MXNetError(
                f"join() needs equally many devices on all workers, but rank {self._process_set.ranks[0]} has "
                f"{devices[0]} and rank {self._process_set.ranks[other]} has {devices[other]}."
            )
        active = np.flatnonzero(rows[:, 0] != _ENDED)
        for other in active:
            if (rows[other] != rows[active[0]]).any():
                first, second = (self._process_set.ranks[position] for position in (active[0], other))
                raise MXNetError(
                    f"The workers do not take the same step in join(): rank {first} {_Plan.of(rows[active[0]])}, but "
                    f"rank {second} {_Plan.of(rows[other])}. Give step() the same batch size on all workers, for the "
                    "last, smaller batches too."
                )
        self._failed = False
        return (_Plan.of(rows[active[0]]) if active.size else _NOTHING), active

    def _stand_in(self) -> None:
        """Take part in the steps of the others until all have ended."""
        while True:
            plan, active = self._meet(_NOTHING)
            if not active.size:
                return
            trainer = self._trainers[plan.trainer]
            try:
                with _without_local_parameters(trainer):
                    if plan.kind != _UPDATE:
                        _contribute_nothing(_shared(trainer), plan.ignore_stale)
                    if plan.learning_rate:
                        trainer._optimizer.lr = plan.learning_rate
                    self._perform(plan, active)
            except BaseException as error:
                self._fail(f"it has left join() with {type(error).__name__}: {error}")
                raise

    def _fail(self, reason: str) -> None:
        """Let the others' next step fail."""
        if not self._failed and process.is_initialized():
            self._failed = True
            operation.waiting(self._process_set, "join").leave_out(reason, None)

    def _perform(self, plan: _Plan, active: np.ndarray) -> None:
        trainer = self._trainers[plan.trainer]
        size = self._process_set.size()
        self.last_rank = self._process_set.ranks[active[-1]]
        averages = trainer._options.reduce_method == "mean" and not self._divides_by_all
        ratio = size / len(active) if averages else 1.0
        if plan.kind == _STEP:
            trainer._step(plan.factor * ratio, plan.ignore_stale)
        elif plan.kind == _ALLREDUCE:
            trainer._allreduce(plan.ignore_stale)
            if ratio != 1.0 and not trainer._options.sums_of_means:
                _scale(_shared(trainer), ratio)
        else:
            if len(active) < size:
                self._broadcast_gradients(trainer, int(active[0]))
            trainer._apply(plan.factor * (ratio if trainer._options.sums_of_means else 1.0), plan.ignore_stale)
        self.steps += plan.kind != _ALLREDUCE

    def _broadcast_gradients(self, trainer: DistributedTrainer, root: int) -> None:
        """Give those who have ended what the others have made of the gradients since they were reduced."""
        core = self._process_set.core
        for parameter, name, position in _shared(trainer):
            if parameter._grad_stype != "default":
                raise MXNetError(
                    f"The gradient of {described_within(name, parameter)} is {parameter._grad_stype}: in join(), where "
                    "workers have ended, use step() and not allreduce_grads() and update()."
                )
            if parameter._grad is not None:
                handles = arrays.handles(parameter._grad)
                core.push_broadcast(f"{trainer._company.scope}/join/{name}", handles[0], handles, root, -position)


class _Absent:
    """Stands in a trainer's list for a parameter that no update may touch."""

    grad_req = "null"
    _data = _grad = None


def _process_set_of(trainers: Any) -> ProcessSet | None:
    """The process set of the trainers, or None where this worker is not in it."""
    if not trainers:
        raise TypeError(
            "join() needs the trainers that the loop steps: write `with join(trainer):` around the loop, in place of a "
            "call after it."
        )
    for trainer in trainers:
        if not isinstance(trainer, DistributedTrainer):
            raise TypeError(f"join() needs DistributedTrainers, not {type(trainer).__name__}.")
        trainer._company.check_undivided("join()")
        if trainer._is_elastic:
            raise ValueError("join() cannot be used with elastic=True: it counts on all workers to stay.")
    if len({id(trainer) for trainer in trainers}) < len(trainers):
        raise ValueError("join() was given a trainer twice.")
    first = trainers[0]._company
    for trainer in trainers:
        if trainer._company.process_set is not first.process_set:
            raise ValueError(
                f"The trainers of a join() must have one process set, not {first.process_set!r} and "
                f"{trainer._company.process_set!r}."
            )
    return first.process_set if first.scope else None


def _shared(trainer: DistributedTrainer) -> list[tuple[Parameter, str, int]]:
    """The parameters that the workers train together, with their names and positions."""
    return [(one.value, one.name, one.position) for share in trainer._shares for one in share.named]


@contextlib.contextmanager
def _without_local_parameters(trainer: DistributedTrainer) -> Iterator[None]:
    """Let the trainer's updates leave alone what only this worker trains."""
    shared = {id(parameter) for parameter, _, _ in _shared(trainer)}
    given = trainer._params
    trainer._params = [one if id(one) in shared else _Absent() for one in given]
    try:
        yield
    finally:
        trainer._params = given


def _contribute_nothing(shared: list[tuple[Parameter, str, int]], ignore_stale: bool) -> None:
    """Make this worker's gradients zeros, or stale ones where these count as zeros and nobody need use a parameter."""
    for parameter, _, _ in shared:
        if parameter._grad is None:
            continue
        for weight, gradient in zip(parameter._data, parameter._grad):
            weight._fresh_grad = not ignore_stale
            if not ignore_stale:
                fill_with_zeros(gradient)


def _scale(shared: list[tuple[Parameter, str, int]], ratio: float) -> None:
    with arrays.not_recorded():
        for parameter, _, _ in shared:
            for gradient in parameter._grad or ():
                gradient *= ratio


def _device_count(trainer: DistributedTrainer) -> int:
    return max((len(parameter._data or ()) for parameter, _, _ in _shared(trainer)), default=0) or 1


def _learning_rate(trainer: DistributedTrainer) -> float:
    return step_label.learning_rate_of(trainer._optimizer) or 0.0
