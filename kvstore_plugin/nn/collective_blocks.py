"""Collective operations as blocks, which can be hybridized.

Each block is a custom operator of MXNet between two copies, like SyncBatchNorm (sync_batch_norm.py explains the
copies). MXNet runs the operator's code in special threads, and needs the shapes earlier. So ranks cannot exchange
shapes, and all ranks must have the same shapes.

Calls are matched by the number of the block and the number of the call, forward and backward. In each call MXNet
creates an operator, in the order of the calls. With static_shape MXNet creates one operator for many calls. These calls
run one after another, and the operator counts them.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Sequence

from ..collectives import backward, reduce, reduce_ops
from ..collectives.reduce_ops import Average, ReduceOp
from ..compat import arrays, forks, recorded
from ..compat.mxnet import BlockOfOneInput, NDArray, mx
from ..coordination import operation, operation_names
from ..world import process
from ..world import process_set as process_sets
from ..world.process_set import ProcessSet, global_process_set
from .plain_copies import plain

_OPERATOR = "mykv_collective"

_blocks: weakref.WeakValueDictionary[str, _Collective] = weakref.WeakValueDictionary()  # by key
_made = itertools.count()


class _Collective(BlockOfOneInput):
    """Base class of the blocks."""

    def __init__(self, *, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        process.require()
        first_use = self._first_use(process_set)
        process_sets.check(process_set)
        super().__init__(**kwargs)
        self._process_set = process_set
        self._begin(first_use)

    def exchanged(self, F: Any, x: Any) -> Any:
        """The operator of the block, on arrays or symbols."""
        process_sets.check(self._process_set)
        return plain(F, F.Custom(plain(F, x), op_type=_OPERATOR, block=self._key))

    def _first_use(self, process_set: Any, is_copy: bool = False) -> operation_names.FirstUse:
        kind = type(self).__name__
        call = f"the first forward pass of a block {kind}"
        return operation_names.FirstUse(process_set, kind.lower(), call, is_copy)

    def _begin(self, first_use: operation_names.FirstUse) -> None:
        self._use = first_use
        self._numbers = itertools.count()  # the numbers of calls
        self._key = f"collective_{next(_made)}"
        _blocks[self._key] = self

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name not in ("_use", "_key", "_numbers")}

    def __setstate__(self, state: dict) -> None:
        # A copy is a separate block: its calls must not match calls of the original.
        vars(self).update(state)
        self._begin(self._first_use(self._process_set, is_copy=True))

    def _named(self) -> str:
        """The prefix of the operations' names, the same on all ranks. Waits for all ranks once after each init()."""
        if self._use.is_due():
            self._use.name()
            self._numbers = itertools.count()
            forks.wait_before_forks()
        return self._use.shown

    def _output_shape(self, shape: Sequence[int]) -> Sequence[int]:
        """The shape of the result."""
        return shape

    def _push_forward(self, turn: operation.Turn, label: str, x: NDArray, y: NDArray) -> None:
        raise NotImplementedError

    def _push_backward(self, turn: operation.Turn, label: str, gradient: NDArray, target: NDArray) -> None:
        raise NotImplementedError


