"""Reads pickles of optimizer states safely: a pickle can only create such states.

A pickle is a program: it names functions and calls them, sets attributes of any object that it can reach and items of
any container. Python's own advice is never to load an untrusted pickle. This reader accepts only the contents of state
files: plain values, arrays, numpy's numbers and dtypes, and optimizers and schedulers of classes that this process has
imported already. Anything else is an error before it is executed. A pickle holds an array in MXNet's binary format.
This reader checks the array's header against the number of bytes before MXNet reads the bytes.

A name in a pickle is only a key into tables of objects found earlier. It is never resolved through modules, since
reading an attribute can run code: reading an attribute of `ctypes.cdll` loads a library.

The reader is based on the standard library's unpickler in Python. The unpickler in C cannot be restricted to certain
functions, and a pickle of a few bytes can make it allocate gigabytes.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import sys
from collections import OrderedDict
from typing import Any, Callable, ClassVar, Sequence

import numpy as np

from ..compat.mxnet import NDArray, mx

_BITS = (8, 16, 32, 64)
_NUMBERS = [
    "bool_",
    *(f"float{bits}" for bits in _BITS[1:]),
    *(f"{kind}int{bits}" for kind in ("", "u") for bits in _BITS),
]
_DTYPE = re.compile(r"[biufc]\d{1,2}")

# MXNet's binary format of an array (NDArray::Save): valid first words, and bytes per element by the dtype's number.
_MAGIC = (0xF993FAC9, 0xF993FACA)
_WIDTHS = {0: 4, 1: 8, 2: 2, 3: 1, 4: 4, 5: 1, 6: 8, 7: 1, 8: 2, 9: 2, 10: 4, 11: 8, 12: 2}
_DENSE, _ROW_SPARSE, _CSR = 0, 1, 2
_MOST_AXES = 32
_NO_KEY = "has a key that is not a plain value"
_DEEPEST_KEY = 8  # levels of nested tuples; Python's hash of a tuple has no limit, and could overflow the stack


def load(data: bytes) -> Any:
    """The content of the pickle.

    Raises
    ------
    Exception
        Of any type: the pickle is damaged, or does more than this reader allows.
    """
    stream = io.BytesIO(data)
    loaded = _Unpickler(stream).load()
    if stream.read(1):
        raise pickle.UnpicklingError("there are bytes after the pickle")
    return loaded


class _Marker:
    """Placeholder in the pickle's calls for an object that the pickle may name but not use."""


_NDARRAY, _OBJECT = _Marker(), _Marker()


def _encode(text: str, encoding: str) -> bytes:
    """Replaces codecs.encode, by which old protocols create bytes."""
    _require(isinstance(text, str) and encoding == "latin1", "encodes an object that is not bytes")
    return text.encode("latin1")


def _bytearray(data: bytes = b"") -> bytearray:
    _require(isinstance(data, bytes), "makes a bytearray of an object that is not bytes")
    return bytearray(data)


def _set(items: list) -> set:
    _require(type(items) is list and all(map(_is_plain, items)), _NO_KEY)
    return set(items)


def _ordered_dict(items: Sequence = ()) -> OrderedDict:
    pairs = type(items) in (list, tuple) and all(type(one) in (list, tuple) and len(one) == 2 for one in items)
    _require(pairs and all(_is_plain(key) for key, _ in items), _NO_KEY)
    return OrderedDict(items)


def _type_of_none(one: None) -> type:
    """Replaces type(), by which a pickle names NoneType; type() itself could create classes."""
    _require(one is None, "calls type()")
    return type(None)


def _new_object(kind: type, base: Any, state: None) -> Any:
    """Replaces copyreg._reconstructor, by which old protocols create an object."""
    _require(
        _trains(kind) and base is _OBJECT and state is None, "makes an object that is not an optimizer or scheduler"
    )
    return kind.__new__(kind)


def _dtype(text: str, align: bool = False, copy: bool = False) -> np.dtype:
    _require(isinstance(text, str) and _DTYPE.fullmatch(text) is not None, "has a dtype that is not numeric")
    return np.dtype(text)


def _new_numpy(kind: Any, shape: tuple, code: bytes) -> np.ndarray:
    _require(kind is _NDARRAY and shape == (0,), "makes a numpy array of another kind")
    return np.ndarray((0,), np.int8)


def _from_buffer(data: bytes, dtype: np.dtype, shape: tuple, order: str) -> np.ndarray:
    """Replaces the function of numpy by which protocol 5 creates arrays."""
    _require(
        isinstance(dtype, np.dtype) and isinstance(data, (bytes, bytearray)),
        "makes an array of an object that is not bytes",
    )
    return np.frombuffer(data, dtype).reshape(shape, order=order)


