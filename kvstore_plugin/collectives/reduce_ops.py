"""The operators of reductions: the user's arguments, and the core's parameters for them."""

from __future__ import annotations

import enum
import math
import numbers
from typing import Any, NamedTuple

import numpy as np

from ..compat import arrays
from ..compat.argument_errors import ArgumentTypeError, ArgumentValueError
from ..compat.mxnet import NDArray


class ReduceOp(enum.Enum):
    """The operator that combines the values of the ranks, element by element."""

    Average = "average"
    Sum = "sum"
    Min = "min"
    Max = "max"
    Product = "product"
    Adasum = "adasum"

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__


Average = ReduceOp.Average
"""The mean over the ranks.

Examples
--------
>>> mean = mykv.allreduce(mx.np.array([float(mykv.rank())]), op=mykv.Average)
>>> float(mean)
0.5
"""
Sum = ReduceOp.Sum
"""The sum; for bool, whether any rank has True.

Examples
--------
>>> total = mykv.allreduce(mx.np.array([len(images)], dtype="int64"), op=mykv.Sum)
>>> int(total)
64
"""
Min = ReduceOp.Min
"""The smallest; for bool, whether all ranks have True.

Examples
--------
>>> first = mykv.allreduce(mx.np.array([mykv.rank()], dtype="int64"), op=mykv.Min)
>>> int(first)
0
"""
Max = ReduceOp.Max
"""The largest; for bool, whether any rank has True.

Examples
--------
>>> last = mykv.allreduce(mx.np.array([mykv.rank()], dtype="int64"), op=mykv.Max)
>>> int(last)
1
"""
Product = ReduceOp.Product
"""The product; for bool, whether all ranks have True.

Examples
--------
>>> product = mykv.allreduce(mx.np.array([mykv.rank() + 1], dtype="int64"), op=mykv.Product)
>>> int(product)
2
"""
Adasum = ReduceOp.Adasum
"""Not supported, as in Horovod's binding of MXNet: every operation refuses it.

Examples
--------
>>> try:
...     loss = mykv.allreduce(loss_of(net(images), labels), op=mykv.Adasum)
... except ValueError as error:
...     print(error)
op=Adasum is not supported with MXNet: use op=Average.
"""


class Plan(NamedTuple):
    """The parameters of a reduction for the core."""

    op: str  # 'sum', 'min', 'max' or 'product'
    first: float  # factor of the inputs before the reduction
    scale: float  # factor of the result
    label: str  # must be equal on all ranks


def chosen(op: Any, average: Any) -> ReduceOp:
    """The operator that the arguments `op` and `average` select.

    Raises
    ------
    ValueError
        Both arguments are given, or `op` is `Adasum`.
    TypeError
        An argument has a wrong type.
    """
    if op is None and average is None:
        return Average
    if average is None:
        if not isinstance(op, ReduceOp):
            raise ArgumentTypeError(f"op must be one of Average, Sum, Min, Max and Product, not {op!r}.")
        if op is Adasum:
            raise ArgumentValueError("op=Adasum is not supported with MXNet: use op=Average.")
        return op
    if op is not None:
        raise ArgumentValueError(f"Only one of op and average may be given, but op is {op} and average is {average!r}.")
    if not isinstance(average, (bool, np.bool_, int)):
        raise ArgumentTypeError(f"average must be True or False, not {average!r}.")
    return Average if average else Sum


def plan(op: ReduceOp, tensors: Any, prescale_factor: Any, postscale_factor: Any, size: int) -> Plan:
    """The core's parameters for `op` with these arrays on `size` ranks.

    Raises
    ------
    TypeError, ValueError
        A factor is not a finite number, or the operator or a factor makes no sense for a dtype of the arrays.
    """
    before = _factor("prescale_factor", prescale_factor)
    after = _factor("postscale_factor", postscale_factor)
    kinds = {arrays.kind(tensor) for tensor in tensors}
    if "bool" in kinds and (op is Average or before != 1 or after != 1):
        raise ArgumentValueError(
            "Arrays of bool have no average and cannot be scaled: use op=Sum (any) or op=Min (all)."
        )
    label = str(op)
    if before != 1:
        label += f", prescale_factor {before:.17g}"
    if after != 1:
        label += f", postscale_factor {after:.17g}"
    scale = after
    if op in (Average, Sum) and "integer" not in kinds:
        # A single factor, of the sum, saves a pass over the inputs. Integers keep both factors: each scaling truncates.
        before, scale = 1.0, before * after
    if op is Average:
        scale /= size
        if "integer" in kinds and size & (size - 1):
            # 1/size may be rounded down: a mean just below a whole number would lose 1 in the truncation.
            scale = float(np.nextafter(scale, np.copysign(np.inf, scale)))
        return Plan("sum", before, scale, label)
    if op is Sum:
        return Plan("sum", before, scale, "" if label == str(Sum) else label)
    return Plan(op.value, before, scale, label)


def scaled(tensor: Any, factor: float) -> Any:
    """`tensor` times `factor`, in the tensor's dtype; integers are rounded toward zero. The tensor itself for 1."""
    if factor == 1:
        return tensor
    with arrays.not_recorded():
        if arrays.kind(tensor) != "integer":
            return tensor * factor
        return (tensor.astype("float64") * factor).astype(tensor.dtype)


def _factor(what: str, value: Any) -> float:
    if type(value) is float and math.isfinite(value):  # the check of an abstract class takes 2 us
        return value
    if isinstance(value, (np.ndarray, NDArray)) and value.size == 1:
        value = (value.asnumpy() if isinstance(value, NDArray) else value).item()
    if not isinstance(value, (numbers.Real, np.number)):
        raise ArgumentTypeError(f"{what} must be a number, not {value!r}.")
    if not math.isfinite(value):
        raise ArgumentValueError(f"{what} must be finite, not {value!r}.")
    return float(value)
