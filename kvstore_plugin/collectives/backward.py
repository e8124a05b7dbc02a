"""Gradients through the collective operations that a program calls inside autograd.record().

The backward pass of a call is an operation too. Its name contains the call's name and turn, so that ranks may run
backward passes in different orders. All ranks take part in it, since each rank's result depends on the arrays of all
ranks. So either all ranks must record a call, or none: blocking calls exchange whether they are recorded, and labels of
other calls show it. On a rank whose own array needs no gradient, the call is recorded with an extra variable, so that
backward reaches the call there too.
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

# A rank's state of an array in a blocking call.
_UNRECORDED, _RECORDED, _NEEDS_GRADIENT = range(3)

Exchange = Callable[[operation.Turn, str, Sequence[NDArray], Sequence[NDArray]], None]


def is_recorded(tensors: Sequence[NDArray]) -> bool:
    """Whether a call with these arrays is recorded; the same on all ranks inside autograd.record()."""
    return (
        autograd.is_recording()
        and hook_operations.running() is None
        and any(arrays.kind(tensor) == "float" for tensor in tensors)
    )


def labelled(label: str) -> str:
    """The label of a recorded call, from its label without recording."""
    return f"{label}, inside autograd.record()" if label else "inside autograd.record()"


def check_in_place(call: str, tensors: Sequence[NDArray]) -> None:
    """Refuse to overwrite recorded arrays.

    Raises
    ------
    ValueError
        A call in place is recorded, and autograd knows one of its arrays.
    """
    if is_recorded(tensors) and any(recorded.is_recorded(array) for array in tensors if arrays.kind(array) == "float"):
        raise ArgumentValueError(
            f"{call} would overwrite an array that autograd.record() has noted, so its gradient would be wrong. Use "
            "the call without the underscore, which returns a new array, or autograd.pause()."
        )


def state(tensor: NDArray) -> int:
    """This rank's state of an array, for the other ranks in a blocking call."""
    if not is_recorded([tensor]):
        return _UNRECORDED
    return _NEEDS_GRADIENT if recorded.is_recorded(tensor) else _RECORDED


def is_needed(turn: operation.Turn, states: np.ndarray) -> bool:
    """Whether a call is recorded, from the exchanged states of all ranks.

    Raises
    ------
    MXNetError
        A rank needs a gradient, and another rank has not recorded the call; on all ranks.
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
        That of the call.
    inputs, outputs : sequence of NDArray
        Equally many, of floating-point numbers.
    exchange : callable
        Called as ``exchange(turn, label, gradients, targets)`` in the backward pass: starts the operation that computes
        the gradients of the inputs, `targets`, from those of the outputs.
    suffix : str, optional
        Distinguishes several backward passes of one call.
    turn_of : type, optional
        The class of the backward pass's turn.
    """
    number = turn.core.last_turn(turn.name)
    process_set, call, generation = turn.process_set, f"backward of {turn.call}{suffix}", process.generation
    name = f"{process_set._scope}/{call}, number {number % operation_names.BACKWARD_NAMES}"
    shapes, dtypes = [array.shape for array in inputs], [array.as_nd_ndarray().dtype for array in inputs]
    known = [position for position, one in enumerate(inputs) if recorded.is_recorded(one)]

    def backward(gradients: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
        if generation != process.generation:
            raise RuntimeError(f"mykv: {call} comes after another init() than the call. Record the call again.")
        # The argument of y.backward() may have another dtype than y.
        gradients = [one if one.dtype == dtype else one.astype(dtype) for one, dtype in zip(gradients, dtypes)]
        if not known:
            # MXNet holds the memory that it has passed until the operations on it have ended, and gives the memory to
            # later gradients. Nothing waits for the result here, so those operations must not be delayed: another
            # rank's backward may reach several calls in another order.
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
    """Record a call without a gradient, and return its results; a backward pass that reaches it fails."""
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
    """Sum a gradient over all ranks, and give rank r its `counts[r]` elements, in the order of ranks."""
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
    """The exchange that gathers the gradients of all ranks, with these numbers of rows, times a factor."""

    def exchange(turn: operation.Turn, label: str, gradients: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
        source = reduce_ops.scaled(gradients[0], scale)
        turn.push(turn.core.push_allgather, source.handle.value, targets[0].handle.value, rows, priority, label=label)

    return exchange


def sum_at_root(root: int, priority: int) -> Exchange:
    """The exchange that sums the gradients of all ranks at one rank; the others get zeros."""

    def exchange(turn: operation.Turn, label: str, gradients: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
        counts = [gradients[0].size if rank == root else 0 for rank in range(turn.core.size())]
        reduce_to_owners(turn, label, gradients[0], targets[0], counts, priority)
        if turn.core.rank() != root:
            set_zero(targets[0])

    return exchange
