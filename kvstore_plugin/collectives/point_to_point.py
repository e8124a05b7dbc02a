"""send and recv between the two ranks of a process set, with gradients.

A send and its recv are together one broadcast between the two ranks of the set. So names, turns, refusals and errors
work as in any other operation. In the backward pass the receiver sends the gradient back to the sender.
"""

from __future__ import annotations

from typing import Any, Sequence

from ..compat import arrays
from ..compat.argument_errors import ArgumentValueError
from ..compat.mxnet import NDArray, mx
from ..coordination import operation
from ..world.process_set import ProcessSet, check, global_process_set
from . import backward
from .reduce import push_broadcast


def send(
    tensor: NDArray,
    dest: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Send an array to the other rank of a process set of two, which calls `recv`. Returns at once.

    Parameters
    ----------
    tensor : NDArray
        Of any dtype, with at least one element. The call does not change the array, and the caller may change or delete
        it at once.
    dest : int
        The global rank that receives.
    name : str, optional
        The send is matched with the recv of the same name. Calls with the same name, or without a name, are matched in
        the order of the calls. Sends in opposite directions are matched separately.
    priority : int, optional
        Operations with a higher priority run first; the same on both ranks.
    process_set : ProcessSet, optional
        A set of two ranks. In a larger job, add a set for each pair of ranks: ``mykv.add_process_set([0, 1])``.

    Returns
    -------
    NDArray
        A zero of shape (1,). Reading it waits for the send and raises the error of a failed send. Inside
        autograd.record(), call backward on it to receive the gradient of `tensor` from the other rank.

    Raises
    ------
    TypeError, ValueError
        `tensor` is not a dense array or empty, the process set does not have two ranks, or `dest` is not the other
        rank.
    RuntimeError
        kvstore_plugin is not initialized.
    MXNetError
        Raised when the result is read (with NaiveEngine, by this call): send and recv differ in shape, in dtype, or in
        whether they are inside autograd.record(); or the other rank has failed, or has not called recv before the time
        limit.

    Examples
    --------
    >>> rows = mx.np.ones((4, 2))
    >>> if mykv.rank() == 0:
    ...     sent = mykv.send(rows, dest=1, name="rows")
    ... else:
    ...     rows = mykv.recv(rows, source=0, name="rows")
    """
    with _turn(process_set, dest, name, sends=True) as turn:
        _check(tensor, "send")
        me, priority = turn.core.rank(), operation.checked_priority(priority)
        output = arrays.empty(tensor.shape, tensor)  # carries the error of a failed send
        is_recorded = backward.is_recorded([tensor])
        push_broadcast(turn, tensor, output, me, priority, _label(tensor, is_recorded))
        with arrays.not_recorded():
            token = mx.nd.zeros_like(arrays.elements(output, 0, 1).as_nd_ndarray().reshape((1,)))
        if isinstance(tensor, mx.np.ndarray):
            token = token.as_np_ndarray()
        if not is_recorded:
            return token

        def exchange(taken: operation.Turn, label: str, _: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
            push_broadcast(taken, targets[0], targets[0], 1 - me, priority, label)

        return backward.results(turn, [tensor], [token], exchange)[0]


def recv(
    like: NDArray,
    source: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Receive an array from the other rank of a process set of two, which calls `send`. Returns at once.

    Parameters
    ----------
    like : NDArray
        Has the shape, dtype and device of the received array; its values are not used.
    source : int
        The global rank that sends.
    name, priority, process_set
        As for `send`.

    Returns
    -------
    NDArray
        A new array. It may be used at once: the engine makes readers wait for its values. If both calls are inside
        autograd.record(), the backward pass sends the array's gradient back to the sender.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MXNetError
        As for `send`.

    Examples
    --------
    >>> if mykv.rank() == 0:
    ...     sent = mykv.send(mx.np.ones((4, 2)), dest=1)
    ... else:
    ...     rows = mykv.recv(mx.np.zeros((4, 2)), source=0)
    """
    with _turn(process_set, source, name, sends=False) as turn:
        _check(like, "recv")
        me, priority = turn.core.rank(), operation.checked_priority(priority)
        output = arrays.empty(like.shape, like)
        is_recorded = backward.is_recorded([like])
        push_broadcast(turn, output, output, 1 - me, priority, _label(like, is_recorded))
        if not is_recorded:
            return output

        def exchange(taken: operation.Turn, label: str, gradients: Sequence[NDArray], _: Sequence[NDArray]) -> None:
            result = arrays.empty(gradients[0].shape, gradients[0])  # not used: a broadcast writes every rank's result
            push_broadcast(taken, gradients[0], result, me, priority, label)

        # recv has no input array. The new array is not recorded, so `results` replaces it with an extra variable.
        return backward.results(turn, [arrays.empty(like.shape, like)], [output], exchange)[0]


def _turn(process_set: Any, other: Any, name: Any, sends: bool) -> operation.Turn:
    """The turn of a send or a recv. Both ranks use the same name for it."""
    check(process_set)
    call = "send" if sends else "recv"
    me = process_set.rank()
    if process_set.size() != 2:
        raise ArgumentValueError(
            f"{call} needs a process set of two ranks, but {process_set!r} has {process_set.size()}. Call "
            "add_process_set() with the two ranks, on all ranks, and pass the set."
        )
    if process_set._position_of(other) == me:
        raise ArgumentValueError(f"{call}: rank {other} is this rank. Give the other rank of {process_set!r}.")
    sender, receiver = (process_set.ranks[one] for one in ((me, 1 - me) if sends else (1 - me, me)))
    call = f"send from rank {sender} to rank {receiver}"
    turn = operation.named(process_set, call if name is None else f"{call}/{name}", call)
    turn.call = operation.described(call, name)
    return turn


def _check(tensor: Any, call: str) -> None:
    arrays.one(tensor, f"tensor of {call}")
    if not tensor.size:
        raise ArgumentValueError(f"The tensor of {call} has no elements.")


def _label(tensor: NDArray, is_recorded: bool) -> str:
    label = f"{arrays.dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
    return backward.labelled(label) if is_recorded else label
