"""Counts MXNet's references to an array's memory, and to the array as an autograd variable.

MXNet does not report these counts. So this module reads the counters of MXNet's smart pointers from memory: an NDArray
of the library begins with a std::shared_ptr to its memory, and has a std::shared_ptr to its node in recorded graphs.
The first use locates the second pointer, and checks both pointers with new arrays.
"""

from __future__ import annotations

import ctypes
import functools
import time
from typing import Callable

from .mxnet import NDArray, autograd, mx

_WORD = ctypes.sizeof(ctypes.c_void_p)
_WORDS = 24  # read from the beginning of an NDArray of the library, which is larger in both releases
_PATIENCE_S = 0.5  # the engine releases arrays some time after their operations


def are_known() -> bool:
    """Whether the other functions of this module can be used with this build of MXNet."""
    return _place_of_node() is not None


def of_memory(array: NDArray) -> int:
    """Number of the library's arrays that share an array's memory: slices, arrays in cached graphs, and so on."""
    return _count(array.handle.value)


def of_variable(array: NDArray) -> int:
    """Number of arrays and recorded graphs that refer to an array as an autograd variable; 0 if it has no gradient."""
    place = _place_of_node()
    assert place is not None
    return _count(array.handle.value + place)


def of_a_gradient() -> int:
    """The value of `of_memory` for a gradient that only its Parameter and autograd hold."""
    return 3


def settle(holds: Callable[[], bool]) -> None:
    """Wait briefly until `holds` is true: the engine releases its operations' arrays with a delay."""
    until = time.monotonic() + _PATIENCE_S
    while not holds() and time.monotonic() < until:
        time.sleep(0.002)


def _count(pointer: int) -> int:
    """The number of owners of a std::shared_ptr, whose second word is the address of a block {table, owners, ...}."""
    block = ctypes.c_uint64.from_address(pointer + _WORD).value
    return ctypes.c_int32.from_address(block + _WORD).value if block else 0


@functools.lru_cache(maxsize=None)
def _place_of_node() -> int | None:
    """Offset of an NDArray's node in bytes; None for an unknown build of MXNet."""
    variable, gradient = mx.nd.zeros((2, 3)), mx.nd.zeros((2, 3))
    variable.wait_to_read()
    gradient.wait_to_read()
    settle(lambda: _count(variable.handle.value) == _count(gradient.handle.value) == 1)
    before = _words(variable)
    autograd.mark_variables([variable], [gradient])
    changed = [number for number, (old, new) in enumerate(zip(before, _words(variable))) if old != new]
    if len(changed) < 2 or changed[1] != changed[0] + 1 or any(before[number] for number in changed[:2]):
        return None
    place = changed[0] * _WORD

    def counts() -> tuple[int, int, int]:
        at = variable.handle.value
        return _count(at), _count(gradient.handle.value), _count(at + place)

    alone = counts()
    others = [variable.as_np_ndarray(), gradient.as_np_ndarray()]
    shared = counts()
    del others
    return place if (alone, shared) == ((2, 3, 1), (3, 4, 2)) and counts() == alone else None


def _words(array: NDArray) -> list[int]:
    return list((ctypes.c_uint64 * _WORDS).from_address(array.handle.value))
