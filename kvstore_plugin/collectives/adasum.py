"""Adasum: a sum of gradients that does not overshoot if they point in the same direction.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, arXiv:2006.02924, equation 4:

    Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

Pairs of pairs are combined in the same way, so the number of ranks must be a power of two. Every rank gets all ranks'
arrays and combines them by itself, in float64 and with sums in a fixed order, so that all ranks get the same bits. That
costs `size` times the traffic and memory of a sum, but takes a single operation, which detects ranks in another
operation.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from ..compat import arrays
from ..compat.argument_errors import ArgumentValueError
from ..compat.mxnet import NDArray, mx

# More than the threads that a process has for an operator.
_ROWS = 256


def check(tensors: Sequence[NDArray], size: int) -> None:
    """Refuse arrays and numbers of ranks for which there is no Adasum.

    Raises
    ------
    ValueError
        `size` is no power of two, or an array holds integers or bool.
    """
    if size & (size - 1):
        raise ArgumentValueError(f"Adasum needs a power of two of ranks, and there are {size}: use op=Average.")
    for tensor in tensors:
        if arrays.kind(tensor) != "float":
            raise ArgumentValueError(
                f"Adasum needs floating-point arrays, not {arrays.dtype_name(tensor.dtype)}: use op=Sum."
            )


def gathered(tensor: NDArray, turn: Any) -> NDArray:
    """An array of shape (ranks, elements); its sum over all ranks has every rank's `tensor` in a row of its own."""
    size, rank = turn.core.size(), turn.core.rank()
    if not tensor.size:
        return arrays.empty((size, 0), tensor.as_nd_ndarray())
    with arrays.not_recorded():
        own = _flat(tensor)
        dtype = "float64" if own.dtype is np.float64 else "float32"
        rows = mx.nd.zeros((size, own.size), ctx=tensor.context, dtype=dtype)
        rows[rank : rank + 1] = own.astype(dtype).reshape((1, own.size))
    return rows


def combine(rows: NDArray, output: NDArray, factor: float) -> None:
    """Write `factor` times the Adasum of the rows, shape (ranks, elements), to `output`."""
    if not output.size:
        return
    with arrays.not_recorded():
        flat = _flat(output)
        result = _of_rows(rows, 0, rows.shape[0]) * factor
        flat[:] = result.astype(flat.dtype)


def _flat(tensor: NDArray) -> NDArray:
    """The memory of an array as one row of mx.nd."""
    with mx.util.np_shape(True):
        return tensor.as_nd_ndarray().reshape((tensor.size,))


def _of_rows(rows: NDArray, first: int, last: int) -> NDArray:
    if last - first == 1:
        return rows[first : first + 1].reshape((-1,)).astype("float64")
    half = (first + last) // 2
    a, b = _of_rows(rows, first, half), _of_rows(rows, half, last)
    product = _total(a * b)
    return a * _share(product, _total(a * a)) + b * _share(product, _total(b * b))


def _share(product: NDArray, square: NDArray) -> NDArray:
    """1 - product / (2 * square), of shape (1,); 1 if the square is 0, since then the array is 0."""
    nonzero = square != 0
    return 1 - nonzero * product / (2 * (square + (1 - nonzero)))


def _total(values: NDArray) -> NDArray:
    """Sum of a row, of shape (1,), in an order that does not depend on the number of threads.

    MXNet gives each thread whole rows if there are at least as many rows as threads.
    """
    columns, rest = divmod(values.size, _ROWS)
    if columns > 1:
        sums = values[: columns * _ROWS].reshape((_ROWS, columns)).sum(axis=1)
        values = mx.nd.concat(sums, values[columns * _ROWS :], dim=0) if rest else sums
    return mx.nd.broadcast_to(values.reshape((1, -1)), (_ROWS, values.size)).sum(axis=1)[:1]
