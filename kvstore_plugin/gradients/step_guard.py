"""Guards of a trainer's step: if the step fails on this worker, they tell the other workers, or record the failure.

`StepGuard` wraps a whole step: other workers count a failed step, so this worker counts it too. `updates` wraps the
updates of a step: if they fail on this worker alone, its weights differ from those of the other workers, so the next
step fails on all workers. `check_fresh` is called before the sums: a stale gradient fails the step on all workers.
"""

from __future__ import annotations

import contextlib
import enum
from typing import Any, Callable, Iterable, Iterator, Sequence

from ..compat.mxnet import MXNetError, Parameter, gluon
from ..parameters import load_tracking, trainer_state
from ..world import process
from .reducer import Reducer


class Told(enum.Enum):
    """What a worker has told the others of its current step or update, for an exception of the user's own methods."""

    NOTHING = 0  # the others wait for this worker
    SUMS = 1  # the others update without hearing of this worker again
    ALL = 2  # it has made its updates, or has refused the step


class StepGuard:
    """Context manager of a trainer's step. If the step fails, this worker counts an update, as other workers may do.

    A class, since a generator-based context manager costs more calls in every step.

    Parameters
    ----------
    trainer : gluon.Trainer
    reducers : sequence of Reducer
        The reducers of the trainer's gradients.
    when_failed : callable, optional
        Called with the error after the update was counted.
    """

    __slots__ = ("_before", "_reducers", "_trainer", "_when_failed")

    def __init__(
        self,
        trainer: gluon.Trainer,
        reducers: Sequence[Reducer],
        when_failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._trainer = trainer
        self._reducers = reducers
        self._when_failed = when_failed
        self._before = sum(trainer._optimizer._index_update_count.values())

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            return
        for reducer in self._reducers:  # even after Ctrl-C: this worker may continue
            reducer.refuse_update(f"the step was interrupted on that rank: {error}")
        is_counted = trainer_state.updates_counted(self._trainer) != self._before
        if not is_counted and any(reducer.has_begun() for reducer in self._reducers):
            trainer_state.count_update(self._trainer)
        if self._when_failed is not None:
            self._when_failed(error)


def refuse_unbegun(reducers: Sequence[Reducer], turns: Sequence[int], reason: str) -> None:
    """Refuse a step for those reducers that have neither begun nor refused it. `turns`: theirs before the step."""
    for reducer, before in zip(reducers, turns):
        if reducer.turns == before:
            with contextlib.suppress(RuntimeError, ValueError):  # the core was shut down, or the set was removed
                reducer.refuse(reason)


@contextlib.contextmanager
def updates(trainer: gluon.Trainer | None, reducers: Sequence[Reducer]) -> Iterator[None]:
    """Context manager of a trainer's updates: puts fences around them, and notes if they fail on this worker.

    Only errors that may be this worker's alone are noted.

    Parameters
    ----------
    trainer : gluon.Trainer or None
        None: a failure is not noted.
    reducers : sequence of Reducer
        The reducers whose parameters each worker updates by itself.
    """
    updating = load_tracking.updating
    before, updating.trainer = getattr(updating, "trainer", None), trainer
    try:
        for reducer in reducers:
            for fence in reducer.fences:
                fence.begin()
        try:
            yield
        except MXNetError:  # the fence finds out whether a sum has failed, on all workers, or this worker's update
            for reducer in reducers:
                for fence in reducer.fences:
                    fence.push(broken=True)
            raise
        for reducer in reducers:
            for fence in reducer.fences:
                fence.push()
    except BaseException as error:
        if trainer is not None:
            load_tracking.note_error(error, trainer)
        raise
    finally:
        updating.trainer = before


def check_fresh(params: Iterable[Parameter], refuse: Callable[[str], None] = lambda reason: None) -> None:
    """Raise MXNet's warning about a gradient that no backward pass has written since the last step.

    Parameters
    ----------
    params : iterable of Parameter
    refuse : callable, optional
        Called with the warning before it is raised.

    Raises
    ------
    UserWarning
        A gradient is stale.
    """
    stale = None
    for parameter in params:  # a loop, since a generator costs a call for each gradient in every step
        if parameter.grad_req == "null":
            continue
        if parameter._data is None:
            return  # another check raises the error for missing values
        for weight in parameter._data:
            if not weight._fresh_grad:
                stale = stale or parameter
    if stale is not None:
        sentence = (
            f"The gradient of parameter {stale.name} on rank {process.rank()} is stale: no backward has "
            "written it since the last step. If the network is meant to use only some of its parameters, call "
            "step(..., ignore_stale_grad=True)."
        )
        refuse(sentence)
        raise UserWarning(sentence)
