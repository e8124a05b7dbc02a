"""row_sparse arrays in calls of the store: their sums, and their broadcast.

The store itself holds a dense array under each key, since each worker has all rows of it anyway.
"""

from __future__ import annotations

from typing import Sequence

from ..compat import arrays
from ..compat.mxnet import NDArray, SparseNDArray, mx
from ..coordination import operation
from ..world.process_set import ProcessSet
from . import row_sparse
from .row_sparse import Rows


def push_broadcast(
    process_set: ProcessSet, name: str, value: NDArray, targets: Sequence[NDArray], root: int, priority: int
) -> None:
    """Start a broadcast of an array, any of them dense or row_sparse. Returns at once.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that take part.
    name : str
        What the ranks are matched by.
    value : NDArray
        The root's travels, as a dense array.
    targets : sequence of NDArray
        Of the shape and dtype of `value`. Those that are row_sparse hold all rows afterwards.
    root : int
        The rank within the set whose value counts.
    priority : int
        Operations with a higher one run first.
    """
    sent = value.tostype("default") if isinstance(value, SparseNDArray) else value
    received = [arrays.empty(array.shape, array) if isinstance(array, SparseNDArray) else array for array in targets]
    process_set.core.push_broadcast(name, sent.handle.value, arrays.handles(received), root, priority)
    for array, dense in zip(targets, received):
        if array is not dense:
            with_all_rows(dense).copyto(array)


def sum_rows(
    process_set: ProcessSet, name: str, what: str, values: Sequence[NDArray], targets: Sequence[NDArray], priority: int
) -> None:
    """Sum row_sparse arrays over the devices of each worker and over the workers. Waits for all of them.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that take part.
    name : str
        What the ranks are matched by. If this raises an error, the others get one too.
    what : str
        What to call the arrays in an error, for example ``'value of key 3'``.
    values : sequence of row_sparse NDArray
        One for each device.
    targets : sequence of NDArray
        Each gets the sum; row_sparse ones the rows that any worker holds, dense ones zeros for the others.
    priority : int
        Operations with a higher one run first.

    Raises
    ------
    ValueError, MXNetError
        As for `sparse.contribution`; the workers differ in shape or dtype, or one of them has refused or left.
    """
    for array, rows in zip(targets, [summed(process_set, name, what, values, priority)] * len(targets)):
        assign(array, rows)


def summed(
    process_set: ProcessSet, name: str, what: str, values: Sequence[NDArray], priority: int, label: str = ""
) -> Rows:
    """The sum as in `sum_rows`, on all workers with this label."""
    with operation.Turn(process_set, name, what) as turn:
        one = row_sparse.contribution(values, what)
        counts = turn.meet(f"{label}a sum of {one}", [one.indices.size])
    return row_sparse.allreduce(process_set, name, [one], counts, priority=priority)[0]


def assign(array: NDArray, rows: Rows) -> None:
    """Let an array hold these rows, and, if it is dense, zeros in place of all others."""
    if isinstance(array, SparseNDArray):
        row_sparse.assign(array, rows)
        return
    held = mx.nd.sparse.zeros("row_sparse", array.shape, ctx=array.context, dtype=array.dtype)
    row_sparse.assign(held, rows)
    arrays.copy(held, array)


def with_all_rows(dense: NDArray) -> NDArray:
    """A dense array as a row_sparse one that holds every row, also those of zeros. Returns at once.

    MXNet's optimizers update row_sparse weights only where these hold all rows.
    """
    with arrays.not_recorded():
        every = mx.nd.arange(dense.shape[0], dtype="int64", ctx=dense.context)
        return mx.nd.sparse.retain(dense.tostype("row_sparse"), every)
