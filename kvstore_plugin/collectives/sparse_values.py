"""row_sparse arrays in calls of the store: their sums, and their broadcast.

The store itself holds a dense array under each key, since each worker has all rows of the array.
"""

from __future__ import annotations

import functools
from typing import Sequence

from ..compat import arrays
from ..compat.mxnet import NDArray, SparseNDArray, mx
from ..coordination import operation
from ..world.process_set import ProcessSet
from . import row_sparse
from .row_sparse import Rows


def push_broadcast(
    process_set: ProcessSet,
    name: str,
    value: NDArray,
    targets: Sequence[NDArray],
    root: int,
    priority: int,
    started: list | None = None,
    key: int = 0,
) -> None:
    """Start a broadcast of an array; value and targets may be dense or row_sparse. Returns at once.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that call this function.
    name : str
        The name by which the broadcast is matched.
    value : NDArray
        The root's value is sent, as a dense array.
    targets : sequence of NDArray
        Of the shape and dtype of `value`. Row_sparse targets hold all rows afterwards.
    root : int
        The rank of the root within the set.
    priority : int
        Operations with a higher priority run first.
    started : list, optional
        Gets an item when the broadcast has started, as in `operation.start`.
    key : int, optional
        If the broadcast fails, the core's take_failed_updates() has this number.
    """
    sent = value.tostype("default") if isinstance(value, SparseNDArray) else value
    received = [arrays.empty(array.shape, array) if isinstance(array, SparseNDArray) else array for array in targets]
    arguments = (name, sent.handle.value, arrays.handles(received), root, priority)
    push = functools.partial(process_set._core.push_broadcast, *arguments, key=key)
    operation.start([] if started is None else started, push)
    for array, dense in zip(targets, received):
        if array is not dense:
            with_all_rows(dense).copyto(array)


def summed(
    process_set: ProcessSet, name: str, what: str, values: Sequence[NDArray], priority: int, label: str = ""
) -> Rows:
    """The sum of row_sparse arrays over the devices of each worker and over the workers. Waits for all workers.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks that call this function.
    name : str
        The name by which the sum is matched. If this call raises an error, the other ranks get an error too.
    what : str
        Name of the arrays in errors, for example ``'value of key 3'``.
    values : sequence of row_sparse NDArray
        An array for each device.
    priority : int
        Operations with a higher priority run first.
    label : str, optional
        Must be the same on all ranks.

    Raises
    ------
    ValueError, MXNetError
        As for `row_sparse.contribution`; also, the workers differ in shape or dtype, a worker has rejected its arrays,
        or a worker has left the job.
    """
    with operation.Turn(process_set, name, what) as turn:
        one = row_sparse.contribution(values, what)
        sendings = turn.agreed(row_sparse.turns(process_set, name, [one]))
        counts = turn.meet(f"{label}a sum of {one}", [one.indices.size])
        return row_sparse.allreduce(sendings, [one], counts, priority=priority)[0]


def assign(array: NDArray, rows: Rows) -> None:
    """Make an array hold these rows, and, if it is dense, zeros in all other rows."""
    if isinstance(array, SparseNDArray):
        row_sparse.assign(array, rows)
        return
    held = mx.nd.sparse.zeros("row_sparse", array.shape, ctx=array.context, dtype=array.dtype)
    row_sparse.assign(held, rows)
    arrays.copy(held, array)


def with_all_rows(dense: NDArray) -> NDArray:
    """A dense array as a row_sparse array that holds every row, including zero rows. Returns at once.

    MXNet's optimizers update row_sparse weights only if the weights hold all rows.
    """
    with arrays.not_recorded():
        every = mx.nd.arange(dense.shape[0], dtype="int64", ctx=dense.context)
        return mx.nd.sparse.retain(dense.tostype("row_sparse"), every)