class _Reducing(_Collective):
    """Base class of the blocks that reduce, by `Average` or `Sum`."""

    def __init__(
        self,
        op: ReduceOp = Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        if reduce_ops.chosen(op, None) not in (reduce_ops.Average, reduce_ops.Sum):
            raise ValueError(f"op must be Average or Sum in a block, not {op}, which has no gradient.")
        super().__init__(process_set=process_set, **kwargs)
        self._op, self._scaling = op, (prescale_factor, postscale_factor)

    def _plan(self, x: NDArray) -> reduce_ops.Plan:
        return reduce_ops.plan(self._op, [x], *self._scaling, self._process_set.size())


class AllReduce(_Reducing):
    """Reduce the input over all ranks, as `mykv.allreduce`; can be hybridized.

    All ranks must create their blocks in the same order, and call each block equally often. Inputs must have the same
    shape, with at least one dimension, and the same floating-point dtype on all ranks. The backward pass needs all
    ranks too, so the input must need a gradient on all ranks or on no rank. The first call waits for the other ranks.
    All ranks must hybridize the block in the same way.

    Parameters
    ----------
    op : ReduceOp, optional
        `Average` or `Sum`.
    prescale_factor, postscale_factor : float, optional
        As for `mykv.allreduce`.
    process_set : ProcessSet, optional
        The ranks that call the block.
    **kwargs
        As for gluon.HybridBlock.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong, or the operator has no gradient; the process set was not added, or this rank is not in it.

    Examples
    --------
    >>> net = gluon.nn.HybridSequential()
    >>> net.add(gluon.nn.Dense(8), mykv.nn.AllReduce(op=mykv.Sum), gluon.nn.Dense(2))
    >>> net.initialize()
    >>> net.hybridize()
    >>> net(images).shape
    (32, 2)
    """

    def _push_forward(self, turn: operation.Turn, label: str, x: NDArray, y: NDArray) -> None:
        self._reduce(turn, f"{label}, {self._plan(x).label}", x, y)

    def _push_backward(self, turn: operation.Turn, label: str, gradient: NDArray, target: NDArray) -> None:
        self._reduce(turn, label, gradient, target)

    def _reduce(self, turn: operation.Turn, label: str, x: NDArray, y: NDArray) -> None:
        one, other = arrays.handles([x]), arrays.handles([y])
        turn.push(turn.core.push_allreduce, one, other, "sum", self._plan(x).scale, 0, label=label)


class ReduceScatter(_Reducing):
    """Reduce the input over all ranks, and give each rank some rows, as `mykv.reducescatter`; can be hybridized.

    Parameters
    ----------
    op, prescale_factor, postscale_factor, process_set, **kwargs
        As in `AllReduce`. The other rules of `AllReduce` apply too.

    Raises
    ------
    TypeError, ValueError
        As in `AllReduce`.
    """

    def _rows(self, rows: int) -> list[int]:
        return reduce.rows_of_ranks(rows, self._process_set.size())

    def _output_shape(self, shape: Sequence[int]) -> Sequence[int]:
        return [self._rows(shape[0])[self._process_set.rank()], *shape[1:]]

    def _push_forward(self, turn: operation.Turn, label: str, x: NDArray, y: NDArray) -> None:
        plan = self._plan(x)
        handles = x.handle.value, y.handle.value
        turn.push(turn.core.push_reducescatter, *handles, "sum", plan.scale, 0, label=f"{label}, {plan.label}")

    def _push_backward(self, turn: operation.Turn, label: str, gradient: NDArray, target: NDArray) -> None:
        exchange = backward.gather_of_rows(self._rows(target.shape[0]), self._plan(gradient).scale, 0)
        exchange(turn, label, [gradient], [target])


class AllGather(_Collective):
    """Concatenate the inputs of all ranks along the first dimension, as `mykv.allgather`; can be hybridized.

    Unlike with `mykv.allgather`, all ranks must have the same number of rows.

    Parameters
    ----------
    process_set, **kwargs
        As in `AllReduce`. The other rules of `AllReduce` apply too.

    Raises
    ------
    TypeError, ValueError
        As in `AllReduce`.
    """

    def _output_shape(self, shape: Sequence[int]) -> Sequence[int]:
        return [shape[0] * self._process_set.size(), *shape[1:]]

    def _push_forward(self, turn: operation.Turn, label: str, x: NDArray, y: NDArray) -> None:
        rows = [x.shape[0]] * turn.core.size()
        turn.push(turn.core.push_allgather, x.handle.value, y.handle.value, rows, 0, label=label)

    def _push_backward(self, turn: operation.Turn, label: str, gradient: NDArray, target: NDArray) -> None:
        backward.reduce_to_owners(turn, label, gradient, target, [target.size] * turn.core.size(), 0)


class Broadcast(_Collective):
    """Send the input of one rank to all ranks, as `mykv.broadcast`; can be hybridized.

    Parameters
    ----------
    root_rank : int
        The global rank of the root, which must be in the process set.
    process_set, **kwargs
        As in `AllReduce`. The other rules of `AllReduce` apply too.

    Raises
    ------
    TypeError, ValueError
        As in `AllReduce`; `root_rank` is not a rank of the process set.
    """

    def __init__(self, root_rank: int, *, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        super().__init__(process_set=process_set, **kwargs)
        self._root = process_set._position_of(root_rank)

    def _push_forward(self, turn: operation.Turn, label: str, x: NDArray, y: NDArray) -> None:
        turn.push(turn.core.push_broadcast, x.handle.value, arrays.handles([y]), self._root, 0, label=label)

    def _push_backward(self, turn: operation.Turn, label: str, gradient: NDArray, target: NDArray) -> None:
        backward.sum_at_root(self._root, 0)(turn, label, [gradient], [target])


class AllToAll(_Collective):
    """Send the same number of rows to each rank, as `mykv.alltoall` without splits; can be hybridized.

    Parameters
    ----------
    process_set, **kwargs
        As in `AllReduce`. The other rules of `AllReduce` apply too.

    Raises
    ------
    TypeError, ValueError
        As in `AllReduce`. The forward pass raises an MXNetError if the rows cannot be divided equally.
    """

    def _output_shape(self, shape: Sequence[int]) -> Sequence[int]:
        if shape[0] % self._process_set.size():
            raise ValueError(f"AllToAll cannot divide {shape[0]} rows equally among {self._process_set.size()} ranks.")
        return shape

    def _push_forward(self, turn: operation.Turn, label: str, x: NDArray, y: NDArray) -> None:
        self._send(turn, label, x, y)

    def _push_backward(self, turn: operation.Turn, label: str, gradient: NDArray, target: NDArray) -> None:
        self._send(turn, label, gradient, target)

    def _send(self, turn: operation.Turn, label: str, x: NDArray, y: NDArray) -> None:
        size = turn.core.size()
        rows = [[x.shape[0] // size] * size] * size
        turn.push(turn.core.push_alltoall, x.handle.value, y.handle.value, rows, 0, label=label)


@mx.operator.register(_OPERATOR)
class _Prop(mx.operator.CustomOpProp):
    def __init__(self, block: str) -> None:
        super().__init__(need_top_grad=True)
        self._block = _blocks.get(block)
        if self._block is None:
            raise ValueError("A block that exchanges with other workers cannot be used from an exported file.")

    def list_arguments(self) -> list[str]:
        return ["data"]

    def list_outputs(self) -> list[str]:
        return ["output"]

    def infer_shape(self, in_shape: list) -> tuple:
        return in_shape, [list(self._block._output_shape(in_shape[0]))], []

    def infer_type(self, in_type: list) -> tuple:
        return in_type, [in_type[0]], []

    def create_operator(self, ctx: Any, in_shapes: Any, in_dtypes: Any) -> _Operator:
        return _Operator(self._block, self._block._named())


class _Operator(mx.operator.CustomOp):
    """One call of a block, forward and backward; with static_shape several consecutive calls."""

    def __init__(self, block: _Collective, scope: str) -> None:
        super().__init__()
        self._block = block
        self._scope = scope
        self._number = next(block._numbers)
        self._uses = 0

    def forward(self, is_train: bool, req: list, in_data: list, out_data: list, aux: list) -> None:
        self._uses += 1
        with recorded.written(out_data, req) as outputs, self._turn("forward") as turn:
            self._block._push_forward(turn, self._label(), in_data[0].as_nd_ndarray(), outputs[0])

    def backward(self, req: list, out_grad: list, in_data: list, out_data: list, in_grad: list, aux: list) -> None:
        with recorded.written(in_grad, req) as targets, self._turn("backward") as turn:
            self._block._push_backward(turn, self._label(), out_grad[0].as_nd_ndarray(), targets[0])

    def _turn(self, which: str) -> operation.Turn:
        name = f"{self._scope}/{which}/{self._number % operation_names.BACKWARD_NAMES}"
        return operation.Turn(self._block._process_set, name, f"{which} of {self._scope}")

    def _label(self) -> str:
        return f"call {self._number}.{self._uses}"
