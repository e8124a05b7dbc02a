"""Marks in the order of MXNet's engine: Python functions that run between the operations of an array."""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import Any, Callable

from .mxnet import MAJOR, NDArray, mx

_ASYNC = ctypes.c_int(4)  # FnProperty::kAsync: the function may run in any thread, and reports its end by a callback


class _Context(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int), ("device_id", ctypes.c_int32))


class _EngineCallback(ctypes.Structure):
    """Engine::CallbackOnStart and Engine::CallbackOnComplete, as in csrc/mxnet/api.h."""

    _fields_ = (("call", ctypes.c_void_p), ("engine", ctypes.c_void_p), ("parameter", ctypes.c_void_p))


_CPU = _Context(1, 0)
_Call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
# With the context, the callback for the start (only in MXNet 2.0), that for the end, and a number.
_Function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (3 if MAJOR == 1 else 4))

_waiting: dict[int, Callable[[Callable[[], None]], None]] = {}
_numbers = itertools.count(1)


def push(array: NDArray, function: Callable[[], None]) -> None:
    """Call a function in a thread of MXNet, after all pushed operations that read or write the array.

    Operations pushed later run after the function. It is called even if the array carries an error, which stays in the
    array. It must neither raise an error nor wait.
    """

    def run(end: Callable[[], None]) -> None:
        try:
            function()
        finally:
            end()

    _push(array, run)


def follow(array: NDArray, earlier: NDArray) -> None:
    """Make operations that are pushed later on `array` run after all pushed operations on `earlier`.

    It pushes two marks. The mark on `array` ends when both marks have begun. A single operation on both arrays would
    carry an error of one array into the other.
    """
    begun = itertools.count()
    ends: list[Callable[[], None]] = []

    def run_earlier(end: Callable[[], None]) -> None:
        end()
        if next(begun):
            ends[0]()

    def run(end: Callable[[], None]) -> None:
        ends.append(end)
        if next(begun):
            end()

    _push(earlier, run_earlier)  # first, since NaiveEngine waits for the end of each operation that is pushed
    _push(array, run)


def _push(array: NDArray, run: Callable[[Callable[[], None]], None]) -> None:
    """Push an operation that writes the array: `run` is called with the function that ends the operation."""
    number = next(_numbers)
    _waiting[number] = run
    handle, context, kind = ctypes.byref(array.handle), ctypes.byref(_CPU), ctypes.byref(_ASYNC)
    name, always = b"mykv mark", ctypes.c_bool(True)
    told = (context, None, 0, handle, 1, kind, 0, name, always)
    try:
        mx.base.check_call(mx.base._LIB.MXEnginePushAsyncND(_run, ctypes.c_void_p(number), None, *told))
    except BaseException:
        _waiting.pop(number, None)
        raise


@_Function
def _run(*told: Any) -> None:
    *callbacks, number = told[1:]
    if MAJOR == 2:
        _reports(callbacks[0])()
    _waiting.pop(number)(_reports(callbacks[-1]))


def _reports(callback: int) -> Callable[[], None]:
    """The function that calls a callback of the engine. The callback's own structure is there only until _run ends."""
    told = _EngineCallback.from_address(callback)
    if not told.call:
        return lambda: None
    return functools.partial(_Call(told.call), told.engine, told.parameter, None)
