"""Checks and helpers for array arguments: a dense array, or a list with an array per device.

The check of the common case, one dense array, must cost well under a microsecond: a Trainer runs it for every
parameter.
"""

from __future__ import annotations

import ctypes
from numbers import Number
from typing import Any, Sequence

import numpy as np

from ..world import gpu_libraries
from .argument_errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError
from .mxnet import HAS_GPUS, NDArray, SparseNDArray, autograd, mx

# Element types of both numpy and the core.
DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64")

# Exact types that need no further check; a user's subclasses take the slower path.
_DENSE = {NDArray, mx.np.ndarray}


def as_group(tensors: Any) -> list[NDArray]:
    """The arrays in the argument of a grouped operation, possibly none.

    Raises
    ------
    TypeError, ValueError
        `tensors` is not a list, or an item is not dense, or is on a GPU without a CUDA runtime that the core can use.
    """
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentTypeError(f"The tensors of a group must be a list of NDArrays, not {type(tensors).__name__}.")
    return list(as_list(tensors, "group of tensors")) if tensors else []


def as_list(value: Any, what: str, dense: bool = True) -> Sequence[NDArray]:
    """The arrays in `value`, an NDArray or a list or tuple of them.

    Parameters
    ----------
    value : NDArray or sequence of NDArray
        The user's argument.
    what : str
        Name of `value` in errors, for example ``'value of key 3'``.
    dense : bool, optional
        Whether sparse arrays are rejected.

    Raises
    ------
    TypeError
        An item of `value` is not an NDArray.
    ValueError
        The list is empty, or an array is sparse, or is on a GPU and there is no CUDA runtime that the core can use.
    """
    if type(value) in _DENSE:
        value = (value,)
    elif isinstance(value, (list, tuple)):
        if not value:
            raise ArgumentValueError(f"The {what} is an empty list: it must hold at least one NDArray.")
    elif isinstance(value, NDArray):
        value = (value,)
    else:
        raise ArgumentTypeError(f"The {what} must be an NDArray or a list of NDArrays, not {_called(value)}.")
    for array in value:
        if type(array) not in _DENSE or HAS_GPUS:
            _check(array, what, dense)
    return value


def is_dense_array(value: Any) -> bool:
    """Fast path of `as_list`: whether `value` is one dense array, in a build of MXNet without GPUs."""
    return not HAS_GPUS and type(value) in _DENSE


def _check(array: Any, what: str, dense: bool = True) -> None:
    if not isinstance(array, NDArray):
        raise ArgumentTypeError(f"The {what} must hold NDArrays, not {_called(array)}.")
    if dense and isinstance(array, SparseNDArray):
        raise ArgumentValueError(
            f"The {what} is a sparse array ({array.stype}), but only dense arrays can be reduced. Use "
            "tostype('default')."
        )
    if on_gpu(array) and gpu_libraries.find()["cuda"]["problem"]:
        raise ArgumentValueError(
            f"The {what} is on {array.context}, but {gpu_libraries.find()['cuda']['problem']}. Set MYKV_CUDA_LIBRARY "
            "to the library that MXNet uses, or use as_in_context(cpu())."
        )


def _called(value: Any) -> str:
    """Description of a value that is not an NDArray, for errors."""
    if isinstance(value, np.ndarray):
        return "numpy.ndarray: use mx.nd.array(x)"
    if isinstance(value, Number):
        return f"{type(value).__name__}: use mx.nd.array([x])"
    return type(value).__name__


def on_gpu(array: NDArray) -> bool:
    """Whether an array is in the memory of a GPU."""
    return HAS_GPUS and not array.context.device_type.startswith("cpu")


def one(value: Any, what: str) -> NDArray:
    """`value`, if it is a single dense array.

    Raises
    ------
    TypeError, ValueError
        As for `as_list`; also, `value` is a list.
    """
    if isinstance(value, (list, tuple)):
        raise ArgumentTypeError(f"The {what} must be an NDArray, not a {type(value).__name__}.")
    return as_list(value, what)[0]