def _scalar(dtype: np.dtype, data: bytes) -> np.generic:
    _require(isinstance(dtype, np.dtype) and isinstance(data, bytes), "makes a number of an object that is not bytes")
    return np.frombuffer(data, dtype, 1)[0]


# Names allowed in a pickle, each with its replacement.
_NAMED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encode,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "complex"): complex,
    ("builtins", "object"): _OBJECT,
    ("builtins", "set"): _set,
    ("builtins", "type"): _type_of_none,
    ("collections", "OrderedDict"): _ordered_dict,
    ("copyreg", "_reconstructor"): _new_object,
    ("numpy", "dtype"): _dtype,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy.core.multiarray", "_reconstruct"): _new_numpy,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.multiarray", "_reconstruct"): _new_numpy,  # numpy 2
    ("numpy._core.multiarray", "scalar"): _scalar,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
}
_CALLABLE = [one for one in _NAMED.values() if callable(one)]
_NAMED.update({("numpy", name): getattr(np, name) for name in _NUMBERS})
_NAMED.update(
    {
        ("mxnet.ndarray.ndarray", "NDArray"): NDArray,
        ("mxnet.ndarray.sparse", "CSRNDArray"): mx.nd.sparse.CSRNDArray,
        ("mxnet.ndarray.sparse", "RowSparseNDArray"): mx.nd.sparse.RowSparseNDArray,
        ("mxnet.numpy.multiarray", "ndarray"): mx.np.ndarray,
    }
)
_NAMED_OF_OLD = {("__builtin__", name): one for (module, name), one in _NAMED.items() if module == "builtins"}
_NAMED_OF_OLD["copy_reg", "_reconstructor"] = _new_object
_NAMED.update(_NAMED_OF_OLD)

_TRAINING = (mx.optimizer.Optimizer, mx.lr_scheduler.LRScheduler)


def _trains(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, _TRAINING)


def _training_classes() -> dict[tuple[str, str], type]:
    """The optimizers and schedulers of this process by their pickled names, without access to modules."""
    found: dict[tuple[str, str], type] = {}
    waiting = list(_TRAINING)
    while waiting:
        kind = waiting.pop(0)
        found[kind.__module__, kind.__qualname__] = kind  # if two classes have the same name, the last class found
        waiting += type.__subclasses__(kind)
    return found


def _makes_itself(kind: Any) -> bool:
    """Whether a class customizes its pickling: its pickles may create objects by a call of the class."""
    return _trains(kind) and (kind.__reduce__, kind.__reduce_ex__) != (object.__reduce__, object.__reduce_ex__)


def _is_field(name: Any) -> bool:
    return isinstance(name, str) and not name.startswith("__")


def _is_plain(key: Any, depth: int = 0) -> bool:
    """Whether a key of a dict or a set can be hashed without custom code and without overflowing the stack."""
    if type(key) is tuple:
        return depth < _DEEPEST_KEY and all(_is_plain(one, depth + 1) for one in key)
    return key is None or isinstance(key, (str, bytes, int, float, complex, np.generic, type))


def _require(right: bool, otherwise: str) -> None:
    if not right:
        raise pickle.UnpicklingError(f"it {otherwise}")


