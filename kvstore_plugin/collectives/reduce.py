"""Asynchronous operations: MXNet's engine fills their results after all ranks have called the operation.

Operations are matched by name, so ranks may start them in any order. See coordination/operation.py for what happens
when the arguments of a rank are wrong.
"""

from __future__ import annotations

from typing import Any, Sequence

from ..compat import arrays, mxnet
from ..compat.argument_errors import ArgumentValueError
from ..compat.mxnet import NDArray
from ..coordination import operation
from ..coordination.operation import Turn
from ..world import process
from ..world.process_set import ProcessSet, global_process_set
from . import backward, reduce_ops
from .reduce_ops import Average, ReduceOp


def allreduce(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> NDArray:
    """Reduce an array over all ranks; by default, average it.

    Parameters
    ----------
    tensor : NDArray
        Any shape, the same on all ranks, and any dtype of the MXNet release; of mx.nd or mx.np, dense, on the CPU or a
        GPU. The call does not change the array, and the caller may change or delete it at once. In MXNet's engine other
        operations on the array wait for this operation. So all ranks must call several operations on one array in the
        same order.
    average : bool, optional
        An older form of `op`: True means ``op=Average``, False ``op=Sum``.
    name : str, optional
        The name by which ranks match the operation. Operations without a name are matched by their order in the process
        set, and operations of the same name by the order of their calls.
    priority : int, optional
        Operations with a higher priority run first.
    prescale_factor, postscale_factor : float, optional
        Factors of the inputs and of the result. For `Average` and `Sum` of floating-point numbers their product is
        applied to the result; integers are rounded toward zero on each rank before the sum, and after it.
    process_set : ProcessSet, optional
        The ranks that call this function.
    op : ReduceOp, optional
        `Average`, `Sum`, `Min`, `Max` or `Product`.

    Returns
    -------
    NDArray
        A new array with the type, shape and dtype of `tensor`; the same bits on all ranks. It may be used at once: the
        engine makes readers wait for its values. float16 and bfloat16 are reduced in float32. Integers wrap around.
        Averages and scaled integers are rounded toward zero, and are exact up to 2**51. For bool, `Sum` and `Max` are
        "or", `Product` and `Min` "and".

    Raises
    ------
    TypeError, ValueError
        Errors of this rank's arguments: both `op` and `average` are given, bool with `Average` or with a factor, sparse
        arrays, arrays on a GPU without a CUDA runtime that the core can use, ``op=Adasum``. On the other ranks, reading
        the result raises an MXNetError that names this rank. Or this rank is not in the process set.
    RuntimeError
        kvstore_plugin is not initialized.
    MXNetError
        Raised when the result is read (with NaiveEngine, by this call): ranks differ in shape, dtype, operator or
        factors; or a rank has rejected its arguments, has left the job, or has an array that carries an error.

    Notes
    -----
    If all ranks call it inside autograd.record(), a floating-point result is differentiable: the gradient of `Sum` and
    `Average` is the same reduction of all ranks' gradients. With `Min`, `Max` and `Product` backward raises an error.

    Examples
    --------
    >>> loss = loss_of(net(images), labels).mean()  # of this worker's batch
    >>> mean = mykv.allreduce(loss, name="loss")  # over the batches of all workers
    >>> if mykv.rank() == 0:
    ...     print(f"loss {float(mean):.3f}")
    >>> workers = mykv.allreduce(mx.np.ones(3), op=mykv.Sum)
    >>> workers.asnumpy().tolist()
    [2.0, 2.0, 2.0]
    """
    with operation.named(process_set, name, "allreduce") as turn:
        tensors = [arrays.one(tensor, "tensor of allreduce")]
        outputs = [arrays.empty(tensor.shape, tensor)]
        scaling = prescale_factor, postscale_factor
        return _recorded_reduce(turn, tensors, outputs, average, op, priority, scaling, grouped=False)[0]


def allreduce_(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> NDArray:
    """Reduce an array over all ranks in place; otherwise as `allreduce`.

    Returns
    -------
    NDArray
        `tensor`.

    Raises
    ------
    ValueError
        Inside autograd.record(), `tensor` has a gradient, or was computed from arrays with a gradient. Other errors are
        those of `allreduce`.

    Examples
    --------
    >>> seen = mx.np.array([mykv.rank() + 10], dtype="int64")  # samples that this worker has seen
    >>> seen = mykv.allreduce_(seen, op=mykv.Sum, name="samples seen")
    >>> int(seen)
    21
    """
    with operation.named(process_set, name, "allreduce_") as turn:
        tensors = [arrays.one(tensor, "tensor of allreduce_")]
        backward.check_in_place(turn.call, tensors)
        _reduce(turn, tensors, tensors, average, op, priority, prescale_factor, postscale_factor, grouped=False)
    return tensor


def grouped_allreduce(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> list[NDArray]:
    """Reduce several arrays over all ranks in one operation, with one transfer for each dtype.

    Parameters
    ----------
    tensors : sequence of NDArray
        Of any shapes and dtypes; the same number, shapes and dtypes in the same order on all ranks. An empty sequence
        is a no-op.
    average, name, priority, prescale_factor, postscale_factor, process_set, op
        As in `allreduce`.

    Returns
    -------
    list of NDArray
        The results, in the order of `tensors`.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MXNetError
        As in `allreduce`; also, ranks differ in the number of arrays.

    Examples
    --------
    >>> losses = [loss_of(net(images), labels).mean(), mx.np.array([float(mykv.rank())])]
    >>> means = mykv.grouped_allreduce(losses, name="losses")
    >>> float(means[1])
    0.5
    """
    with operation.named(process_set, name, "grouped_allreduce") as turn:
        inputs = arrays.as_group(tensors)
        if not inputs:
            return turn.leave_out("its group is empty", tensors)
        outputs = [arrays.empty(tensor.shape, tensor) for tensor in inputs]
        scaling = prescale_factor, postscale_factor
        return _recorded_reduce(turn, inputs, outputs, average, op, priority, scaling, grouped=True)


def grouped_allreduce_(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> Sequence[NDArray]:
    """Reduce several arrays over all ranks in place, in one operation; otherwise as `grouped_allreduce`.

    Returns
    -------
    sequence of NDArray
        `tensors`.

    Raises
    ------
    ValueError
        An array occurs twice; or, inside autograd.record(), an array has a gradient, or was computed from arrays with a
        gradient.

    Examples
    --------
    >>> with autograd.record():
    ...     loss = loss_of(net(images), labels)
    >>> loss.backward()
    >>> gradients = [one.grad() for one in net.collect_params().values() if one.grad_req != "null"]
    >>> gradients = mykv.grouped_allreduce_(gradients)  # what a trainer's step() does by itself
    """
    with operation.named(process_set, name, "grouped_allreduce_") as turn:
        inputs = arrays.as_group(tensors)
        if not inputs:
            return turn.leave_out("its group is empty", tensors)
        if len({id(tensor) for tensor in inputs}) < len(inputs):
            raise ArgumentValueError("The tensors of grouped_allreduce_ must not hold an array twice.")
        backward.check_in_place(turn.call, inputs)
        _reduce(turn, inputs, inputs, average, op, priority, prescale_factor, postscale_factor, grouped=True)
    return tensors


def broadcast(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Send the values of one rank, the root, to all ranks.

    Parameters
    ----------
    tensor : NDArray
        Of any shape and dtype, the same on all ranks. The call does not change the array, and uses only the root's
        values.
    root_rank : int
        The global rank of the root, which must be in the process set.
    name, priority, process_set
        As in `allreduce`.

    Returns
    -------
    NDArray
        A new array like `tensor`, with the bits of the root's values. It may be used at once: the engine makes readers
        wait for its values.

    Raises
    ------
    TypeError, ValueError
        As in `allreduce`; also, `root_rank` is not a rank or not in the process set.
    RuntimeError
        kvstore_plugin is not initialized.
    MXNetError
        As in `allreduce`; also, ranks differ in the root.

    Notes
    -----
    If all ranks call it inside autograd.record(), a floating-point result is differentiable: the root gets the sum of
    all ranks' gradients, and the other ranks get zeros.

    Examples
    --------
    >>> order = mx.np.array(np.random.permutation(len(dataset)))  # different on each worker
    >>> order = mykv.broadcast(order, root_rank=0)  # now all workers have the order of rank 0
    """
    with operation.named(process_set, name, "broadcast") as turn:
        arrays.one(tensor, "tensor of broadcast")
        output = arrays.empty(tensor.shape, tensor)
        if not backward.is_recorded([tensor]):
            _broadcast(turn, tensor, output, root_rank, priority, process_set)
            return output
        _broadcast(turn, tensor, output, root_rank, priority, process_set, backward.labelled("broadcast"))
        exchange = backward.sum_at_root(process_set._position_of(root_rank), priority)
        return backward.results(turn, [tensor], [output], exchange)[0]


def broadcast_(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Send the values of one rank to all ranks in place; otherwise as `broadcast`.

    Returns
    -------
    NDArray
        `tensor`.

    Raises
    ------
    ValueError
        Inside autograd.record(), `tensor` has a gradient, or was computed from arrays with a gradient. Other errors are
        those of `broadcast`.

    Examples
    --------
    >>> weight = net[0].weight.data()
    >>> weight = mykv.broadcast_(weight, root_rank=0)  # in place: all workers have the weight of rank 0
    """
    with operation.named(process_set, name, "broadcast_") as turn:
        backward.check_in_place(turn.call, [arrays.one(tensor, "tensor of broadcast_")])
        _broadcast(turn, tensor, tensor, root_rank, priority, process_set)
    return tensor


def reducescatter(
    tensor: NDArray,
    op: ReduceOp = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NDArray:
    """Reduce an array over all ranks and give each rank some rows of the result.

    Parameters
    ----------
    tensor : NDArray
        Of shape (n, ...) and any dtype, the same on all ranks.
    op : ReduceOp, optional
        `Average`, `Sum`, `Min`, `Max` or `Product`.
    name, priority, process_set, prescale_factor, postscale_factor
        As in `allreduce`.

    Returns
    -------
    NDArray
        A new array of shape (n // size, ...), with one more row on the lowest n % size ranks. The results of all ranks,
        concatenated in the order of ranks, are the result of `allreduce`. It may be used at once: the engine makes
        readers wait for its values.

    Raises
    ------
    TypeError, ValueError
        As in `allreduce`; also, `tensor` is a scalar.
    RuntimeError, MXNetError
        As in `allreduce`.

    Notes
    -----
    If all ranks call it inside autograd.record(), a floating-point result of `Sum` and `Average` is differentiable: the
    gradient is the concatenation of all ranks' gradients.

    Examples
    --------
    >>> scores = mx.np.array([[1.0, 2.0], [3.0, 4.0]])  # one row for each worker
    >>> mine = mykv.reducescatter(scores, op=mykv.Sum)
    >>> mine.shape
    (1, 2)
    >>> bool((mine == 2 * scores[mykv.rank() : mykv.rank() + 1]).all())
    True
    """
    with operation.named(process_set, name, "reducescatter") as turn:
        arrays.one(tensor, "tensor of reducescatter")
        first, last = _own_rows(turn, tensor)
        output = arrays.empty((last - first, *tensor.shape[1:]), tensor)
        plan = _plan(turn, [tensor], None, op, prescale_factor, postscale_factor)
        is_recorded = backward.is_recorded([tensor])
        label = plan.label and f"reducescatter {plan.label}"
        source = reduce_ops.scaled(tensor, plan.first)
        turn.push(
            turn.core.push_reducescatter,
            source.handle.value,
            output.handle.value,
            plan.op,
            plan.scale,
            operation.checked_priority(priority),
            label=backward.labelled(label) if is_recorded else label,
        )
        if not is_recorded:
            return output
        return _recorded_rows(turn, [tensor], [output], plan, op, priority)[0]


def grouped_reducescatter(
    tensors: Sequence[NDArray],
    op: ReduceOp = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[NDArray]:
    """Reduce several arrays over all ranks in one operation and give each rank some rows of each result.

    Parameters
    ----------
    tensors : sequence of NDArray
        As for `grouped_allreduce`, each as for `reducescatter`.
    op, name, priority, process_set, prescale_factor, postscale_factor
        As for `reducescatter`.

    Returns
    -------
    list of NDArray
        The rows of this rank, in the order of `tensors`.

    Raises
    ------
    TypeError, ValueError, RuntimeError, MXNetError
        As for `reducescatter`; also, ranks differ in the number of arrays.

    Examples
    --------
    >>> weight, bias = mx.np.ones((10, 64)), mx.np.ones(10)
    >>> parts = mykv.grouped_reducescatter([weight, bias], op=mykv.Sum)
    >>> [part.shape for part in parts]
    [(5, 64), (5,)]
    """
    with operation.named(process_set, name, "grouped_reducescatter") as turn:
        inputs = arrays.as_group(tensors)
        if not inputs:
            return turn.leave_out("its group is empty", tensors)
        rows = [_own_rows(turn, tensor) for tensor in inputs]
        # One operation with all rows: several operations under one name could not detect different numbers of arrays.
        reduced = [arrays.empty(tensor.shape, tensor) for tensor in inputs]
        plan = _plan(turn, inputs, None, op, prescale_factor, postscale_factor)
        is_recorded = backward.is_recorded(inputs)
        label = f"grouped_reducescatter {plan.label}"
        label = backward.labelled(label) if is_recorded else label
        _push(turn, inputs, reduced, plan, label, priority, grouped=True)
        outputs = [_share(whole, first, last) for whole, (first, last) in zip(reduced, rows)]
        return _recorded_rows(turn, inputs, outputs, plan, op, priority) if is_recorded else outputs


def _reduce(
    turn: Turn,
    inputs: Sequence[NDArray],
    outputs: Sequence[NDArray],
    average: Any,
    op: Any,
    priority: Any,
    prescale_factor: Any,
    postscale_factor: Any,
    grouped: bool,
) -> None:
    plan = _plan(turn, inputs, average, op, prescale_factor, postscale_factor)
    _push(turn, inputs, outputs, plan, plan.label, priority, grouped)


def _recorded_reduce(
    turn: Turn,
    inputs: Sequence[NDArray],
    outputs: list[NDArray],
    average: Any,
    op: Any,
    priority: Any,
    scaling: tuple,
    grouped: bool,
) -> list[NDArray]:
    """Reduce, and return the results; differentiable inside autograd.record()."""
    plan = _plan(turn, inputs, average, op, *scaling)
    if not backward.is_recorded(inputs):
        _push(turn, inputs, outputs, plan, plan.label, priority, grouped)
        return outputs
    _push(turn, inputs, outputs, plan, backward.labelled(plan.label), priority, grouped)
    places = [place for place, tensor in enumerate(inputs) if arrays.kind(tensor) == "float"]
    given, made = [inputs[place] for place in places], [outputs[place] for place in places]
    if plan.op != "sum":
        made = backward.refused(given, made, _without_gradient(turn, plan.op))
    else:
        of_floats = _plan(turn, given, average, op, *scaling)

        def exchange(taken: Turn, label: str, gradients: Sequence[NDArray], targets: Sequence[NDArray]) -> None:
            _push(taken, gradients, targets, of_floats, label, priority, grouped)

        made = backward.results(turn, given, made, exchange)
    for place, output in zip(places, made):
        outputs[place] = output
    return outputs


def _recorded_rows(
    turn: Turn, inputs: Sequence[NDArray], outputs: list[NDArray], plan: reduce_ops.Plan, op: ReduceOp, priority: Any
) -> list[NDArray]:
    """Record a reducescatter, and return its results. An array's gradient is gathered from all ranks."""
    for place, (tensor, output) in enumerate(zip(inputs, outputs)):
        if arrays.kind(tensor) != "float":
            continue
        if plan.op != "sum":
            made = backward.refused([tensor], [output], _without_gradient(turn, plan.op))
        else:
            rows = rows_of_ranks(tensor.shape[0], turn.core.size())
            exchange = backward.gather_of_rows(rows, plan.first * plan.scale, priority)
            made = backward.results(turn, [tensor], [output], exchange, f", array {place}" if len(inputs) > 1 else "")
        outputs[place] = made[0]
    return outputs


def _without_gradient(turn: Turn, op: str) -> str:
    return (
        f"{turn.call} with op={op.capitalize()} has no gradient: only Sum and Average have. Call it inside "
        "autograd.pause(), or on an array without a gradient, such as x.detach()."
    )


def _push(
    turn: Turn,
    inputs: Sequence[NDArray],
    outputs: Sequence[NDArray],
    plan: reduce_ops.Plan,
    label: str,
    priority: Any,
    grouped: bool,
) -> None:
    sources = inputs if plan.first == 1 else [reduce_ops.scaled(tensor, plan.first) for tensor in inputs]
    turn.push(
        turn.core.push_group if grouped else turn.core.push_allreduce,
        arrays.handles(sources),
        arrays.handles(outputs),
        plan.op,
        plan.scale,
        operation.checked_priority(priority),
        label=label,
    )


def _broadcast(
    turn: Turn, tensor: Any, output: Any, root_rank: Any, priority: Any, process_set: ProcessSet, label: str = ""
) -> None:
    root = process_set._position_of(root_rank)
    push_broadcast(turn, tensor, output, root, operation.checked_priority(priority), label)


def push_broadcast(turn: Turn, source: NDArray, target: NDArray, root: int, priority: int, label: str) -> None:
    """Start a broadcast as the turn's operation; `root` is a rank within the process set."""
    turn.push(turn.core.push_broadcast, source.handle.value, [target.handle.value], root, priority, label=label)


def _own_rows(turn: Turn, tensor: NDArray) -> tuple[int, int]:
    """First row of this rank, and the row after its last row."""
    arrays.check_rows(tensor, turn.call)
    rows, rank = rows_of_ranks(tensor.shape[0], turn.core.size()), turn.core.rank()
    first = sum(rows[:rank])
    return first, first + rows[rank]


def rows_of_ranks(rows: int, size: int) -> list[int]:
    """The number of rows that each rank gets in a reducescatter of `rows` rows."""
    each, more = divmod(rows, size)
    return [each + (rank < more) for rank in range(size)]


def _share(whole: NDArray, first: int, last: int) -> NDArray:
    """A copy of some rows of a result."""
    share = arrays.rows(whole, first, last)
    if first == last and not mxnet.engine_blocks():
        # For zero rows MXNet runs no operation, so the error of the result would not reach this array.
        process.core.Fence(arrays.handles([whole, share]), [], 0).push()
    return share


def _plan(
    turn: Turn, tensors: Sequence[NDArray], average: Any, op: Any, prescale: Any, postscale: Any
) -> reduce_ops.Plan:
    return reduce_ops.plan(reduce_ops.chosen(op, average), tensors, prescale, postscale, turn.core.size())