def kind(array: NDArray) -> str:
    """The kind of an array's elements: ``'float'``, ``'integer'`` or ``'bool'``."""
    name = np.dtype(array.dtype).kind
    return "bool" if name == "b" else "integer" if name in "iu" else "float"  # numpy's kind of bfloat16 is 'V'


def empty(shape: Sequence[int], like: NDArray) -> NDArray:
    """An uninitialized array, with the type, dtype and device of `like`; any number of dimensions and elements."""
    dtype = like.as_nd_ndarray().dtype  # mx.np has no name for bfloat16
    with mx.util.np_shape(True):  # allows the length 0 and the shape ()
        made = mx.nd.empty(tuple(shape), ctx=like.context, dtype=dtype)
    return made.as_np_ndarray() if isinstance(like, mx.np.ndarray) else made


def from_numpy(values: np.ndarray, like: NDArray) -> NDArray:
    """A new array with these values and their dtype, with the type and device of `like`."""
    made = mx.nd.array(values, ctx=like.context, dtype=values.dtype)
    return made.as_np_ndarray() if isinstance(like, mx.np.ndarray) else made


def with_dtype_of(like: NDArray, array: NDArray) -> NDArray:
    """`array`, or a copy of it in the dtype of `like`; not recorded by autograd."""
    if array.dtype == like.dtype:
        return array
    with not_recorded():
        return array.astype(like.as_nd_ndarray().dtype)


def copy(source: NDArray, target: NDArray) -> None:
    """Copy an array of any kind into an array of the same shape, dense or sparse; not recorded by autograd."""
    if target is source:
        return
    with not_recorded(), mx.util.np_shape(True):
        source = with_dtype_of(target, source)
        if isinstance(target, SparseNDArray):
            source = source.as_nd_ndarray().tostype(target.stype)
        else:
            source, target = source.as_nd_ndarray(), target.as_nd_ndarray()
        source.copyto(target)


def copy_rows(source: NDArray, numbers: NDArray, target: NDArray, what: str) -> None:
    """Set a row_sparse array to some rows of an array of its shape and dtype. Waits for `source` and `numbers`.

    Parameters
    ----------
    source : NDArray
        Shape (n, ...).
    numbers : NDArray
        The numbers of the rows, of any shape and order; duplicates count once.
    target : row_sparse NDArray
    what : str
        Name of the target in errors.

    Raises
    ------
    ValueError
        The target is not row_sparse.
    IndexError
        A number is out of range.
    """
    if not isinstance(target, SparseNDArray) or target.stype != "row_sparse":
        raise ArgumentValueError(f"The {what} must be a row_sparse array, not a {target.stype} array.")
    wanted = np.unique(numbers.asnumpy()).astype(np.int64)
    if wanted.size and not 0 <= wanted[0] <= wanted[-1] < source.shape[0]:
        raise ArgumentIndexError(
            f"The row_ids must be from 0 to {source.shape[0] - 1}, but they go from {wanted[0]} to {wanted[-1]}."
        )
    options = {"ctx": target.context, "dtype": target.dtype}
    with not_recorded():
        held = mx.nd.sparse.zeros("row_sparse", target.shape, **options)
        indices = mx.nd.array(wanted, dtype=np.int64, ctx=source.context)
        if wanted.size and isinstance(source, SparseNDArray):
            held = mx.nd.sparse.retain(source, indices)
        elif wanted.size:
            values = mx.nd.take(source.as_nd_ndarray(), indices)
            held = mx.nd.sparse.row_sparse_array((values, indices), target.shape, **options)
        held.copyto(target)


def duplicate(array: NDArray) -> NDArray:
    """A copy of an array of any kind and shape; not recorded by autograd."""
    with not_recorded(), mx.util.np_shape(True):
        return array.copy()


def total(replicas: Sequence[NDArray]) -> NDArray:
    """The sum of arrays on several devices, on the device of the first array. A single array is returned itself."""
    if len(replicas) == 1:
        return replicas[0]
    with not_recorded(), mx.util.np_shape(True):
        result = replicas[0].copy()
        for array in replicas[1:]:
            result += array.as_in_context(result.context)
    return result