class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar[dict] = dict(pickle._Unpickler.dispatch)

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._known = {**_training_classes(), **_NAMED}

    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get((module, name))
        if found is not None:
            return found
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is neither an array nor an optimizer or scheduler known to this process; "
            "a class of your own must be imported before the file is loaded"
        )

    def load_reduce(self) -> None:
        function, arguments = self.stack[-2:]
        _require(type(arguments) is tuple, "calls a function without readable arguments")
        if isinstance(function, type) and issubclass(function, NDArray):
            _require(arguments == (None,), "makes an array from a pointer")
        else:
            known = any(function is allowed for allowed in _CALLABLE)
            _require(
                known or _makes_itself(function), "calls a function that does not make arrays, optimizers or schedulers"
            )
        pickle._Unpickler.load_reduce(self)

    def load_newobj(self) -> None:
        _require(
            _trains(self.stack[-2]) and self.stack[-1] == (), "makes an object that is not an optimizer or scheduler"
        )
        pickle._Unpickler.load_newobj(self)

    def load_build(self) -> None:
        made, state = self.stack[-2:]
        if isinstance(made, NDArray):
            _check_array(made, state)
        elif isinstance(made, np.dtype):
            # Only this machine's byte order is allowed, and no fields.
            plain = type(state) is tuple and len(state) == 8 and state[1] in ("<", "|", "=")
            _require(plain and state[2:5] == (None, None, None), "has a dtype that is not numeric")
            self.stack.pop()
            return
        elif isinstance(made, np.ndarray):
            is_numbers = type(state) is tuple and len(state) == 5 and isinstance(state[2], np.dtype)
            _require(is_numbers and isinstance(state[4], bytes), "has a numpy array whose elements are not numbers")
        else:
            _require(_trains(type(made)), "changes an object that is not an array, optimizer or scheduler")
            # pickle sets the attributes in the second part of a pair by setattr(), which can even replace __class__.
            by_name = state[1] if type(state) is tuple and len(state) == 2 else None
            fields = by_name is None or (type(by_name) is dict and all(map(_is_field, by_name)))
            _require(fields, "changes an attribute that is not a field of an optimizer or scheduler")
        pickle._Unpickler.load_build(self)

    def load_bytearray8(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(min(size, sys.maxsize))))

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[b"\x96"[0]] = load_bytearray8  # BYTEARRAY8, which Python 3.7 has no name for
    for _refused in (
        pickle.INST,
        pickle.OBJ,
        pickle.NEWOBJ_EX,
        pickle.EXT1,
        pickle.EXT2,
        pickle.EXT4,
        pickle.PERSID,
        pickle.BINPERSID,
    ):
        dispatch.pop(_refused[0])
    del _refused


_Look = Callable[[Any], Any]


def _fills(name: str, holders: tuple[type, ...], filled: _Look | None, keys: _Look) -> Callable[[Any], None]:
    """The unpickler's method `name`, restricted to containers of the types `holders` and to plain keys."""
    standard = getattr(pickle._Unpickler, name)

    def method(self: Any) -> None:
        if filled is not None:
            _require(type(filled(self)) in holders, "fills an object that is not a list, a dict or a set")
        _require(all(map(_is_plain, keys(self))), _NO_KEY)
        standard(self)

    return method


def _before_mark(self: Any) -> Any:
    return self.metastack[-1][-1]


for _opcode, _name, _holders, _filled, _keys in (
    (pickle.APPEND, "load_append", (list,), lambda self: self.stack[-2], lambda self: ()),
    (pickle.APPENDS, "load_appends", (list,), _before_mark, lambda self: ()),
    (pickle.SETITEM, "load_setitem", (dict, OrderedDict), lambda self: self.stack[-3], lambda self: self.stack[-2:-1]),
    (pickle.SETITEMS, "load_setitems", (dict, OrderedDict), _before_mark, lambda self: self.stack[::2]),
    (pickle.ADDITEMS, "load_additems", (set,), _before_mark, lambda self: self.stack),
    (pickle.DICT, "load_dict", (), None, lambda self: self.stack[::2]),
    (pickle.FROZENSET, "load_frozenset", (), None, lambda self: self.stack),
):
    _Unpickler.dispatch[_opcode[0]] = _fills(_name, _holders, _filled, _keys)


def _check_array(array: Any, state: Any) -> None:
    """Raise unless the state of a new array holds a whole dense array of a known type."""
    data = state.get("handle") if type(state) is dict else None
    _require(isinstance(data, (bytes, bytearray)), "has an array without content")
    _require(getattr(array, "handle", None) is None, "fills an array twice")
    if not isinstance(data, bytearray):  # MXNet needs a writable buffer
        state["handle"] = bytearray(data)
    magic, storage = struct.unpack_from("<Ii", data)
    _require(magic in _MAGIC and storage in (_DENSE, _ROW_SPARSE, _CSR), "has an array in a form that is not known")
    # checkpoint.py rejects sparse arrays too, but MXNet must not read them at all.
    _require(storage == _DENSE, "has a sparse array, but states on the store must be dense")
    (axes,) = struct.unpack_from("<i", data, 8)
    _require(0 <= axes <= _MOST_AXES and (axes > 0 or magic == _MAGIC[1]), "has an array without a shape")
    shape = struct.unpack_from(f"<{axes}q", data, 12)
    device, number, dtype = struct.unpack_from("<3i", data, 12 + 8 * axes)
    _require(1 <= device <= 6 and 0 <= number < 1 << 12, "has an array of a device that is not known")
    _require(all(extent >= 0 for extent in shape) and dtype in _WIDTHS, "has an array of a type that is not known")
    nbytes = _WIDTHS[dtype]
    for extent in shape:
        nbytes *= extent
    _require(len(data) == 24 + 8 * axes + nbytes, "has an array of more or fewer bytes than its shape says")
