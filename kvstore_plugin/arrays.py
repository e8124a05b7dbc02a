"""What this package takes as arrays: dense ones in host memory, one or a list with one per device.

The common case, one dense array, must cost well under a microsecond: a Trainer comes by here for every parameter.
"""

from __future__ import annotations

from typing import Any, Sequence

from .mxnet_compat import HAS_GPUS, NDArray, SparseNDArray, mx

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
                f"The {what} must have one shape and dtype, but there are {shape} {_name(dtype)} and "
                f"{array.shape} {_name(array.dtype)}."
            )


def _name(dtype: Any) -> str:
    return getattr(dtype, "__name__", None) or ("bfloat16" if "bfloat16" in str(dtype) else str(dtype))


def handles(arrays: Sequence[NDArray]) -> list[int]:
    """Addresses of the arrays in MXNet's library, as the core takes them; the arrays must live until it was called."""
    return [array.handle.value for array in arrays]
