"""What this package takes as arrays: dense ones in host memory, one or a list with one per device.

The common case, one dense array, must cost well under a microsecond: a Trainer comes by here for every parameter.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from .mxnet_compat import HAS_GPUS, NDArray, SparseNDArray, autograd, mx

# Exact types that need no second look; subclasses of a user take the longer way.
_DENSE = {NDArray, mx.np.ndarray}


def as_list(value: Any, what: str) -> Sequence[NDArray]:
    """The arrays in `value`, an NDArray or a list or tuple of them.

    Parameters
    ----------
    value : NDArray or sequence of NDArray
        What the user passed.
    what : str
        What to call it in an error, for example ``'value of key 3'``.

    Raises
    ------
    TypeError
        Something in it is no NDArray.
    ValueError
        The list is empty, or an array is sparse or lies on a GPU.
    """
    if type(value) in _DENSE:
        value = (value,)
    elif isinstance(value, (list, tuple)):
        if not value:
            raise ValueError(f"The {what} is an empty list: it must hold at least one NDArray.")
    elif isinstance(value, NDArray):
        value = (value,)
    else:
        raise TypeError(f"The {what} must be an NDArray or a list of NDArrays, not {type(value).__name__}.")
    for array in value:
        if type(array) not in _DENSE or HAS_GPUS:
            _check(array, what)
    return value


def _check(array: Any, what: str) -> None:
    if not isinstance(array, NDArray):
        raise TypeError(f"The {what} must hold NDArrays, not {type(array).__name__}.")
    if isinstance(array, SparseNDArray):
        raise ValueError(
            f"The {what} is a sparse array ({array.stype}), and only dense ones can be reduced: use tostype('default')."
        )
    if HAS_GPUS and not array.context.device_type.startswith("cpu"):
        raise ValueError(
            f"The {what} lies on {array.context}, and arrays on GPUs are not supported yet: use as_in_context(cpu())."
        )


def one(value: Any, what: str) -> NDArray:
    """`value`, if it is one dense array in host memory.

    Raises
    ------
    TypeError, ValueError
        As for `as_list`, and where it is a list.
    """
    if isinstance(value, (list, tuple)):
        raise TypeError(f"The {what} must be an NDArray, not a {type(value).__name__}.")
    return as_list(value, what)[0]


def kind(array: NDArray) -> str:
    """What the elements of an array are: ``'float'``, ``'integer'`` or ``'bool'``."""
    name = np.dtype(array.dtype).kind
    return "bool" if name == "b" else "integer" if name in "iu" else "float"  # bfloat16 is 'V'


def empty(shape: Sequence[int], like: NDArray) -> NDArray:
    """A new array without values, with the type, dtype and device of another; any number of dimensions and elements."""
    dtype = like.as_nd_ndarray().dtype  # mx.np has no name for bfloat16
    with mx.util.np_shape(True):  # where 0 is a length and () a shape
        made = mx.nd.empty(tuple(shape), ctx=like.context, dtype=dtype)
    return made.as_np_ndarray() if isinstance(like, mx.np.ndarray) else made


def from_numpy(values: np.ndarray, like: NDArray) -> NDArray:
    """A new array with these values and their dtype, with the type and device of another."""
    made = mx.nd.array(values, ctx=like.context, dtype=values.dtype)
    return made.as_np_ndarray() if isinstance(like, mx.np.ndarray) else made


def rows(array: NDArray, first: int, last: int) -> NDArray:
    """A copy of some rows of an array."""
    with not_recorded(), mx.util.np_shape(True):
        return array[first:last].copy()


def check_rows(array: NDArray, call: str) -> None:
    """Refuse a scalar.

    Raises
    ------
    ValueError
        The array has no dimensions.
    """
    if not array.shape:
        raise ValueError(f"The tensor of {call} is a scalar, which has no rows: use reshape(1).")


def not_recorded() -> Any:
    """A context in which what is computed is not recorded for a backward pass."""
    return autograd.pause(train_mode=autograd.is_training())


def check_alike(arrays: Sequence[NDArray], what: str) -> None:
    """Refuse arrays that differ in shape or dtype from the first.

    Raises
    ------
    ValueError
        Names both sides.
    """
    first = arrays[0]
    shape, dtype = first.shape, first.dtype
    for array in arrays:
        if array is not first and (array.shape != shape or array.dtype != dtype):
            raise ValueError(
                f"The {what} must have one shape and dtype, but there are {shape} {dtype_name(dtype)} and "
                f"{array.shape} {dtype_name(array.dtype)}."
            )


def dtype_name(dtype: Any) -> str:
    """Name of an array's dtype as the core has it, for example ``'float32'``."""
    return getattr(dtype, "__name__", None) or ("bfloat16" if "bfloat16" in str(dtype) else str(dtype))


def handles(arrays: Sequence[NDArray]) -> list[int]:
    """Addresses of the arrays in MXNet's library, as the core takes them; the arrays must live until it was called."""
    return [array.handle.value for array in arrays]
