"""Adds operations of this package to the graph of autograd.record().

When the gradients of the outputs are ready, MXNet calls the backward function in one of its threads for operators
written in Python. The function pushes operations into the engine and returns: it does not block.

mx.autograd.Function would do the same, but it loses gradients with ``grad_req='add'``, and its errors have no text.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from typing import Any, Callable, Iterator, NamedTuple, Sequence

from ..world import core as core_loader
from . import arrays, errors, forks
from .mxnet import MXNetError, NDArray, autograd, mx

# MXNet's request types for gradients.
_NOTHING, _ADDED = (0, "null"), (3, "add")

Backward = Callable[[Sequence[NDArray], Sequence[NDArray]], None]


def is_recorded(array: NDArray) -> bool:
    """Whether autograd knows an array: it has an attached gradient, or is a recorded result. Does not block."""
    try:
        autograd.get_symbol(array)
    except MXNetError:
        return False
    return True


def variable(like: NDArray) -> NDArray:
    """A new array with an attached gradient, for an operation whose inputs autograd does not know."""
    with arrays.not_recorded():
        made = mx.nd.zeros((1,), ctx=like.context)
        made.attach_grad()
    return made


def record(inputs: Sequence[NDArray], outputs: Sequence[NDArray], backward: Backward) -> list[NDArray]:
    """Record an operation that is not an operator of MXNet. Only inside autograd.record().

    Parameters
    ----------
    inputs : sequence of NDArray
        At least one must be known to autograd.
    outputs : sequence of NDArray
        New arrays of the operation.
    backward : callable
        Called with the gradients of the outputs and with arrays for the gradients of the inputs, all of mx.nd. It
        writes the gradients of the inputs by operations of the engine. If it raises an exception, these arrays carry
        the error.

    Returns
    -------
    list of NDArray
        The recorded results: the outputs themselves, or views of them.
    """
    forks.wait_before_forks()
    # A view of an input has no attached gradient. Otherwise the operator would write the input's attached gradient, and
    # block it until the other ranks have arrived: a deadlock if their backward passes run in a different order.
    inputs = [array if array.grad is None else _reshaped(array, array.shape) for array in inputs]
    shapes = [array.shape for array in outputs]
    with arrays.not_recorded():
        recorded = [_matrix(array) if _may_have_a_layout(array) else array for array in outputs]
    key = next(_keys)
    entry = _entries[key] = _entry(key, backward, shapes)
    try:
        mx.base.check_call(
            mx.base._LIB.MXCustomFunctionRecord(
                ctypes.c_int(len(inputs)),
                mx.base.c_handle_array(inputs),
                ctypes.c_int(len(recorded)),
                mx.base.c_handle_array(recorded),
                ctypes.byref(entry.callbacks),
            )
        )
    except BaseException:
        _entries.pop(key, None)
        raise
    return [_reshaped(one, array.shape) if one is not array else array for one, array in zip(recorded, outputs)]


@contextlib.contextmanager
def written(targets: Sequence[NDArray], asked: Sequence[Any]) -> Iterator[list[NDArray]]:
    """Context manager that yields the arrays to write for a Python operator.

    A yielded array is the target itself, or a temporary array if MXNet asks to add the values to the target or needs no
    values. If the context raises an exception, the targets carry the error.

    Parameters
    ----------
    targets : sequence of NDArray
        The outputs of the operator.
    asked : sequence of int or str
        MXNet's request for each target, as numbers or names.
    """
    targets = [array.as_nd_ndarray() for array in targets]
    try:
        with mx.util.np_shape(True):
            outputs = [
                arrays.empty(one.shape, one) if how in _NOTHING or how in _ADDED else one
                for one, how in zip(targets, asked)
            ]
            yield outputs
            for target, one, how in zip(targets, outputs, asked):
                if how in _ADDED:
                    target += one
    except Exception as error:
        for target in targets:
            fail(target, errors.reason_of(error))


def fail(array: NDArray, reason: str) -> None:
    """Make an array carry an error with this text."""
    core_loader.load().push_failing(array.handle.value, reason)


def _matrix(array: NDArray) -> NDArray:
    """The same memory as a matrix, whose gradient has the default layout.

    If a gradient is in a layout of oneDNN, MXNet passes a plain copy of it to the operator, and frees the copy before
    the operator has run.
    """
    return _reshaped(array, (array.shape[0], array.size // array.shape[0]))


def _reshaped(array: NDArray, shape: Sequence[int]) -> NDArray:
    """A view with another shape; reshape() of mx.np would copy."""
    with mx.util.np_shape(True):
        view = array.as_nd_ndarray().reshape(tuple(shape))
    return view.as_np_ndarray() if isinstance(array, mx.np.ndarray) else view


def _may_have_a_layout(array: NDArray) -> bool:
    """Whether an operator may leave the gradient of an array in a oneDNN layout; not for vectors and matrices."""
    return (
        array.size > 0
        and len(array.shape) > 2
        and arrays.dtype_name(array.as_nd_ndarray().dtype) in ("float32", "bfloat16")
    )


_BackwardFunction = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_int,
    ctypes.c_void_p,
)
_DeleteFunction = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class _Entry(NamedTuple):
    """The objects that MXNet refers to until it frees the recorded operation."""

    backward: Backward
    shapes: Sequence[tuple[int, ...]]  # of the outputs
    callbacks: Any
    kept: tuple


def _run(count: int, wanted: int, pointers: Any, requests: Any, is_train: int, key: int) -> int:
    owned = [NDArray(ctypes.c_void_p(pointers[i])) for i in range(count + wanted)]
    targets, entry = owned[count:], _entries[key]
    asked = [requests[i] for i in range(wanted)]
    with arrays.not_recorded(), written(targets, asked) as outputs:  # NaiveEngine may run this while recording
        gradients = [one if one.shape == shape else _reshaped(one, shape) for one, shape in zip(owned, entry.shapes)]
        entry.backward(gradients, outputs)
    return 1


def _free(key: int) -> int:
    _entries.pop(key, None)
    return 1


_functions = (_BackwardFunction(_run), _DeleteFunction(_free))
_entries: dict[int, _Entry] = {}
_keys = itertools.count(1)  # ctypes passes a void pointer of 0 to a callback as None


def _entry(key: int, backward: Backward, shapes: Sequence[tuple[int, ...]]) -> _Entry:
    functions = (ctypes.CFUNCTYPE(ctypes.c_int) * 2)(
        *(ctypes.cast(one, ctypes.CFUNCTYPE(ctypes.c_int)) for one in _functions)
    )
    contexts = (ctypes.c_void_p * 2)(key, key)
    return _Entry(backward, shapes, mx.base.MXCallbackList(2, functions, contexts), (functions, contexts))
