"""Reduces the row_sparse gradients of one trainer. `DenseReducer` reduces the dense gradients.

collectives/row_sparse.py sums the rows. In every step the workers tell each other how many rows each gradient has. This
exchange also shows whether the workers take the same step, and which worker has used which parameter.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from ..collectives import row_sparse
from ..collectives.row_sparse import Contribution, Rows, Sending
from ..compat import errors
from ..compat.mxnet import NDArray, Parameter, SparseNDArray, hold_all_rows
from ..coordination import agreement, operation, step_label
from ..parameters import load_tracking, trainer_state
from ..sharded_optimizer.row_update import RowUpdate
from .fence import Fence
from .reducer import Comparing, SharedReducer, Task


class _Gradient(NamedTuple):
    label: str
    parameter: Parameter
    key: int  # the parameter's key in the optimizer on the store


class SparseReducer(SharedReducer):
    """Reduces the row_sparse gradients of one trainer over one process set.

    Parameters
    ----------
    task : Task
        The row_sparse parameters. The reduction's fields about buckets are not used here.

    Raises
    ------
    RuntimeError
        The ranks have different parameters. Collective: all ranks get the error.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if self._process_set.size() > 1:
            self.fences = [Fence(self._parameters, task.scope, compares_weights=True)]
        self._name = f"{task.scope}/sparse"
        self._gradients = [_Gradient(item.name, item.value, task.keys[id(item.value)]) for item in task.named]
        self._to_update: list[tuple[RowUpdate, Rows]] = []
        self._counted: list[Parameter] = []  # parameters in this step's norm, if each worker updates all parameters
        self._workspace = row_sparse.Workspace(self._process_set)
        self._priority = max(-item.position for item in task.named)
        self._all_have_values = False  # all ranks had values of all parameters that need gradients in an earlier step
        self._has_begun = False  # all ranks have called the last allreduce(), and update() follows
        labels = [gradient.label for gradient in self._gradients]
        agreement.check_names(self._process_set, self._name, labels, f"sparse parameters of {task.scope}")

    def allreduce(self, ignore_stale: bool, label: str, compares: Comparing) -> None:
        if operation.late_refusals:  # of a step that a signal handler has interrupted
            operation.settle_refusals(self._name)
        self._has_begun = self.is_begun = False
        active = self._active()
        turn, turns = self._turn(), self.turns
        try:
            self.turns = turns + 1
            with turn:
                contributions = [_contribution(member, ignore_stale) for member in active]
                sendings = turn.agreed(row_sparse.turns(self._process_set, self._name, contributions, len(active)))
                met = self._meet(turn, label, active, contributions)
                self.is_begun = True  # if an error of this worker alone follows, the other workers may update
                self._has_begun = compares is not Comparing.NOTHING
                self.compared = [] if self._has_begun else [None]
                self._sum(sendings, active, contributions, met, ignore_stale)
        except BaseException as error:
            self.turns = turns + turn.is_taken()
            self.leave_out_comparison(f"allreduce_grads() has failed on that rank: {errors.reason_of(error)}")
            raise

    def _meet(
        self, turn: operation.Turn, label: str, active: Sequence[_Gradient], contributions: Sequence[Contribution]
    ) -> np.ndarray:
        """Exchange, for each gradient, whether it is fresh, then the numbers of rows; compare loaded values."""
        numbers = [trainer_state.is_fresh(member.parameter) for member in active]
        numbers += [contribution.indices.size for contribution in contributions]
        what = f"the sparse gradients {_described(active, contributions)}"
        if load_tracking.any_of(self._parameters):
            what += step_label.BETWEEN + load_tracking.label(self._parameters)
            numbers += [] if self.values_may_differ else load_tracking.numbers_of(self._named)
        met = turn.meet(f"{label or 'allreduce_grads()'}{step_label.BETWEEN}{what}", numbers)
        met, loaded_by_all = np.split(met, [2 * len(active)], axis=1)
        if loaded_by_all.size:
            load_tracking.check_numbers(self._named, loaded_by_all, self._process_set)
        return met

    def _sum(
        self,
        sendings: Sequence[Sending],
        active: Sequence[_Gradient],
        contributions: Sequence[Contribution],
        met: np.ndarray,
        ignore_stale: bool,
    ) -> None:
        """Sum the rows after the exchange, and keep the sums for update() or as gradients."""
        load_tracking.forget(self._parameters)
        fresh, counts = met[:, : len(active)].any(axis=0), met[:, len(active) :]
        chosen = np.flatnonzero(fresh) if ignore_stale else np.arange(len(active))
        updates: list[RowUpdate] = []
        if self._reduction.store_optimizer is not None:
            updates = [self._update_of(active[number]) for number in chosen]
        sums = row_sparse.allreduce(
            sendings,
            [contributions[number] for number in chosen],
            counts[:, chosen],  # workers have no rows of other gradients
            self._reduction.scale,
            self._priority,
            self._reduction.wire,
            self._workspace if all(len(contribution.devices) == 1 for contribution in contributions) else None,
        )
        if self._reduction.store_optimizer is not None:
            self._to_update = list(zip(updates, sums))
            return
        for number, rows in zip(chosen, sums):
            for weight in active[number].parameter._data:
                if isinstance(weight, SparseNDArray):  # zero rows may be missing after initialization or loading
                    hold_all_rows(weight)
            for gradient in active[number].parameter._grad:
                row_sparse.assign(gradient, rows)
            if ignore_stale:
                _set_fresh(active[number].parameter)

    def update(self) -> None:
        while self._to_update:
            update, rows = self._to_update.pop(0)
            try:
                update.apply(rows)
            except Exception as error:
                self.refuse_update(str(error))
                raise

    def has_rows(self) -> bool:
        return True

    def squares_of_rows(self, only_fresh: bool) -> float:
        if self._reduction.store_optimizer is None:
            parameters = [parameter for parameter in self._parameters if parameter._grad is not None]
            self._counted = [
                parameter for parameter in parameters if not only_fresh or trainer_state.is_fresh(parameter)
            ]
            values = [one._grad[0] for one in self._counted]
        else:
            values = [rows.values for _, rows in self._to_update]
        return sum(map(row_sparse.squares, values)) if self._process_set.rank() == 0 else 0.0

    def scale_rows(self, factor: float) -> None:
        self._to_update = [(update, row_sparse.scaled(rows, factor)) for update, rows in self._to_update]
        for parameter in self._counted:
            for gradient in parameter._grad:
                row_sparse.scale(gradient, factor)

    def refuse_update(self, reason: str) -> None:
        for update, _ in self._to_update:
            update.refuse(f"the update has failed on that rank: {reason}")
        self._to_update = []

    def drop_updates(self) -> None:
        self._to_update = []

    def _update_of(self, one: _Gradient) -> RowUpdate:
        store_optimizer = self._reduction.store_optimizer
        weights = one.parameter._data
        if not store_optimizer.is_assigned(one.key, weights[0]):
            store_optimizer.assign([(one.key, weights[0])])
        return RowUpdate(store_optimizer, f"{self._name}/{one.label}", one.key, weights, self._priority)

    def _names(self) -> list[str]:
        # The names of allreduce()'s sums differ from that of its exchange. So until the next step, the exchange has the
        # last turn of its name.
        return [self._name]

    def _arrays_to_compare(self) -> tuple[list[NDArray], int]:
        return [
            weight for parameter in self._parameters if parameter._grad is not None for weight in parameter._data
        ], self._priority

    def _has_met(self) -> bool:
        return self._all_have_values

    def has_begun(self) -> bool:
        # In each step the ranks wait for each other, so no rank can begin a step alone. Only update() does not wait.
        return self._has_begun

    def share_freshness(self) -> None:
        active = self._active()
        with self._turn() as turn:
            label = f"an update with the sparse gradients {', '.join(member.label for member in active)}"
            met = turn.meet(label, [trainer_state.is_fresh(member.parameter) for member in active])
        for number in np.flatnonzero(met.any(axis=0)):
            _set_fresh(active[number].parameter)

    def refuse(self, reason: str) -> None:
        self.leave_out_comparison(reason)
        self._has_begun = self.is_begun = False
        self.turns += 1
        self.redefer(reason)
        self._process_set._core.refuse(self._name, reason)

    def _active(self) -> list[_Gradient]:
        self._check_values()
        self._all_have_values = True
        return [gradient for gradient in self._gradients if gradient.parameter._grad is not None]

    def _turn(self) -> operation.Turn:
        return operation.Turn(self._process_set, self._name, f"the sparse gradients of {self._scope}")

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_to_update": [], "_counted": [], "_has_begun": False}


def _contribution(one: _Gradient, ignore_stale: bool) -> Contribution:
    stale = [ignore_stale and not weight._fresh_grad for weight in one.parameter._data]
    return row_sparse.contribution(one.parameter._grad, f"gradient of {one.label}", stale)


def _set_fresh(parameter: Parameter) -> None:
    for weight in parameter._data:
        weight._fresh_grad = True


def _described(active: Sequence[_Gradient], contributions: Sequence[Contribution]) -> str:
    texts = [f"{one.label} ({rows}, devices: {len(rows.devices)})" for one, rows in zip(active, contributions)]
    return ", ".join(texts)
