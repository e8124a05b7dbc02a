"""States of optimizers as trees: None, arrays and numbers, and tuples and lists of states."""

from __future__ import annotations

from typing import Any, Callable, Iterable, NamedTuple

import numpy as np

from .mxnet import NDArray, SparseNDArray, mx


class Leaf(NamedTuple):
    """Placeholder for an array in the description of a state."""

    shape: tuple
    dtype: Any
    is_np: bool

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def described_array(array: NDArray, also_sparse: bool = False) -> Leaf:
    """The description of an array.

    Raises
    ------
    ValueError
        The array is sparse, and `also_sparse` is False.
    """
    if isinstance(array, SparseNDArray) and not also_sparse:
        raise ValueError("a state is a sparse array, but states on the store must be dense")
    return Leaf(tuple(array.shape), array.as_nd_ndarray().dtype, isinstance(array, mx.np.ndarray))


def mapped(state: Any, function: Callable[[Any], Any], kind: type | tuple = NDArray) -> Any:
    """A state with each array (each object of type `kind`) replaced by the result of `function`."""
    if isinstance(state, kind):
        return function(state)
    if type(state) in (tuple, list):
        return type(state)(mapped(one, function, kind) for one in state)
    return state


def leaves(state: Any, kind: type) -> list[Any]:
    """The objects of type `kind` in a state, in order."""
    found: list[Any] = []
    mapped(state, found.append, kind)
    return found


def filled(state: Any, arrays: Iterable[NDArray]) -> Any:
    """A state with these arrays instead of its leaves, in order."""
    left = iter(arrays)
    return mapped(state, lambda _: next(left), Leaf)


def made_array(leaf: Leaf) -> NDArray:
    """An uninitialized array on the CPU."""
    with mx.util.np_shape(True):
        made = mx.nd.empty(leaf.shape, ctx=mx.cpu(), dtype=leaf.dtype)  # on the CPU: callers write its memory
    return made.as_np_ndarray() if leaf.is_np else made
