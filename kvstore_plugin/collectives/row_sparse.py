"""Sums row_sparse arrays over devices and workers; sends only rows that a device or worker holds.

The workers first exchange the numbers of their rows. Each worker builds a dense array with the rows that any worker
holds (the union), and fills rows that it lacks with zeros. The core sums these arrays like other dense arrays. So the
result has the same bits on all workers and, unless the core compresses it between hosts, the bits of the sum of dense
arrays.

The alternative is to gather all workers' rows and sum them on each worker. The union moves less data if workers share
rows, as with word embeddings, and divides the additions among the workers. If workers share no rows, the union sends at
most twice as much data.

The number of rows is known only when the arrays are written, so these functions wait for the arrays, and for the other
workers.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from ..compat import arrays
from ..compat.argument_errors import ArgumentTypeError, ArgumentValueError
from ..compat.mxnet import NDArray, SparseNDArray, mx
from ..coordination import operation
from ..world.process_set import ProcessSet


class Rows(NamedTuple):
    """Some rows of a matrix: values[i] is row indices[i]. A matrix here is an array with any number of dimensions."""

    indices: np.ndarray  # int64, shape (n,)
    values: np.ndarray  # shape (n, elements of a row)


class Workspace:
    """Shared memory of one process set for sums, reused from one sum to the next."""

    def __init__(self, process_set: ProcessSet) -> None:
        self._process_set = process_set
        self._buffers: dict[str, Any] = {}  # by the name of the dtype

    def buffer(self, dtype: np.dtype, count: int) -> Any:
        """Uninitialized memory for `count` elements.

        Raises
        ------
        RuntimeError
            There is no memory left.
        """
        nbytes = count * dtype.itemsize
        held = self._buffers.get(dtype.name)
        if held is None or not held.attached or held.nbytes < nbytes:
            self._buffers.pop(dtype.name, None)
            held = None  # frees the old memory before the new memory is allocated
            held = self._buffers[dtype.name] = self._process_set._core.allocate(nbytes + nbytes // 4)
        return held

    def __reduce__(self) -> tuple:
        return Workspace, (self._process_set,)


class Sending(operation.Turn):
    """The turn in an operation of a sum of rows, which the ranks start if any rank has rows for it.

    Attributes
    ----------
    what : int or dtype
        The operation sends the row numbers of this rank, or sums the rows of this dtype.
    """

    __slots__ = ("_is_needed", "what")

    def __init__(self, process_set: ProcessSet, name: str, call: str, what: Any, is_needed: Any) -> None:
        super().__init__(process_set, name, call)
        self.what = what
        self._is_needed = is_needed  # given what all ranks have told, whether the ranks start the operation

    def _post_refusal(self, reason: str) -> None:
        if self._is_needed(self.met):
            super()._post_refusal(reason)


class Contribution(NamedTuple):
    """One worker's rows in a sum."""

    shape: tuple[int, ...]  # the shape of the whole array
    dtype: np.dtype
    indices: np.ndarray  # rows that any device holds: int64, ascending, unique
    devices: Sequence[Rows]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return int(np.prod(self.shape[1:]))

    def __str__(self) -> str:
        return f"row_sparse {self.dtype.name} {self.shape}"


def is_row_sparse(value: Any) -> bool:
    """Whether `value` is a row_sparse array, or a list that begins with a row_sparse array."""
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return isinstance(value, SparseNDArray) and value.stype == "row_sparse"


def contribution(replicas: Sequence[NDArray], what: str, left_out: Sequence[bool] = ()) -> Contribution:
    """The rows of an array on one or several devices. Waits until the arrays are written.

    Parameters
    ----------
    replicas : sequence of row_sparse NDArray
        An array for each device. The memory of the arrays is used, not copied: they must not change before the sum has
        ended.
    what : str
        Name of the arrays in errors, for example ``'gradient of embedding.weight'``.
    left_out : sequence of bool, optional
        For each device, whether it contributes no rows.

    Raises
    ------
    ValueError
        An array is not row_sparse, or is on a GPU; the arrays differ in shape or dtype; the dtype cannot be summed; a
        row occurs twice or is out of range.
    MXNetError
        An array carries an error.
    """
    for array in replicas:
        _check(array, what)
    arrays.check_alike(replicas, f"devices of the {what}")
    dtype = np.dtype(replicas[0].dtype)
    if dtype.name not in arrays.DTYPES:
        raise ArgumentValueError(
            f"The {what} is a row_sparse array of {arrays.dtype_name(dtype)}, which cannot be summed."
        )
    skipped = left_out or [False] * len(replicas)
    devices = [_rows_of(array, what, skip) for array, skip in zip(replicas, skipped)]
    indices = devices[0].indices
    if len(devices) > 1 or not _ascends(indices):
        indices = _union([rows.indices for rows in devices], replicas[0].shape[0])
    return Contribution(tuple(replicas[0].shape), dtype, indices, devices)


