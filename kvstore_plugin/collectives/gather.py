"""Operations that wait until all ranks call them, since the sizes of their results depend on the other ranks.

The calls return when the sizes are known; MXNet's engine fills the results later, as in other operations. The n-th call
on a rank is matched with the n-th call on every other rank of the process set, even if their names differ.
"""

from __future__ import annotations

import operator
from typing import Any, Sequence

import numpy as np

from ..compat import arrays
from ..compat.argument_errors import ArgumentTypeError, ArgumentValueError
from ..compat.mxnet import NDArray
from ..coordination import operation
from ..world.process_set import ProcessSet, global_process_set
from . import backward


def allgather(
    tensor: NDArray, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> NDArray:
    """Concatenate the arrays of all ranks along their first dimension. Waits until all ranks call it.

    Parameters
    ----------
    tensor : NDArray
        Of shape (n, ...) and any dtype; n, which may be 0, may differ between the ranks. The call does not change the
        array, and the caller may change or delete it at once.
    name : str, optional
        Shown in errors; the same on all ranks. Blocking calls are matched by their order in the process set.
    priority : int, optional
        Operations with a higher priority run first.
    process_set : ProcessSet, optional
        The ranks that call this function.

    Returns
    -------
    NDArray
        A new array with the type and dtype of `tensor`: the rows of all ranks, in the order of ranks. Its first
        dimension is the sum of all n. It may be used at once: the engine makes readers wait for its values.

    Raises
    ------
    TypeError, ValueError
        `tensor` is a scalar, is sparse, or is on a GPU although the core has found no CUDA runtime; then the call on
        the other ranks raises an MXNetError that names this rank. Or this rank is not in the process set.
    RuntimeError
        kvstore_plugin is not initialized.
    MXNetError
        Ranks differ in dtype, name, a dimension other than the first, or in whether the array is on a GPU. Or a rank
        needs a gradient, and another rank's call is outside of autograd.record(). Or a rank waits in another call, has
        rejected its arguments, or has left the job. If a rank's array carries an error of MXNet's engine, reading the
        result raises an error (with NaiveEngine, this call does).

    Notes
    -----
    If all ranks call it inside autograd.record(), a floating-point result is differentiable if the array of any rank
    needs a gradient: each rank gets the gradients of its rows, summed over all ranks.

    Examples
    --------
    >>> predictions = net(images).argmax(axis=1)  # for this worker's 32 samples
    >>> everyones = mykv.allgather(predictions, name="predictions")
    >>> everyones.shape
    (64,)
    """
    with operation.waiting(process_set, operation.described("allgather", name)) as turn:
        arrays.one(tensor, "tensor of allgather")
        return _gathered(turn, [tensor], "of", name, priority)[0]


def grouped_allgather(
    tensors: Sequence[NDArray],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[NDArray]:
    """Concatenate several arrays, each with the other ranks' arrays at the same position of `tensors`.

    Waits until all ranks call it.

    Parameters
    ----------
    tensors : sequence of NDArray
        Each as for `allgather`; the same number of arrays on all ranks.
    name, priority, process_set
        As for `allgather`.

    Returns
    -------
    list of NDArray
        The results, in the order of `tensors`.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MXNetError
        As for `allgather`; also, ranks differ in the number of arrays.

    Examples
    --------
    >>> predictions = net(images).argmax(axis=1)
    >>> everyones, truth = mykv.grouped_allgather([predictions, labels])
    >>> truth.shape
    (64,)
    """
    with operation.waiting(process_set, operation.described("grouped_allgather", name)) as turn:
        inputs = arrays.as_group(tensors)
        return _gathered(turn, inputs, f"of {len(inputs)} arrays:", name, priority)


def alltoall(
    tensor: NDArray,
    splits: NDArray | Sequence[int] | None = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray | tuple[NDArray, NDArray]:
    """Send rows of an array to each rank, and receive rows from each rank. Waits until all ranks call it.

    Parameters
    ----------
    tensor : NDArray
        Of shape (n, ...) and any dtype; n may differ between the ranks. The call does not change the array, and the
        caller may change or delete it at once.
    splits : NDArray of int32 or sequence of int, shape (size,), optional
        How many rows go to each rank, in the order of ranks; n in total. By default all ranks get the same number.
    name, priority, process_set
        As for `allgather`.

    Returns
    -------
    output : NDArray
        A new array with the type and dtype of `tensor`: the rows that the ranks have sent to this rank, in the order of
        ranks. It may be used at once: the engine makes readers wait for its values.
    received_splits : NDArray of int32, shape (size,)
        How many rows each rank has sent; only if `splits` was given.

    Raises
    ------
    TypeError, ValueError
        As for `allgather`; also, `splits` has a wrong length, dtype or sum, or a negative number; or `splits` is not
        given, and n is not divisible by the number of ranks.
    RuntimeError, MXNetError
        As for `allgather`.

    Notes
    -----
    If all ranks call it inside autograd.record(), a floating-point result is differentiable if the array of any rank
    needs a gradient: each rank gets the gradients of the rows that it has sent.

    Examples
    --------
    >>> rows = mx.np.full((4, 2), mykv.rank())
    >>> received, splits = mykv.alltoall(rows, splits=[1, 3])  # 1 row to rank 0, 3 rows to rank 1
    >>> splits.asnumpy().tolist() == ([1, 1] if mykv.rank() == 0 else [3, 3])
    True
    """
    with operation.waiting(process_set, operation.described("alltoall", name)) as turn:
        arrays.one(tensor, "tensor of alltoall")
        arrays.check_rows(tensor, turn.call)
        operation.checked_priority(priority)
        size = turn.core.size()
        sent = _equal_splits(tensor, size) if splits is None else _checked_splits(splits, tensor, size)
        (sending,) = turn.agreed([_Sending(tensor, *operation.gathered(process_set, name, "alltoall"))])
        met = turn.meet(f"{turn.call} of {_row(tensor)}", [*sent, backward.state(tensor)])
        matrix = met[:, :size]
        is_recorded = backward.is_needed(turn, met[:, size])
        received = matrix[:, turn.core.rank()]
        output = arrays.empty((int(received.sum()), *tensor.shape[1:]), tensor)
        with sending:
            sending.push(turn.core.push_alltoall, tensor.handle.value, output.handle.value, matrix.tolist(), priority)
        if is_recorded:
            output = _recorded_sending(sending, tensor, output, matrix.T, priority)
    if splits is None:
        return output
    return output, arrays.from_numpy(received.astype(np.int32), tensor)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks call it. Operations that were started earlier may still be running.

    Parameters
    ----------
    process_set : ProcessSet, optional
        The ranks that call this function.

    Raises
    ------
    TypeError, ValueError
        This rank is not in the process set.
    RuntimeError
        kvstore_plugin is not initialized.
    MXNetError
        A rank waits in another call, has rejected the arguments of a blocking call, or has left the job.

    Examples
    --------
    >>> if mykv.rank() == 0:
    ...     np.save("labels.npy", targets)
    >>> mykv.barrier()  # waits until rank 0 has written the file
    >>> len(np.load("labels.npy"))
    1797
    """
    with operation.waiting(process_set, "barrier") as turn:
        turn.meet("barrier")


class _Sending(operation.Turn):
    """The turn in which an alltoall sends its rows. The core divides the turn into several operations."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: NDArray, *given: Any) -> None:
        super().__init__(*given)
        self._tensor = tensor

    def _post_refusal(self, reason: str) -> None:
        matrix = self.met[:, : len(self.met)]  # the splits of all ranks, without the states of their arrays
        self.core.refuse_alltoall(self.name, self._tensor.handle.value, matrix.tolist(), reason)


def _gathered(turn: operation.Turn, tensors: list[NDArray], what: str, name: Any, priority: Any) -> list[NDArray]:
    """The concatenated arrays of all ranks.

    The ranks first exchange the first dimensions of their arrays, and compare the other dimensions and the dtypes.
    """
    for tensor in tensors:
        arrays.check_rows(tensor, turn.call)
    operation.checked_priority(priority)
    gatherings = turn.agreed([operation.gathering(turn.process_set, name, "allgather") for _ in tensors])
    label = f"{turn.call} {what} {', '.join(_row(tensor) for tensor in tensors)}"
    met = turn.meet(label, [tensor.shape[0] for tensor in tensors] + [backward.state(tensor) for tensor in tensors])
    rows, states = np.hsplit(met, 2)
    are_recorded = [backward.is_needed(turn, of_tensor) for of_tensor in states.T]
    outputs = []
    for tensor, counts, gathering, is_recorded in zip(tensors, rows.T, gatherings, are_recorded):
        output = arrays.empty((int(counts.sum()), *tensor.shape[1:]), tensor)
        with gathering:
            push = turn.core.push_allgather
            gathering.push(push, tensor.handle.value, output.handle.value, counts.tolist(), priority)
        outputs.append(_recorded_gathering(gathering, tensor, output, counts, priority) if is_recorded else output)
    return outputs


def _recorded_gathering(
    turn: operation.Turn, tensor: NDArray, output: NDArray, counts: np.ndarray, priority: int
) -> NDArray:
    """Record an allgather. Its gradient on a rank is the gradient of the rank's rows, summed over all ranks."""
    elements = [int(count) * int(np.prod(tensor.shape[1:])) for count in counts]

    def exchange(taken: operation.Turn, label: str, gradients: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
        backward.reduce_to_owners(taken, label, gradients[0], targets[0], elements, priority)

    return backward.results(turn, [tensor], [output], exchange)[0]


class _SendingBack(operation.Turn):
    """The turn in the backward pass of an alltoall."""

    __slots__ = ("refuse",)

    def _post_refusal(self, reason: str) -> None:
        self.refuse(reason)


def _recorded_sending(
    turn: operation.Turn, tensor: NDArray, output: NDArray, matrix: np.ndarray, priority: int
) -> NDArray:
    """Record an alltoall. Its gradient is an alltoall with the transposed matrix."""
    back = matrix.tolist()

    def exchange(taken: operation.Turn, label: str, gradients: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
        gradient, core = gradients[0].handle.value, taken.core
        taken.refuse = lambda reason: core.refuse_alltoall(taken.name, gradient, back, reason)
        taken.push(core.push_alltoall, gradient, targets[0].handle.value, back, priority, label=label)

    return backward.results(turn, [tensor], [output], exchange, turn_of=_SendingBack)[0]


def _row(tensor: NDArray) -> str:
    """Dtype and all dimensions of an array except the first, as ``'float32 (*, 3)'``, and whether it is on a GPU."""
    device = " on GPU" if arrays.on_gpu(tensor) else ""
    return f"{arrays.dtype_name(tensor.dtype)} ({', '.join(['*', *map(str, tensor.shape[1:])])}){device}"


def _equal_splits(tensor: NDArray, size: int) -> list[int]:
    each, more = divmod(tensor.shape[0], size)
    if more:
        raise ArgumentValueError(
            f"The first dimension of tensor is {tensor.shape[0]}, which alltoall without splits cannot divide equally "
            f"among {size} ranks. Pass splits."
        )
    return [each] * size


def _checked_splits(splits: Any, tensor: NDArray, size: int) -> list[int]:
    if isinstance(splits, NDArray):
        if splits.dtype != np.int32:
            raise ArgumentValueError(f"splits must be int32, not {arrays.dtype_name(splits.dtype)}.")
        splits = splits.asnumpy()
    try:
        numbers = [operator.index(number) for number in splits]
    except TypeError:
        raise ArgumentTypeError(f"splits must be an NDArray of int32 or a list of ints, not {splits!r}.") from None
    if len(numbers) != size:
        raise ArgumentValueError(
            f"splits must have one number for each of the {size} ranks, but it has {len(numbers)}."
        )
    if min(numbers) < 0:
        raise ArgumentValueError(f"splits must not be negative, but holds {min(numbers)}.")
    if sum(numbers) != tensor.shape[0]:
        raise ArgumentValueError(
            f"The sum of splits must be {tensor.shape[0]}, the first dimension of tensor, but it is {sum(numbers)}."
        )
    return numbers
