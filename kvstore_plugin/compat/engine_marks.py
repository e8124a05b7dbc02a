"""Marks in the order of MXNet's engine: Python functions that run between the operations of an array."""

from __future__ import annotations

import ctypes
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

_waiting: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)


def push(array: NDArray, function: Callable[[], None]) -> None:
    """Call a function in a thread of MXNet, after all pushed operations that read or write the array.

    Operations pushed later run after the function. It is called even if the array carries an error, which stays in the
    array. It must neither raise an error nor wait.
    """
    number = next(_numbers)
    _waiting[number] = function
    try:
        _push(array, number)
    except BaseException:
        _waiting.pop(number, None)
        raise


def _push(array: NDArray, number: int) -> None:
    handle, context, kind = ctypes.byref(array.handle), ctypes.byref(_CPU), ctypes.byref(_ASYNC)
    name, always = b"mykv mark", ctypes.c_bool(True)
    told = (context, None, 0, handle, 1, kind, 0, name, always)
    mx.base.check_call(mx.base._LIB.MXEnginePushAsyncND(_run, ctypes.c_void_p(number), None, *told))


@_Function
def _run(*told: Any) -> None:
    *callbacks, number = told[1:]
    if MAJOR == 2:
        _report(callbacks[0])
    try:
        _waiting.pop(number)()
    finally:
        _report(callbacks[-1])


def _report(callback: int) -> None:
    told = _EngineCallback.from_address(callback)
    if told.call:
        _Call(told.call)(told.engine, told.parameter, None)