def turns(process_set: ProcessSet, name: str, contributions: Sequence[Contribution], first: int = 0) -> list[Sending]:
    """The turns in the operations of `allreduce`, for `Turn.agreed` before the ranks exchange the numbers of rows.

    Parameters
    ----------
    process_set : ProcessSet
    name : str
        The prefix of the names by which the operations are matched.
    contributions : sequence of Contribution
    first : int, optional
        The position of the first number of rows in the exchange; those of the other contributions follow.
    """
    last = first + len(contributions)
    sendings = [
        Sending(
            process_set,
            f"{name}/indices of {rank}",
            "an exchange of row numbers",
            rank,
            lambda met, rank=rank: len(met) > 1 and met[rank, first:last].any(),
        )
        for rank in range(process_set.size())
    ]
    for dtype in dict.fromkeys(contribution.dtype for contribution in contributions):
        columns = [first + i for i, one in enumerate(contributions) if one.dtype == dtype and one.width]
        sendings.append(
            Sending(
                process_set,
                f"{name}/rows of {dtype.name}",
                "a sum of sparse rows",
                dtype,
                lambda met, columns=columns: met[:, columns].any(),
            )
        )
    return sendings


def allreduce(
    sendings: Sequence[Sending],
    contributions: Sequence[Contribution],
    counts: np.ndarray,
    scale: float = 1.0,
    priority: int = 0,
    wire: str = "",
    workspace: Workspace | None = None,
) -> list[Rows]:
    """Sum rows over the workers of a process set. All workers must call it; it waits for the sums.

    Parameters
    ----------
    sendings : sequence of Sending
        From `turns`.
    contributions : sequence of Contribution
        The same number on all workers, of the same shapes and dtypes.
    counts : ndarray of int64, shape (size, len(contributions))
        How many rows each worker contributes; the workers have already exchanged these numbers.
    scale : float, optional
        Factor by which the sums are multiplied.
    priority : int, optional
        Operations with a higher priority run first.
    wire : str, optional
        Dtype in which float32 and float64 values are sent between hosts; empty: their own dtype.
    workspace : Workspace, optional
        Memory in which the sums are formed, which saves copies. Either all workers pass a workspace, each with arrays
        on one device, or no worker does.

    Returns
    -------
    list of Rows
        The sums, in the order of `contributions`, with the same bits on all workers; row numbers ascend. Rows in a
        workspace are valid until its next use.

    Raises
    ------
    MXNetError
        A rank has left the job.
    """
    taken = {sending.what: sending for sending in sendings}
    unions = _unions(taken, contributions, counts, priority)
    sums: list[Any] = [None] * len(contributions)
    for dtype in dict.fromkeys(contribution.dtype for contribution in contributions):
        members = [number for number, contribution in enumerate(contributions) if contribution.dtype == dtype]
        options = {"scale": scale, "priority": priority, "wire": wire if dtype.name in ("float32", "float64") else ""}
        parts = [contributions[i] for i in members], [unions[i] for i in members]
        count = sum(rows.size * contribution.width for contribution, rows in zip(*parts))
        if not count:
            views = _laid_out(*parts)[1]
        else:
            with taken[dtype] as turn:
                if workspace is None:
                    inputs, views = _laid_out(*parts)
                    work = turn.submit(turn.core.submit_allreduce, inputs, [inputs[0]], **options)
                else:
                    buffer = workspace.buffer(dtype, count)
                    views = _laid_out(*parts, np.frombuffer(buffer, dtype, count))[1]
                    work = turn.submit(turn.core.submit_bucket, buffer, 0, count, dtype.name, "of rows", **options)
            operation.wait(work)
        for number, view in zip(members, views):
            sums[number] = Rows(unions[number], view)
    return sums


def sum_over_devices(replicas: Sequence[NDArray], what: str) -> None:
    """Overwrite row_sparse arrays, one for each device, with their sum. Waits for the arrays.

    Parameters
    ----------
    replicas : sequence of row_sparse NDArray
        Of the same shape and dtype.
    what : str
        As for `contribution`.

    Raises
    ------
    ValueError, MXNetError
        As for `contribution`.
    """
    one = contribution(replicas, what)
    (total, *others), (view,) = _laid_out([one], [one.indices])
    for values in others:
        total += values
    for array in replicas:
        assign(array, Rows(one.indices, view))


def assign(array: NDArray, rows: Rows) -> None:
    """Make a row_sparse array hold exactly these rows.

    Parameters
    ----------
    array : row_sparse NDArray
        The array itself is written, so that autograd or a Parameter that refers to it finds the rows.
    rows : Rows
        In ascending order. The caller may change them afterwards.
    """
    made = mx.nd.sparse.zeros("row_sparse", array.shape, ctx=array.context, dtype=array.dtype)
    if rows.indices.size:
        values = np.ascontiguousarray(rows.values).reshape(-1, *array.shape[1:])
        data = [mx.nd.from_numpy(array, zero_copy=True) for array in (values, rows.indices)]
        made = mx.nd.sparse.row_sparse_array(tuple(data), array.shape, ctx=array.context, dtype=array.dtype)
    with arrays.not_recorded():
        made.copyto(array)


