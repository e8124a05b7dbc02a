"""Gradients through the collective operations that a program calls inside autograd.record().

The backward pass of a call is an operation of all ranks, since each rank's gradient depends on the arrays of all ranks.
The operation's name contains the call's name and turn (the number of the call under this name), so ranks may run
backward passes in different orders. Either all ranks or no rank must record a call. In blocking calls the ranks
exchange whether the call is recorded; the labels of other calls, which the core compares, show it. If a rank's array
needs no gradient, the rank records the call with an extra variable, so that autograd runs the backward pass on this
rank too.
"""

from __future__ import annotations

from typing import Callable, Sequence

import numpy as np

from ..compat import arrays, recorded
from ..compat.argument_errors import ArgumentValueError
from ..compat.mxnet import MXNetError, NDArray, autograd
from ..coordination import hook_operations, operation, operation_names
from ..world import process
from . import reduce_ops

# What a rank tells the other ranks about an array in a blocking call.
_UNRECORDED, _RECORDED, _NEEDS_GRADIENT = range(3)

Exchange = Callable[[operation.Turn, str, Sequence[NDArray], Sequence[NDArray]], None]


def is_recorded(tensors: Sequence[NDArray]) -> bool:
    """Whether autograd records a call with these arrays; the same on all ranks if all are inside autograd.record()."""
    return (
        autograd.is_recording()
        and hook_operations.running() is None
        and any(arrays.kind(tensor) == "float" for tensor in tensors)
    )


def labelled(label: str) -> str:
    """The label of a recorded call. `label`: the label of the same call outside of autograd.record()."""
    return f"{label}, inside autograd.record()" if label else "inside autograd.record()"


def check_in_place(call: str, tensors: Sequence[NDArray]) -> None:
    """Refuse to overwrite recorded arrays.

    Raises
    ------
    ValueError
        The call is inside autograd.record(), and autograd has recorded an array that the call would overwrite.
    """
    if is_recorded(tensors) and any(recorded.is_recorded(array) for array in tensors if arrays.kind(array) == "float"):
        raise ArgumentValueError(
            f"{call} would overwrite an array that autograd.record() has recorded, so its gradient would be wrong. "
            "Use the call without the underscore, which returns a new array, or autograd.pause()."
        )


def state(tensor: NDArray) -> int:
    """Whether a blocking call with this array is recorded, and whether the array needs a gradient, as one number."""
    if not is_recorded([tensor]):
        return _UNRECORDED
    return _NEEDS_GRADIENT if recorded.is_recorded(tensor) else _RECORDED


def is_needed(turn: operation.Turn, states: np.ndarray) -> bool:
    """Whether a call is recorded, from the exchanged states of all ranks.

    Raises
    ------
    MXNetError
        Raised on all ranks: a rank needs a gradient, but another rank has not recorded the call.
    """
    if not (states == _NEEDS_GRADIENT).any():
        return False
    if (states == _UNRECORDED).any():
        outside = [turn.process_set.ranks[i] for i in np.flatnonzero(states == _UNRECORDED)]
        raise MXNetError(
            f"mykv: {turn.call} was called outside of autograd.record() on the ranks {outside}, while other ranks need "
            "a gradient through it, in which all ranks must take part. Call it inside autograd.record() on all ranks, "
            "or inside autograd.pause() on all ranks."
        )
    return True