def elements(array: NDArray, begin: int, count: int) -> NDArray:
    """A flat view of elements [begin, begin + count) of a dense array, or the array itself for all elements."""
    if count == array.size:
        return array
    with not_recorded():
        view = array.as_nd_ndarray().reshape((-1,))[begin : begin + count]
    return view.as_np_ndarray() if isinstance(array, mx.np.ndarray) else view


def item_size(array: Any) -> int:
    """Bytes of an element of an array, or of any object with a dtype."""
    return 2 if dtype_name(array.dtype) == "bfloat16" else np.dtype(array.dtype).itemsize


def rows(array: NDArray, first: int, last: int) -> NDArray:
    """A copy of some rows of an array."""
    with not_recorded(), mx.util.np_shape(True):
        return array[first:last].copy()


def check_rows(array: NDArray, call: str) -> None:
    """Reject a scalar.

    Raises
    ------
    ValueError
        The array has no dimensions.
    """
    if not array.shape:
        raise ArgumentValueError(f"The tensor of {call} is a scalar, which has no rows: use reshape(1).")


def not_recorded() -> Any:
    """Context manager in which autograd records nothing, and the training mode does not change."""
    return autograd.pause(train_mode=autograd.is_training())


def check_alike(arrays: Sequence[NDArray], what: str, floats_convert: bool = False) -> None:
    """Reject arrays that differ in shape or dtype from the first; with `floats_convert`, floats may differ in dtype.

    Raises
    ------
    ValueError
        Two arrays differ; the error names both shapes and dtypes.
    """
    first = arrays[0]
    shape, dtype = first.shape, first.dtype
    for array in arrays:
        if array is first or (array.shape == shape and array.dtype == dtype):
            continue
        if array.shape != shape or not (floats_convert and kind(first) == kind(array) == "float"):
            raise ArgumentValueError(
                f"The {what} must have the same shape and dtype, but have {shape} {dtype_name(dtype)} and "
                f"{array.shape} {dtype_name(array.dtype)}."
            )


def dtype_name(dtype: Any) -> str:
    """The core's name of an array's dtype, for example ``'float32'``."""
    return getattr(dtype, "__name__", None) or ("bfloat16" if "bfloat16" in str(dtype) else str(dtype))


def memory(array: NDArray) -> np.ndarray:
    """The bytes of a dense array, as uint8. Waits until the array is written.

    On the CPU the result is a view of the array's memory, which may be written; asnumpy() would copy it. For an array
    on a GPU the result is a copy on the host, which is read-only, since writes to it would not reach the array.

    Raises
    ------
    MXNetError
        The array carries an error.
    """
    array = array.as_nd_ndarray()
    array.wait_to_read()
    nbytes = array.size * np.dtype(array.dtype).itemsize
    if nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    if on_gpu(array):
        copied = array.asnumpy().reshape(-1).view(np.uint8)
        copied.flags.writeable = False
        return copied
    return memory_of(array, nbytes)


def memory_of(array: NDArray, nbytes: int) -> np.ndarray:
    """A view of the first bytes of an array on the CPU, as uint8. All writes of the array must have ended."""
    address = ctypes.c_void_p()
    # This call of MXNet also converts an operator-specific memory layout back to the default layout.
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address.value), dtype=np.uint8)


def memory_of_weight(array: NDArray) -> np.ndarray:
    """Like `memory`, for an array that a running inference pass may still read and convert to another layout.

    Not for use in operators: this function waits for all readers of the array, so an operator would wait for itself.

    Raises
    ------
    MXNetError
        The array carries an error.
    """
    # A running pass pushes the conversion into the engine. wait_to_write() waits for the pass, memory() for the
    # conversion.
    wait_to_write(array)
    return memory(array)


def wait_to_write(array: NDArray) -> None:
    """Wait until no operation reads or writes an array.

    Raises
    ------
    MXNetError
        The array carries an error.
    """
    mx.base.check_call(mx.base._LIB.MXNDArrayWaitToWrite(array.handle))


def handles(arrays: Sequence[NDArray]) -> list[int]:
    """Addresses of the arrays in MXNet's library, for a call of the core. The arrays must stay alive until the call."""
    return [array.handle.value for array in arrays]