def squares(values: np.ndarray | NDArray) -> float:
    """The sum of squares of rows, in float64. Waits for an NDArray."""
    if isinstance(values, NDArray):
        values = _rows_of(values, "gradient", False).values
    wide = values.astype(np.float64).ravel()
    return float(wide @ wide)


def scaled(rows: Rows, factor: float) -> Rows:
    """The rows times a factor, computed in float64 and rounded once."""
    return Rows(rows.indices, (rows.values.astype(np.float64) * factor).astype(rows.values.dtype))


def scale(array: NDArray, factor: float) -> None:
    """Multiply a row_sparse array by a factor. Waits for the array."""
    assign(array, scaled(_rows_of(array, "gradient", False), factor))


def _check(array: NDArray, what: str) -> None:
    if not isinstance(array, NDArray):
        raise ArgumentTypeError(f"The {what} must hold NDArrays, not {type(array).__name__}.")
    if not isinstance(array, SparseNDArray) or array.stype != "row_sparse":
        raise ArgumentValueError(
            f"The {what} must be row_sparse on all devices, but it is {array.stype} on {array.context}."
        )
    if not array.context.device_type.startswith("cpu"):
        raise ArgumentValueError(
            f"The {what} is on {array.context}, but row_sparse arrays are supported on CPUs only. Use "
            "as_in_context(cpu())."
        )


def _rows_of(array: NDArray, what: str, left_out: bool) -> Rows:
    width = int(np.prod(array.shape[1:]))
    dtype = np.dtype(array.dtype)
    array.wait_to_read()
    indices = array.indices.asnumpy()
    if left_out or not indices.size:
        return Rows(np.empty(0, np.int64), np.empty((0, width), dtype))
    if indices.min() < 0 or indices.max() >= array.shape[0]:
        raise ArgumentValueError(
            f"The {what} has {array.shape[0]} rows, but its row numbers go from {indices.min()} to {indices.max()}."
        )
    if not _ascends(indices) and np.unique(indices).size < indices.size:
        raise ArgumentValueError(f"The {what} is a row_sparse array that holds the same row twice.")
    held = arrays.memory_of(array, indices.size * width * dtype.itemsize)  # the array's `data` would be a copy
    return Rows(indices, held.view(dtype).reshape(indices.size, width))


def _ascends(indices: np.ndarray) -> bool:
    return bool((indices[1:] > indices[:-1]).all())


def _union(lists: Sequence[np.ndarray], row_count: int) -> np.ndarray:
    """The union of some lists of numbers, ascending, each number once."""
    if row_count > 32 * sum(map(len, lists)):  # for few numbers, sorting is faster than reading a byte for each row
        return np.unique(np.concatenate(lists))
    held = np.zeros(row_count, dtype=bool)
    for indices in lists:
        held[indices] = True
    return np.flatnonzero(held)


def _unions(
    taken: Mapping[Any, Sending], contributions: Sequence[Contribution], counts: np.ndarray, priority: int
) -> list[np.ndarray]:
    """For each contribution, the rows that any worker holds."""
    if len(counts) == 1 or not counts.any():
        return [contribution.indices for contribution in contributions]
    own = np.concatenate([contribution.indices for contribution in contributions])
    ends = np.cumsum(counts.sum(axis=1))
    gathered = np.empty(ends[-1], dtype=np.int64)
    parts = np.split(gathered, ends[:-1])
    works = []
    for rank, part in enumerate(parts):
        if part.size:
            with taken[rank] as turn:
                sent = own if rank == turn.core.rank() else None
                works.append(turn.submit(turn.core.submit_broadcast, sent, [part], root=rank, priority=priority))
    for work in works:
        operation.wait(work)
    of_ranks = [np.split(part, np.cumsum(row[:-1])) for part, row in zip(parts, counts)]
    return [_union(lists, contribution.shape[0]) for contribution, lists in zip(contributions, zip(*of_ranks))]


def _laid_out(
    contributions: Sequence[Contribution], unions: Sequence[np.ndarray], memory: np.ndarray | None = None
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """One array per device, which holds the rows of all contributions one after another; and views of the first array.

    Each view is the part of one contribution. The caller sums into the first array, which is `memory` if it is given.
    """
    ends = np.cumsum([union.size * contribution.width for contribution, union in zip(contributions, unions)])
    inputs = [np.zeros(ends[-1], contributions[0].dtype) if memory is None else memory]
    if memory is not None:
        memory.fill(0)
    for _ in range(1, max(len(contribution.devices) for contribution in contributions)):
        inputs.append(np.zeros(ends[-1], contributions[0].dtype))
    views = []
    for number, values in enumerate(inputs):
        for contribution, union, part in zip(contributions, unions, np.split(values, ends[:-1])):
            view = part.reshape(union.size, contribution.width)
            if number == 0:
                views.append(view)
            if number < len(contribution.devices) and contribution.devices[number].indices.size:
                rows = contribution.devices[number]
                view[np.searchsorted(union, rows.indices)] = rows.values
    return inputs, views