def results(
    turn: operation.Turn,
    inputs: Sequence[NDArray],
    outputs: Sequence[NDArray],
    exchange: Exchange,
    suffix: str = "",
    turn_of: type[operation.Turn] = operation.Turn,
) -> list[NDArray]:
    """Record a call that was pushed, and return its results.

    Parameters
    ----------
    turn : Turn
        The turn of the call.
    inputs, outputs : sequence of NDArray
        The call's arrays of floating-point numbers; as many inputs as outputs.
    exchange : callable
        Called as ``exchange(turn, label, gradients, targets)`` in the backward pass: starts the operation that computes
        the gradients of the inputs, `targets`, from the gradients of the outputs, `gradients`.
    suffix : str, optional
        Distinguishes several backward passes of one call.
    turn_of : type, optional
        The class of the backward pass's turn.
    """
    number = turn.core.last_turn(turn.name)
    process_set, recorded_call, generation = turn.process_set, turn.call, process.generation
    call = f"backward of {recorded_call}{suffix}"
    name = f"{process_set._scope}/{call}, number {number % operation_names.BACKWARD_NAMES}"
    shapes, dtypes = [array.shape for array in inputs], [array.as_nd_ndarray().dtype for array in inputs]
    known = [position for position, one in enumerate(inputs) if recorded.is_recorded(one)]

    def backward(gradients: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
        if generation != process.generation:
            raise RuntimeError(f"mykv: {recorded_call} was recorded before the last init(). Record the call again.")
        # The argument of y.backward() may differ in dtype from y.
        gradients = [one if one.dtype == dtype else one.astype(dtype) for one, dtype in zip(gradients, dtypes)]
        if not known:
            # MXNet reuses the memory of these gradients for later gradients, after all operations on the memory. So
            # without a copy, later gradients would wait for this exchange. That would be a deadlock if another rank's
            # backward pass reaches its calls in a different order.
            gradients = [arrays.duplicate(gradient) for gradient in gradients]
        wanted = dict(zip(known, targets))
        everything = [
            wanted[position] if position in wanted else arrays.empty(shape, gradient)
            for position, (shape, gradient) in enumerate(zip(shapes, gradients))
        ]
        with turn_of(process_set, name, call) as taken:
            exchange(taken, f"{call}, number {number}", gradients, everything)
        if not known:
            set_zero(targets[0])

    return recorded.record([inputs[i] for i in known] or [recorded.variable(inputs[0])], outputs, backward)


def refused(inputs: Sequence[NDArray], outputs: Sequence[NDArray], sentence: str) -> list[NDArray]:
    """Record a call that has no gradient, and return its results. A backward pass through the call raises an error."""
    known = [array for array in inputs if recorded.is_recorded(array)]
    if not known:
        return list(outputs)

    def backward(gradients: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
        raise ValueError(f"mykv: {sentence}")

    return recorded.record(known, outputs, backward)


def set_zero(array: NDArray) -> None:
    """Set an array of any shape to zero."""
    if array.size:
        array.reshape((-1,))[:] = 0


def reduce_to_owners(
    turn: operation.Turn, label: str, gradient: NDArray, target: NDArray, counts: Sequence[int], priority: int
) -> None:
    """Sum a gradient over all ranks and split the sum: rank 0 gets the first `counts[0]` elements, and so on."""
    division, begin = [], 0
    for root, count in enumerate(counts):
        if count:
            division.append((0, begin, count, root))
        begin += count
    if not division:
        return  # no rank has an element
    own = [target] if counts[turn.core.rank()] else []
    turn.push(
        turn.core.push_reduce_to_owners,
        arrays.handles([gradient]),
        division,
        arrays.handles(own),
        priority=priority,
        label=label,
    )


def gather_of_rows(rows: list[int], scale: float, priority: int) -> Exchange:
    """The exchange that gathers the gradients of all ranks, times `scale`. Rank r's gradient has `rows[r]` rows."""

    def exchange(turn: operation.Turn, label: str, gradients: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
        source = reduce_ops.scaled(gradients[0], scale)
        turn.push(turn.core.push_allgather, source.handle.value, targets[0].handle.value, rows, priority, label=label)

    return exchange


def sum_at_root(root: int, priority: int) -> Exchange:
    """The exchange that sums the gradients of all ranks on the rank `root`; the other ranks get zeros."""

    def exchange(turn: operation.Turn, label: str, gradients: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
        counts = [gradients[0].size if rank == root else 0 for rank in range(turn.core.size())]
        reduce_to_owners(turn, label, gradients[0], targets[0], counts, priority)
        if turn.core.rank() != root:
            set_zero(targets[0])

    return exchange
