"""The optimizer on the store for row_sparse gradients: each worker updates the gradient's rows in its shard.

As in optimizer.py only the owner of a row has its states. All workers already have the summed rows of the gradient
(collectives/row_sparse.py). Each owner runs MXNet's own updater on the rows of its shard. Then all workers get the new
values of the gradient's rows, or of all rows if the optimizer may change other rows too.
"""

from __future__ import annotations

from typing import Hashable, Sequence

import numpy as np

from ..collectives import row_sparse
from ..collectives.row_sparse import Rows
from ..compat import arrays
from ..compat.mxnet import NDArray, mx
from ..compat.state_tree import mapped
from ..coordination import operation
from . import traits
from .optimizer import ShardedUpdate, StoreOptimizer


class RowUpdate:
    """The update of one parameter.

    Parameters
    ----------
    store_optimizer : StoreOptimizer
    name : str
        The update's operation gets the second of the names that `ShardedUpdate.names` derives from this name.
    key : int or str
        The optimizer's key of the parameter, which has owners.
    weights : sequence of NDArray
        The weight, which is dense, and its copies on other devices, of any kind.
    priority : int
        Operations with a higher priority run first.
    turn_of : str, optional
        The name of the operation that has just summed the gradients. The update then counts its calls by that name.

    Raises
    ------
    NotImplementedError
        The weight's rows are so long that the store cuts them.
    """

    def __init__(
        self,
        store_optimizer: StoreOptimizer,
        name: str,
        key: Hashable,
        weights: Sequence[NDArray],
        priority: int,
        turn_of: str = "",
    ) -> None:
        weight = weights[0]
        self._store_optimizer = store_optimizer
        self._name = ShardedUpdate.names(name)[1]
        self._turn_of = turn_of
        self._key = key
        self._weight, self._copies = weight, weights[1:]
        self._priority = priority
        width = max(weight.size // max(weight.shape[0], 1), 1)
        shards = store_optimizer.shards_of(key)
        if any(shard.begin % width or shard.count % width for shard in shards):
            raise NotImplementedError(
                f"The store divides the long rows of a {weight.shape} array among the workers and cannot update them "
                "with row_sparse gradients. Use update_on_kvstore=False."
            )
        self._shards = [(shard.owner, shard.begin // width, (shard.begin + shard.count) // width) for shard in shards]
        self._whole = [(0, shard.begin, shard.count, shard.owner) for shard in shards]
        self._width = width
        own = store_optimizer.own_shard(key)
        self._own = own and (own.begin // width, (own.begin + own.count) // width)  # in rows

    def apply(self, rows: Rows) -> None:
        """Update the weight from a gradient that is the same on all workers. Returns at once.

        Parameters
        ----------
        rows : Rows
            The gradient's rows in ascending order; all other rows are zeros. The caller may change the arrays
            afterwards.
        """
        process_set = self._store_optimizer.process_set
        only_these = traits.leaves_other_rows(self._store_optimizer.optimizer)
        gathers = process_set.size() > 1 and bool(rows.indices.size or not only_these)
        try:
            self._run_updater(rows)
            changed, division = self._changed(rows.indices) if gathers and only_these else (self._weight, self._whole)
        except BaseException as error:
            if gathers:
                self.refuse(f"the update has failed on that rank: {type(error).__name__}: {error}")
            raise
        if gathers:
            with operation.refusing(self.refuse):
                handles = arrays.handles([changed])
                process_set._core.push_gather_from_owners(
                    self._name, handles, division, self._priority, turn_of=self._turn_of
                )
        if changed is not self._weight:
            with arrays.not_recorded():
                weight = self._weight.as_nd_ndarray()
                weight[mx.nd.array(rows.indices, dtype=np.int64, ctx=weight.context)] = changed
        for copy in self._copies:
            arrays.copy(self._weight, copy)

    def refuse(self, reason: str) -> None:
        """Refuse the update: it fails on the other workers, with the reason."""
        self._store_optimizer.process_set._core.refuse(self._name, reason, turn_of=self._turn_of)

    def _run_updater(self, rows: Rows) -> None:
        """Update the rows of the weight that this worker owns."""
        if self._own is None:
            self._store_optimizer.count_updates([self._key], self._weight)
            return
        begin, end = self._own
        first, last = np.searchsorted(rows.indices, [begin, end])
        shape = (end - begin, *self._weight.shape[1:])
        with arrays.not_recorded():
            gradient = mx.nd.sparse.zeros("row_sparse", shape, ctx=self._weight.context, dtype=self._weight.dtype)
            row_sparse.assign(gradient, Rows(rows.indices[first:last] - begin, rows.values[first:last]))
            updater = self._store_optimizer.updater
            if self._key in updater.states:
                updater.states[self._key] = mapped(updater.states[self._key], lambda state: _shaped(state, shape))
            updater(self._key, gradient, self._rows_of_weight(begin, end))

    def _changed(self, indices: np.ndarray) -> tuple[NDArray, list[tuple[int, int, int, int]]]:
        """An array for the rows `indices` with the new values of this worker's rows, and its parts by owner."""
        weight = self._weight.as_nd_ndarray()
        division = []
        with arrays.not_recorded():
            changed = arrays.empty((indices.size, *weight.shape[1:]), weight)
            for owner, begin, end in self._shards:
                first, last = (int(number) for number in np.searchsorted(indices, [begin, end]))
                if first == last:
                    continue
                division.append((0, first * self._width, (last - first) * self._width, owner))
                if (begin, end) == self._own:
                    wanted = mx.nd.array(indices[first:last], dtype=np.int64, ctx=weight.context)
                    mx.nd.take(weight, wanted, out=changed[first:last])
        return changed, division

    def _rows_of_weight(self, begin: int, end: int) -> NDArray:
        weight = self._weight.as_nd_ndarray()
        return weight if (begin, end) == (0, weight.shape[0]) else weight[begin:end]


def _shaped(state: NDArray, shape: tuple[int, ...]) -> NDArray:
    """An array of a shard's state in the shape of the shard's rows; a loaded state may be flat."""
    return state.reshape(shape) if state.shape != shape and state.size == int(np.prod(shape)) else state
