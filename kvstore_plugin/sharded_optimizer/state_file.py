"""Files of optimizer states, in the format of MXNet's Updater.get_states().

A file is a pickle of a dict {key: state} or of a tuple (this dict, optimizer). A state is None, an array, a number, or
a tuple or list of states. safe_unpickler.py limits what the pickle may do.
"""

from __future__ import annotations

import numbers
import os
import pickle
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ..compat.mxnet import NDArray, mx
from . import safe_unpickler

_DEEPEST = 16  # levels of nested lists; states of MXNet's optimizers have three levels


class Content(NamedTuple):
    """The content of a file; `optimizer` is None if only states were saved."""

    states: dict
    optimizer: Any


def read(path: str | os.PathLike) -> Content:
    """The content of a file of optimizer states.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        The file is damaged, or does not hold optimizer states.
    """
    with open(path, "rb") as file:
        data = file.read()
    return parse(data, os.fspath(path))


def parse(data: bytes, name: str) -> Content:
    """Like `read`, for the content `data` of a file; errors call the file `name`."""
    try:
        content = safe_unpickler.load(data)
        states, optimizer = content if isinstance(content, tuple) and len(content) == 2 else (content, None)
        if isinstance(states, dict):
            _check_states(states, len(data))
    except Exception as error:  # unpickling arbitrary bytes can raise any error
        raise ValueError(
            f"{name!r} holds no optimizer states that can be read: {error or type(error).__name__}"
        ) from error
    if not isinstance(states, dict) or not all(isinstance(key, (int, str)) for key in states):
        raise ValueError(f"{name!r} holds a pickle, but no optimizer states by the keys of parameters")
    if optimizer is not None and not isinstance(optimizer, mx.optimizer.Optimizer):
        raise ValueError(f"{name!r} holds a {type(optimizer).__name__} instead of an optimizer")
    return Content(states, optimizer)


def _check_states(states: dict, most: int) -> None:
    """Raise unless all values are states. `most`: the file's bytes; each nested state takes at least one of them."""
    left = most

    def check(state: Any, depth: int) -> None:
        nonlocal left
        left -= 1
        if depth > _DEEPEST or left < 0:
            raise ValueError("a state contains itself, or too many values")
        if type(state) in (tuple, list):
            for one in state:
                check(one, depth + 1)
        elif isinstance(state, NDArray):
            if getattr(state, "handle", None) is None:
                raise ValueError("it has an array without content")
        elif not (state is None or isinstance(state, (numbers.Number, np.generic))):
            raise ValueError(f"a state is a {type(state).__name__}")

    for state in states.values():
        check(state, 0)


def write(file: BinaryIO, content: Content) -> None:
    """Write a file for `read` and for Updater.set_states()."""
    pickle.dump(content.states if content.optimizer is None else tuple(content), file)
