"""The row_sparse gradients of one trainer. `DenseReducer` has the dense gradients.

collectives/row_sparse.py reduces them. In every step the workers tell each other how many rows each gradient has. This
exchange also shows whether the workers' steps are alike, and which worker has used which parameter.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np

from ..collectives import row_sparse
from ..collectives.row_sparse import Contribution, Rows
from ..compat.mxnet import MXNetError, Parameter
from ..coordination import agreement, operation, step_label
from ..parameters import deferred_init, load_tracking
from ..parameters.naming import Named
from ..sharded_optimizer.row_update import RowUpdate
from ..world import process
from ..world import process_set as process_sets
from .bucket_plan import Comparison, Reduction
from .fence import Fence


class _Gradient(NamedTuple):
    label: str
    parameter: Parameter
    key: int  # of the parameter, in the optimizer on the store


class SparseReducer:
    """The row_sparse gradients of one trainer that are reduced over one process set.

    Parameters
    ----------
    scope : str
        Begins the names of all operations, for example ``'trainer0'``.
    named : sequence of Named
        Parameters with names that are the same on all ranks.
    reduction : Reduction
        How the gradients are reduced. Its fields about packing are for dense gradients and are not used here.
    when_moved : callable
        Called without arguments when parameters may have moved to other devices.
    keys : dict of int, optional
        The key of each parameter in the optimizer on the store, by the parameter's id().

    Raises
    ------
    RuntimeError
        The ranks have different parameters. Collective: all ranks get the error.
    """

    def __init__(
        self,
        scope: str,
        named: Sequence[Named],
        reduction: Reduction,
        when_moved: Callable[[], None],
        keys: Mapping[int, int] | None = None,
    ) -> None:
        self._scope = scope
        self._name = f"{scope}/sparse"
        self._reduction = reduction
        self._when_moved = when_moved
        self._gradients = [_Gradient(one.name, one.value, (keys or {}).get(id(one.value), 0)) for one in named]
        self._to_update: list[tuple[RowUpdate, Rows]] = []
        self._workspace = row_sparse.Workspace(reduction.process_set)
        self._priority = max(-one.position for one in named)
        self._parameters = [one.parameter for one in self._gradients]
        # How often each parameter had been initialized when all ranks last had values.
        self._times = [deferred_init.times(parameter) for parameter in self._parameters]
        self.have_values: Sequence[Any] = ()  # as `DenseReducer` has it
        self._all_have_values = False  # in an earlier step all ranks had values of all parameters that need gradients
        self._comparison = Comparison(reduction.process_set)
        self._fence = Fence(self._parameters)
        self._is_due = False  # update() follows the last allreduce(), and its comparison has not been made yet
        self._has_begun = False  # all ranks have called the last allreduce(), and update() follows
        labels = [one.label for one in self._gradients]
        agreement.check_names(reduction.process_set, self._name, labels, f"sparse parameters of {scope}")

    def allreduce(self, ignore_stale: bool = False, label: str = "", compares: bool = False) -> None:
        """Replace each gradient, on every device, by its mean over the workers of the sum over a worker's devices.

        Waits until backward has written the gradients on all workers and the gradients are summed.

        Parameters
        ----------
        ignore_stale : bool
            A stale gradient (no backward has written it since the last update) counts as a gradient without rows. A
            parameter that is stale on all workers is left alone. A parameter that is fresh on some worker is fresh on
            all afterwards.
        label : str
            What else must be equal in the step on all ranks.
        compares : bool
            Whether update() follows, which calls compare().

        Raises
        ------
        DeferredInitializationError
            A parameter has no values yet; the other ranks get an MXNetError that names the parameter.
        MXNetError
            The ranks' steps differ, or a gradient carries an error on some rank.
        ValueError
            What is wrong with a gradient of this rank; the other ranks get an MXNetError with the same reason.
        """
        self._leave_out_comparison("update() was not called there after allreduce_grads()")
        self._has_begun = False
        active = self._active()
        loaded = load_tracking.any_of(self._parameters)
        with self._turn() as turn:
            contributions = [_contribution(one, ignore_stale) for one in active]
            numbers = [_is_fresh(one.parameter) for one in active]
            numbers += [one.indices.size for one in contributions]
            what = f"the sparse gradients {_described(active, contributions)}"
            what += step_label.BETWEEN + load_tracking.label(self._parameters) if loaded else ""
            met = turn.meet(f"{label or 'allreduce_grads()'}{step_label.BETWEEN}{what}", numbers)
        self._is_due = self._has_begun = compares
        try:
            self._sum(active, contributions, met, ignore_stale)
        except BaseException as error:
            self._leave_out_comparison(f"allreduce_grads() has failed there: {error}")
            raise

    def _sum(
        self, active: Sequence[_Gradient], contributions: Sequence[Contribution], met: np.ndarray, ignore_stale: bool
    ) -> None:
        """Sum the rows after the exchange, and keep the sums for update() or as gradients."""
        load_tracking.forget(self._parameters)
        fresh, counts = met[:, : len(active)].any(axis=0), met[:, len(active) :]
        chosen = np.flatnonzero(fresh) if ignore_stale else np.arange(len(active))
        sums = row_sparse.allreduce(
            self._reduction.process_set,
            self._name,
            [contributions[number] for number in chosen],
            counts[:, chosen],
            self._reduction.scale,
            self._priority,
            self._reduction.wire,
            self._workspace if all(len(one.devices) == 1 for one in contributions) else None,
        )
        if self._reduction.store_optimizer is not None:
            self._to_update = [(self._update_of(active[number]), rows) for number, rows in zip(chosen, sums)]
            return
        for number, rows in zip(chosen, sums):
            for gradient in active[number].parameter._grad:
                row_sparse.assign(gradient, rows)
            if ignore_stale:
                _set_fresh(active[number].parameter)

    def update(self) -> None:
        """Let the optimizer on the store update the parameters from the sums of allreduce(). Returns at once."""
        while self._to_update:
            update, rows = self._to_update.pop(0)
            try:
                update.apply(rows)
            except Exception as error:
                self.refuse_update(str(error))
                raise

    def fence(self) -> None:
        """As `DenseReducer.fence`. One fence is enough: compare() is one operation on all weights. Waits for no sum."""
        if self._reduction.process_set.size() > 1:
            self._fence.push()

    def refuse_update(self, reason: str) -> None:
        """Drop the updates that update() has not made yet; they fail on the other ranks with the reason."""
        for update, _ in self._to_update:
            update.refuse(f"the update has failed there: {reason}")
        self._to_update = []

    def _update_of(self, one: _Gradient) -> RowUpdate:
        store_optimizer = self._reduction.store_optimizer
        weights = one.parameter._data
        if not store_optimizer.is_assigned(one.key, weights[0]):
            store_optimizer.assign([(one.key, weights[0])])
        return RowUpdate(store_optimizer, f"{self._name}/{one.label}", one.key, weights, self._priority)

    def compare(self, label: str) -> None:
        """Let an update fail if the ranks' updates differ, as `DenseReducer.compare`.

        The operations of allreduce() have other names than its exchange, so the exchange has the last turn under its
        name until the next step.
        """
        gradients = [one for one in self._gradients if one.parameter._grad is not None]
        weights = [weight for one in gradients for weight in one.parameter._data]
        own, turn_of = (f"{self._name}/update", self._name) if self._is_due else (self._name, "")
        try:
            self._comparison.push(own, weights, self._priority, label, turn_of)
        except MXNetError:
            raise  # the turn is taken: MXNet's NaiveEngine has run the operation
        except BaseException as error:
            self.refuse_comparison(f"update() has failed there: {error}")
            raise
        finally:
            self._is_due = False

    def refuse_comparison(self, reason: str) -> None:
        """Refuse the turn of `compare`: the other ranks' update fails with the reason."""
        core = self._reduction.process_set.core
        if self._is_due:
            core.refuse(f"{self._name}/update", reason, turn_of=self._name)
        else:
            core.refuse(self._name, reason)
        self._is_due = False

    def _leave_out_comparison(self, reason: str) -> None:
        """Refuse the comparison of the last allreduce(), if it is still due."""
        if self._is_due:
            self.refuse_comparison(reason)

    def has_begun(self) -> bool:
        """Whether the other ranks may count an update that this rank does not make.

        The ranks meet in each step, so no rank can push a step alone; only update() does not wait.
        """
        return self._has_begun

    def share_freshness(self) -> None:
        """Mark a parameter as fresh on all workers if some worker has used it since the last update."""
        active = self._active()
        with self._turn() as turn:
            label = f"an update with the sparse gradients {', '.join(one.label for one in active)}"
            met = turn.meet(label, [_is_fresh(one.parameter) for one in active])
        for number in np.flatnonzero(met.any(axis=0)):
            _set_fresh(active[number].parameter)

    def awaited_by(self) -> list[int]:
        """The ranks that have begun a step or an update that this rank has not begun."""
        core = self._reduction.process_set.core
        come = core.waiting_for_this([self._name])
        if self._is_due:
            come += core.waiting_for_this([f"{self._name}/update"], turn_of=self._name)
        return sorted({rank for ranks in come for rank in ranks})

    def refuse_awaited(self, reason: str) -> None:
        """Refuse what the other ranks wait for: an update, or the next step."""
        if self._is_due:
            self.refuse_comparison(reason)
        else:
            self.refuse(reason)

    def refuse(self, reason: str) -> None:
        """Refuse a step: it fails on the other ranks with the reason."""
        self._leave_out_comparison(reason)
        self._has_begun = False
        self._give_back(reason)
        self._reduction.process_set.core.refuse(self._name, reason)

    def _active(self) -> list[_Gradient]:
        process.rank()  # raises after shutdown()
        process_sets.check(self._reduction.process_set)  # it may have been removed
        self._when_moved()
        self._check_values()
        return [one for one in self._gradients if one.parameter._grad is not None]

    def _check_values(self) -> None:
        """As `DenseReducer._check_values`."""
        times = [deferred_init.times(parameter) for parameter in self._parameters]
        lacks = any(one._grad is None and one.grad_req != "null" for one in self._parameters)
        if self._all_have_values and times == self._times and not lacks:
            return
        named = [(one.label, one.parameter) for one in self._gradients]
        call = f"a step of {self._scope}, whose parameters were just initialized"

        def exchange(numbers: list[int]) -> np.ndarray:
            try:
                return operation.exchange(self._reduction.process_set, self._name, call, call, numbers)
            except MXNetError as error:
                self._give_back(str(error))
                raise

        are_new = [now != then for now, then in zip(times, self._times)]
        deferred_init.check_values(self._reduction.process_set, named, are_new, exchange)
        self._times, self._all_have_values = times, True

    def _give_back(self, reason: str) -> None:
        """As `DenseReducer._give_back`."""
        if not self._all_have_values:
            deferred_init.give_back(self._parameters, self._times, self.have_values, reason)

    def _turn(self) -> operation.Turn:
        return operation.Turn(self._reduction.process_set, self._name, f"the sparse gradients of {self._scope}")

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_to_update": [], "_is_due": False, "_has_begun": False}


def _contribution(one: _Gradient, ignore_stale: bool) -> Contribution:
    stale = [ignore_stale and not weight._fresh_grad for weight in one.parameter._data]
    return row_sparse.contribution(one.parameter._grad, f"gradient of {one.label}", stale)


def _is_fresh(parameter: Parameter) -> bool:
    return any(weight._fresh_grad for weight in parameter._data)


def _set_fresh(parameter: Parameter) -> None:
    for weight in parameter._data:
        weight._fresh_grad = True


def _described(active: Sequence[_Gradient], contributions: Sequence[Contribution]) -> str:
    texts = [f"{one.label} ({rows}, devices: {len(rows.devices)})" for one, rows in zip(active, contributions)]
    return ", ".join(texts)
