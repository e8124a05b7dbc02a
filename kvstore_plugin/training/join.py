"""join: workers may run out of data at different steps.

A worker that has left the loop still participates in the steps of the other workers: it contributes zeros to the sums
of gradients and makes the same updates. So its parameters, optimizer states and counters, and its share of an optimizer
that is divided over the workers, are the same as if it had continued. At the beginning of each step the workers tell
each other which workers take the step and how. Outside of join() there is no such exchange.

The idea is from PyTorch's torch.distributed.algorithms.Join.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Sequence

import numpy as np

from ..compat import arrays
from ..compat.mxnet import MXNetError, fill_with_zeros
from ..coordination import agreement, deadlock_check, operation, step_label
from ..parameters.naming import Named, described_within
from ..world import process
from ..world.process_set import ProcessSet, global_process_set
from .trainer import DistributedTrainer, JoinHook, join_hook, process_set_of

_CALL = "a step in join()"
# A worker's next action, as a number for the exchange.
_ENDED, _STEP, _ALLREDUCE, _UPDATE = range(4)
_METHODS = {_STEP: "step", _ALLREDUCE: "allreduce_grads", _UPDATE: "update"}

_running: dict[ProcessSet, join] = {}


class _Plan(NamedTuple):
    """The next call of the workers that have not ended; must be equal on all of them."""

    kind: int
    trainer: int  # index among the arguments of join()
    factor: float  # factor of the gradients in the update, for step() and update()
    learning_rate: float  # NaN if a scheduler sets it
    ignore_stale: bool

    def numbers(self) -> list[int]:
        """The plan as numbers for the exchange."""
        floats = agreement.as_integers([self.factor, self.learning_rate])
        return [self.kind, self.trainer, *floats, int(self.ignore_stale)]

    @classmethod
    def of(cls, numbers: np.ndarray) -> _Plan:
        """The plan with these numbers."""
        kind, trainer, *floats, ignore_stale = numbers.tolist()
        return cls(kind, trainer, *agreement.as_floats(floats), bool(ignore_stale))

    def __str__(self) -> str:
        if self.kind == _ENDED:
            return "has ended"
        text = f"calls {_METHODS[self.kind]}() of trainer {self.trainer}"
        if self.kind != _ALLREDUCE:
            text += f" with gradients times {self.factor!r}"
        if not math.isnan(self.learning_rate):
            text += f" and learning rate {self.learning_rate!r}"
        return text + (", ignore_stale_grad=True" if self.ignore_stale else "")


_NOTHING = _Plan(_ENDED, 0, 0.0, 0.0, False)


class join:
    """Context manager in which workers may take different numbers of steps. Collective; its steps wait for each other.

    All workers write ``with join(trainer):`` around their training loops. A worker that ends its loop waits at the end
    of the ``with`` block for the other workers, and meanwhile participates in their steps: it contributes zeros to the
    sums of gradients, and makes the same updates. When the last worker has ended, all workers continue, with the same
    parameters and optimizer states. In the block, step(), allreduce_grads() and update() of these trainers wait for the
    same call of all workers that have not ended.

    Parameters
    ----------
    *trainers : DistributedTrainer
        All trainers that the loop steps, of one process set, in the same order on all workers.
    divide_by_initial_world_size : bool, optional
        The workers over which gradients are averaged when some workers have ended. True, the default: all workers of
        the process set, as before, so that each sample has the same weight in an epoch. False: the workers that have
        not ended. As in PyTorch.

    Attributes
    ----------
    last_rank : int or None
        After the block: the global rank of the worker that ended last, the highest rank if several workers did. None if
        no worker took a step.
    steps : int
        The number of the trainers' updates in the block, the same on all workers.

    Raises
    ------
    TypeError, ValueError
        A trainer is not a DistributedTrainer, is in a join() already, belongs to another process set than the first
        trainer, or has parameters in other process sets (`parameter_process_sets`).
    MXNetError
        In the block, at its beginning or its end: the workers that have not ended do not take the same step with the
        same batch size and learning rate; a worker calls something else that waits (barrier, allreduce_metric, ...)
        while others are in a step; or a worker has left the block with an exception or has exited.

    Notes
    -----
    Workers that have ended follow the learning rate, but no other change that the loop makes to an optimizer. Metrics,
    and collective operations other than the trainers', belong after the block. Between allreduce_grads() and update()
    the gradients may be changed (clipped, say); workers that have ended get the result. A worker without any data must
    have initialized its parameters, with their shapes: by in_units and the like, or by an earlier batch of zeros.

    Examples
    --------
    >>> share = mykv.DistributedSampler(len(dataset), even=False)  # rank 0 has one more sample
    >>> with mykv.join(trainer) as joined:
    ...     for images, labels in gluon.data.DataLoader(dataset, batch_size=449, sampler=share):
    ...         with autograd.record():
    ...             loss = loss_of(net(images), labels)
    ...         loss.backward()
    ...         trainer.step(449)  # the same on all workers, even for a smaller last batch
    >>> joined.steps, joined.last_rank  # 899 and 898 samples: rank 1 has ended after 2 steps
    (3, 0)
    """

    def __init__(self, *trainers: DistributedTrainer, divide_by_initial_world_size: bool = True) -> None:
        self.last_rank: int | None = None
        self.steps = 0
        self._trainers = trainers
        self._divides_by_all = bool(divide_by_initial_world_size)
        self._failed = False  # set on all workers together; after that no worker waits in this join()
        process.require()
        try:
            self._hooks = _hooks_of(trainers)
            if not self._divides_by_all and any(hook.has_local_parameters for hook in self._hooks):
                raise ValueError(
                    "divide_by_initial_world_size=False would also scale the gradients of local parameters, which are "
                    "not averaged. Leave it out, or give the local parameters a Trainer of their own."
                )
        except (TypeError, ValueError) as error:
            process_set = next((process_set_of(one) for one in trainers if _is_trainer(one)), global_process_set)
            if process_set.included():
                operation.waiting(process_set, "join").leave_out(str(error), None)
            raise
        # None if this worker is not in the trainers' process set.
        self._process_set = self._hooks[0].process_set if self._hooks[0].scope else None

    def __enter__(self) -> join:
        if self._process_set is None:
            return self
        with operation.waiting(self._process_set, "join") as turn:
            if self._process_set in _running:
                raise ValueError(
                    "A join() must not be inside another join(). Give all trainers to the same join(first, second)."
                )
            scopes = ", ".join(hook.scope for hook in self._hooks)
            turn.meet(f"join of {scopes}, divide_by_initial_world_size={self._divides_by_all}")
        for hook in self._hooks:
            hook.resume()
        _running[self._process_set] = self
        self._failed = False
        # Another blocking call inside the block is matched with the steps of other workers, and both fail. A worker
        # that catches this error gets another error in its next step: no worker continues a join() that has failed.
        operation.when_failed[deadlock_check.waiting_name(self._process_set)] = self._note_failure
        for hook in self._hooks:
            hook.attach(self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._process_set is None:
            return
        try:
            if error is not None:
                self._fail(f"it has left the join() block with {kind.__name__}: {error}")
            else:
                self._stand_in()
        finally:
            _running.pop(self._process_set, None)
            operation.when_failed.pop(deadlock_check.waiting_name(self._process_set), None)
            for hook in self._hooks:
                hook.attach(None)

    def _note_failure(self) -> None:
        self._failed = True

    def take_part(self, trainer: DistributedTrainer, method: str, factor: float, ignore_stale: bool) -> None:
        """Call a method of a trainer once all other active workers have announced the same call."""
        number = next(number for number, one in enumerate(self._trainers) if one is trainer)
        kind = next(kind for kind, name in _METHODS.items() if name == method)
        rate = step_label.learning_rate_of(trainer.optimizer)
        plan = _Plan(kind, number, factor, math.nan if rate is None else rate, ignore_stale)
        self._perform(*self._meet(plan))

    def _meet(self, mine: _Plan) -> tuple[_Plan, np.ndarray]:
        """The common plan, and the positions in the process set of the workers that have not ended."""
        if self._failed:
            raise MXNetError(
                "This join() has failed, so its workers are out of step. Leave the block, and move calls that wait "
                "(barrier, allreduce_metric, ...) behind it."
            )
        self._failed = True  # an error in this exchange ends the join() on all workers
        with operation.waiting(self._process_set, "join") as turn:
            rows = turn.meet(_CALL, mine.numbers())
        active = np.flatnonzero(rows[:, 0] != _ENDED)
        for other in active:
            if (rows[other] != rows[active[0]]).any():
                first, second = (self._process_set.ranks[position] for position in (active[0], other))
                raise MXNetError(
                    f"The workers do not take the same step in join(): rank {first} {_Plan.of(rows[active[0]])}, but "
                    f"rank {second} {_Plan.of(rows[other])}. Give step() the same batch size on all workers, also for "
                    "a smaller last batch."
                )
        self._failed = False
        return (_Plan.of(rows[active[0]]) if active.size else _NOTHING), active

    def _stand_in(self) -> None:
        """Participate in the steps of the other workers until all workers have ended."""
        while True:
            plan, active = self._meet(_NOTHING)
            if not active.size:
                return
            hook = self._hooks[plan.trainer]
            try:
                with hook.without_local_parameters():
                    if plan.kind != _UPDATE:
                        _contribute_nothing(hook.shared, plan.ignore_stale)
                    if not math.isnan(plan.learning_rate):
                        self._trainers[plan.trainer].optimizer.lr = plan.learning_rate
                    self._perform(plan, active)
            except BaseException as error:
                self._fail(f"it has left join() with {type(error).__name__}: {error}")
                raise

    def _fail(self, reason: str) -> None:
        """Make the next step of the other workers fail."""
        if not self._failed and process.is_initialized():
            self._failed = True
            operation.waiting(self._process_set, "join").leave_out(reason, None)

    def _perform(self, plan: _Plan, active: np.ndarray) -> None:
        hook = self._hooks[plan.trainer]
        size = self._process_set.size()
        self.last_rank = self._process_set.ranks[active[-1]]
        self.steps += plan.kind != _ALLREDUCE  # now: if the step fails on one worker, the others count it too
        ratio = size / len(active) if hook.is_mean and not self._divides_by_all else 1.0
        if plan.kind == _STEP:
            hook.step(plan.factor * ratio, plan.ignore_stale)
        elif plan.kind == _ALLREDUCE:
            hook.allreduce_grads(plan.ignore_stale)
            if ratio != 1.0 and not hook.is_summed_first:
                _scale(hook.shared, ratio)
        else:
            if len(active) < size:
                self._broadcast_gradients(hook, int(active[0]))
            hook.update(plan.factor * (ratio if hook.is_summed_first else 1.0), plan.ignore_stale)

    def _broadcast_gradients(self, hook: JoinHook, root: int) -> None:
        """Send the gradients, which the loop may have changed after the reduction, to the workers that have ended."""
        core = self._process_set._core
        for name, parameter, position in hook.shared:
            if parameter._grad_stype != "default":
                raise MXNetError(
                    f"The gradient of {described_within(name, parameter)} is {parameter._grad_stype}, which "
                    "allreduce_grads() cannot reduce in join() after workers have ended. Use step()."
                )
            if parameter._grad is not None:
                handles = arrays.handles(parameter._grad)
                core.push_broadcast(f"{hook.scope}/join/{name}", handles[0], handles, root, -position)


def _is_trainer(value: Any) -> bool:
    return isinstance(value, DistributedTrainer)


def _hooks_of(trainers: Sequence[Any]) -> list[JoinHook]:
    """The hooks of the trainers, which must have one process set."""
    if not trainers:
        raise TypeError(
            "join() was called without a trainer. Write `with join(trainer):` around the training loop, not a call "
            "after it."
        )
    hooks = []
    for trainer in trainers:
        if not _is_trainer(trainer):
            raise TypeError(
                f"join() needs DistributedTrainers, not {type(trainer).__name__}. Train with a DistributedTrainer, or "
                "let all workers make the same number of steps."
            )
        hooks.append(join_hook(trainer))
    if len({id(trainer) for trainer in trainers}) < len(trainers):
        raise ValueError(f"join() was given a trainer twice, among {len(trainers)}. Pass each trainer once.")
    for hook in hooks:
        if hook.process_set is not hooks[0].process_set:
            raise ValueError(
                f"The trainers of a join() must have the same process set, not {hooks[0].process_set!r} and "
                f"{hook.process_set!r}."
            )
    return hooks


def _contribute_nothing(shared: Sequence[Named], ignore_stale: bool) -> None:
    """Set this worker's gradients to zeros; with `ignore_stale` mark them stale, so that a parameter that no worker
    uses is not updated."""
    for _, parameter, _ in shared:
        if parameter._grad is None:
            continue
        for weight, gradient in zip(parameter._data, parameter._grad):
            weight._fresh_grad = not ignore_stale
            if not ignore_stale:
                fill_with_zeros(gradient)


def _scale(shared: Sequence[Named], ratio: float) -> None:
    with arrays.not_recorded():
        for _, parameter, _ in shared:
            for gradient in parameter._grad or ():
                gradient *= ratio
