"""Files of optimizer states, in MXNet's own format: what Updater.get_states() returns.

That is a pickle, of a dict {key: state} or of a tuple (this dict, optimizer); a state is None, an array, a number, or a
tuple or list of states. A pickle can name any function to be called while it is read. So only what such a file needs is
taken here: arrays, numpy's numbers, and classes of optimizers and schedulers that this process has imported already.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
from typing import Any, BinaryIO, NamedTuple

from .mxnet_compat import mx

_PLAIN = {
    ("_codecs", "encode"),  # bytes in pickles of old protocols
    ("builtins", "bytearray"),
    ("builtins", "complex"),
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("copyreg", "_reconstructor"),
    ("builtins", "object"),
    ("mxnet.ndarray.ndarray", "NDArray"),
    ("mxnet.ndarray.sparse", "CSRNDArray"),
    ("mxnet.ndarray.sparse", "RowSparseNDArray"),
    ("mxnet.numpy.multiarray", "ndarray"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
}
_NUMBERS = {f"{kind}{bits}" for kind in ("float", "int", "uint") for bits in (8, 16, 32, 64)} | {"bool_"}


class Content(NamedTuple):
    """What a file holds; `optimizer` is None where only states were saved."""

    states: dict
    optimizer: Any


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "type"):
            return _type_of_none
        numpys = module == "numpy" and name in _NUMBERS
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None and (numpys or (module, name) in _PLAIN or _trains(found)):
            return found
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is neither an array nor an optimizer or scheduler known to this process; "
            "a class of your own must be imported before the file is loaded"
        )


def _type_of_none(one: None) -> type:
    """By which a pickle names NoneType; type() itself would make classes."""
    if one is not None:
        raise pickle.UnpicklingError("it calls type()")
    return type(None)


def _trains(found: Any) -> bool:
    bases = (mx.optimizer.Optimizer, mx.lr_scheduler.LRScheduler)
    return isinstance(found, type) and issubclass(found, bases)


def read(path: str | os.PathLike) -> Content:
    """What a file of optimizer states holds.

    Raises
    ------
    OSError
        It cannot be read.
    ValueError
        It is damaged, or something else than optimizer states.
    """
    with open(path, "rb") as file:
        data = file.read()
    return parse(data, os.fspath(path))


def parse(data: bytes, name: str) -> Content:
    """The same from bytes; `name` is for the errors."""
    stream = io.BytesIO(data)
    try:
        content = _Unpickler(stream).load()
    except Exception as error:  # whatever bytes that are no pickle lead to
        raise ValueError(
            f"{name!r} holds no optimizer states that can be read: {error or type(error).__name__}"
        ) from error
    if stream.read(1):
        raise ValueError(f"{name!r} holds no optimizer states that can be read: there are bytes behind them")
    states, optimizer = content if isinstance(content, tuple) and len(content) == 2 else (content, None)
    if not isinstance(states, dict) or not all(isinstance(key, (int, str)) for key in states):
        raise ValueError(f"{name!r} holds a pickle, but no optimizer states by the keys of parameters")
    if optimizer is not None and not isinstance(optimizer, mx.optimizer.Optimizer):
        raise ValueError(f"{name!r} holds a {type(optimizer).__name__} in the place of an optimizer")
    return Content(states, optimizer)


def write(file: BinaryIO, content: Content) -> None:
    """Write what `read` reads, and Updater.set_states()."""
    states, optimizer = content
    if optimizer is not None:
        # Without what this package keeps in it, which is of this process.
        optimizer = copy.copy(optimizer)
        for name in [name for name in vars(optimizer) if name.endswith("_by_mykv")]:
            delattr(optimizer, name)
    pickle.dump(states if optimizer is None else (states, optimizer), file)
