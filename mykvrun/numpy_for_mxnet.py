"""Makes MXNet, which was written for numpy 1.23 and Python 3.11, work with later releases of both.

MXNet uses names that numpy has removed since, and the module distutils, which Python 3.12 removed. Only MXNet's modules
get these names and distutils here: numpy's own namespace does not change, since other packages test its contents
(``hasattr(numpy, "NaN")``). install() puts a finder on ``sys.meta_path`` that runs MXNet's modules with their own
``__import__``. In them ``import numpy`` returns a proxy of numpy with the removed names.
"""

from __future__ import annotations

import builtins
import functools
import re
import sys
import types
from importlib import machinery
from typing import Any

# Aliases that numpy 1.24 or 2.0 has removed, with their targets. numpy 2.0 has numpy.bool again, but as another type;
# MXNet exports the alias as mx.np.bool.
_TYPES = {"bool": bool, "int": int, "float": float, "complex": complex, "object": object, "str": str}
_NUMBERS = {
    "PZERO": 0.0,
    "NZERO": -0.0,
    **dict.fromkeys(("Inf", "Infinity", "PINF", "infty"), float("inf")),
    "NINF": float("-inf"),
    **dict.fromkeys(("NaN", "NAN"), float("nan")),
}
_ALIASES = {
    "complex_": "complex128",
    "cumproduct": "cumprod",
    "float_": "float64",
    "product": "prod",
    "round_": "round",
    "row_stack": "vstack",
    "string_": "bytes_",
    "trapz": "trapezoid",
    "unicode_": "str_",
}
# numpy 1.20 to 1.23 have functions of these names that raise an error, and MXNet takes their docstrings.
_FINANCIAL = ("fv", "ipmt", "irr", "mirr", "nper", "npv", "pmt", "ppmt", "pv", "rate")


def _own_functions(numpy: Any) -> dict[str, Any]:
    """Removed functions for which an alias does not suffice. They behave as in numpy 1.23, and take MXNet's arrays."""

    # numpy would dispatch calls with mx.np arrays to MXNet, which has its own functions under some of these names.
    def host(array: Any) -> Any:
        return array.asnumpy() if hasattr(array, "asnumpy") else array

    def as_given(result: Any, given: Any) -> Any:
        if not hasattr(given, "as_nd_ndarray"):
            return result
        return sys.modules["mxnet"].np.array(result, dtype=result.dtype, ctx=given.ctx)  # type: ignore[attr-defined]

    def alltrue(a: Any, *args: Any, **kwargs: Any) -> Any:
        return numpy.all(host(a), *args, **kwargs)

    def sometrue(a: Any, *args: Any, **kwargs: Any) -> Any:
        return numpy.any(host(a), *args, **kwargs)

    def msort(a: Any) -> Any:
        return as_given(numpy.sort(numpy.array(host(a), subok=True), axis=0), a)

    def in1d(ar1: Any, ar2: Any, assume_unique: bool = False, invert: bool = False) -> Any:
        first = numpy.asarray(host(ar1)).ravel()
        return as_given(numpy.isin(first, host(ar2), assume_unique=assume_unique, invert=invert), ar1)

    def asfarray(a: Any, dtype: Any = "float64") -> Any:
        return numpy.asarray(host(a), dtype=dtype if numpy.issubdtype(dtype, numpy.inexact) else "float64")

    return {function.__name__: function for function in (alltrue, sometrue, msort, in1d, asfarray)}


def _replaced_functions(numpy: Any) -> dict[str, Any]:
    """Functions of numpy 2 that reject arguments which numpy 1 takes."""
    if not _is_2(numpy):
        return {}

    def array(source: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return numpy.array(source, dtype, *args, **kwargs)
        except OverflowError:  # numpy 1 wraps integers that do not fit the type
            return numpy.array(numpy.array(source).astype(dtype), None, *args, **kwargs)

    def with_interpolation(name: str) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            if "interpolation" in kwargs:
                kwargs["method"] = kwargs.pop("interpolation")
            return getattr(numpy, name)(*args, **kwargs)

        return function

    found = {"array": array, **{name: with_interpolation(name) for name in ("nanpercentile", "nanquantile")}}
    for name, function in found.items():
        function.__name__, function.__doc__ = name, getattr(vars(numpy).get(name), "__doc__", None)
    return {**found, "dtype": _dtype_like(numpy)}


def _dtype_like(numpy: Any) -> Any:
    """A replacement for numpy.dtype that takes MXNet's arrays, whose attribute dtype is a type such as numpy.float32.

    ``x.astype(y)`` gives x the type of y. numpy 1 takes y as a type, and numpy 2.5 raises a ValueError.
    """

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, numpy.dtype)

        def __call__(cls, dtype: Any, *args: Any, **kwargs: Any) -> Any:
            own = getattr(dtype, "dtype", None)
            return numpy.dtype(own if isinstance(own, type) else dtype, *args, **kwargs)

        def __getattr__(cls, name: str) -> Any:
            return getattr(numpy.dtype, name)

    return Meta("dtype", (), {"__doc__": getattr(vars(numpy).get("dtype"), "__doc__", None)})


def _is_2(numpy: Any) -> bool:
    return int(numpy.__version__.split(".")[0]) >= 2


def _as_array(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    """The method __array__ for NDArray, which lacks it.

    Without this method, numpy 1 creates an array of objects from an NDArray, by its length and items. numpy 2 cannot do
    so, and numpy.array_equal() of equal NDArrays would be False.
    """
    array = self.asnumpy()
    return array if dtype is None else array.astype(dtype, copy=False)


def _core() -> dict[str, Any]:
    """The parts of numpy.core that MXNet uses, for releases of numpy that have moved them."""
    try:
        from numpy.lib.array_utils import normalize_axis_tuple
    except ImportError:  # numpy 1
        return {}
    return {"core": types.SimpleNamespace(numeric=types.SimpleNamespace(normalize_axis_tuple=normalize_axis_tuple))}


def _removed_in_1_20(name: str) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"numpy has no function {name} since numpy 1.20. The package numpy-financial has it.")

    function.__name__ = name
    function.__doc__ = f"numpy.{name}, which raises an error: the package numpy-financial has it."
    return function


def names(numpy: Any) -> dict[str, Any]:
    """All names that the proxy of `numpy` adds or replaces."""
    compat = types.ModuleType("numpy.compat")
    compat.basestring = str  # type: ignore[attr-defined]
    found = {"compat": compat, **_NUMBERS, **_own_functions(numpy)}
    found.update({name: _removed_in_1_20(name) for name in _FINANCIAL})
    for name, present in _ALIASES.items():
        if hasattr(numpy, present):  # numpy.trapezoid exists only since 2.0
            found[name] = getattr(numpy, present)
    own = vars(numpy)
    missing = {name: value for name, value in found.items() if name not in own}
    return {**missing, **_TYPES, **_core(), **_replaced_functions(numpy)}


class _Front(types.ModuleType):
    """The proxy of numpy for MXNet's modules."""

    def __init__(self, numpy: Any) -> None:
        super().__init__(numpy.__name__, numpy.__doc__)
        vars(self).update(vars(numpy))
        vars(self).update(names(numpy))

    def __getattr__(self, name: str) -> Any:  # modules that numpy imports lazily, and attributes set later
        return getattr(sys.modules["numpy"], name)


class _TextType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, str)

    def __call__(cls, value: Any = "", *args: Any) -> str:
        if type(value) in (tuple, list):
            inner = ", ".join(_element(one) for one in value)
            comma = "," if type(value) is tuple and len(value) == 1 else ""
            return f"({inner}{comma})" if type(value) is tuple else f"[{inner}]"
        return str(value, *args)


class _Text(metaclass=_TextType):
    """str as before numpy 2: a shape with numpy integers is '(2, 3)', not '(np.int64(2), 3)'.

    MXNet passes the arguments of operators and data iterators to its core as such texts.
    """


def _element(value: Any) -> str:
    if type(value) in (tuple, list):
        return _Text(value)
    return str(value) if isinstance(value, sys.modules["numpy"].number) else repr(value)


class _Sum:
    """An attribute of MXNet's metrics that accumulates in float64: a sum, or a count of samples.

    With numpy 2 the sum of a float or an int and a float32 is a float32, so a sum over many batches would lose digits.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, metric: Any, owner: Any = None) -> Any:
        if metric is None:
            return self
        try:
            return vars(metric)[self._name]
        except KeyError:
            raise AttributeError(f"'{type(metric).__name__}' object has no attribute '{self._name}'") from None

    def __set__(self, metric: Any, value: Any) -> None:
        numpy = sys.modules["numpy"]
        narrow = isinstance(value, (numpy.float16, numpy.float32))
        vars(metric)[self._name] = numpy.float64(value) if narrow else value

    def __delete__(self, metric: Any) -> None:
        del vars(metric)[self._name]


# Modules of MXNet 1.9 and 2.0 that convert arguments of operators and data iterators to text, and those of the metrics.
_TEXTS = (
    "mxnet._ctypes.ndarray",
    "mxnet._ctypes.symbol",
    "mxnet._ctypes.cached_op",
    "mxnet.symbol.symbol",
    "mxnet.io.io",
    "mxnet.gluon.data._internal",
)
_METRICS = ("mxnet.metric", "mxnet.gluon.metric")
# What the class of numpy's arrays cannot get back: numpy 2.3 has removed the method tostring, and numpy 2.4 converts no
# array of shape (1,) to a number. These modules run with other calls in their text.
_CALLS = {
    "mxnet.recordio": {".tostring()": ".tobytes()"},
    "mxnet.contrib.quantization": {
        "threshold.asnumpy()": "threshold.asscalar()",
        "divergence.asnumpy()": "divergence.asscalar()",
    },
}
# Perplexity subtracts a float32 from its count of samples.
_SUMS = ("sum_metric", "global_sum_metric", "num_inst", "global_num_inst")


@functools.total_ordering
class _Version:
    """Replaces distutils' StrictVersion and LooseVersion, with which MXNet compares numpy's release."""

    def __init__(self, text: str) -> None:
        self.version = tuple(int(number) for number in re.match(r"[\d.]*", text).group().split(".") if number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Version) and self.version == other.version

    def __lt__(self, other: _Version) -> bool:
        return self.version < other.version

    __hash__ = None  # type: ignore[assignment]


def _distutils() -> types.ModuleType:
    distutils, version = types.ModuleType("distutils"), types.ModuleType("distutils.version")
    version.StrictVersion = version.LooseVersion = _Version  # type: ignore[attr-defined]
    distutils.version = version  # type: ignore[attr-defined]
    return distutils


class _Finder:
    """Does not find modules itself: asks the other finders for MXNet's modules, and gives these other builtins."""

    def __init__(self) -> None:
        self._asked: set[str] = set()  # names being searched: another finder may ask all finders, even this
        self._front: types.ModuleType | None = None
        self._distutils = _distutils()
        self._builtins: dict[str, Any] | None = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "mxnet" or name in self._asked:
            return None
        self._asked.add(name)
        try:
            spec = found_by_others(self, name, path, target)
        finally:
            self._asked.discard(name)
        if isinstance(spec, machinery.ModuleSpec) and isinstance(spec.loader, machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader, self)
        return spec

    def builtins(self) -> dict[str, Any]:
        """The builtins of MXNet's modules."""
        if self._builtins is None:
            self._builtins = {**vars(builtins), "__import__": self._import}
        return self._builtins

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> types.ModuleType:
        if level == 0 and name in ("distutils", "distutils.version"):
            return self._distutils.version if fromlist and name != "distutils" else self._distutils
        module = builtins.__import__(name, globals, locals, fromlist, level)
        # `import numpy.random` gives numpy, and `from numpy.random import ...` the submodule.
        return self._in_front_of(module) if module is sys.modules.get("numpy") else module

    def replace_numpy(self) -> None:
        """Give the proxy to modules of MXNet that another loader has run, as pytest's runs mxnet/test_utils.py."""
        numpy = sys.modules.get("numpy")
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "mxnet" and numpy is not None:
                for key, value in list(vars(module).items()):
                    if value is numpy:
                        setattr(module, key, self._in_front_of(numpy))

    def _in_front_of(self, numpy: types.ModuleType) -> types.ModuleType:
        if self._front is None:
            self._front = _Front(numpy)
        return self._front


class _Loader:
    """The loader of a module of MXNet: gives the module other builtins before the module runs."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_finder"):  # while copy.copy() creates a copy, the copy has no attributes
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        vars(module)["__builtins__"] = self._finder.builtins()
        if module.__name__ in _TEXTS:
            vars(module)["str"] = _Text
        if module.__name__ in _CALLS:
            text = self._loader.get_source(module.__name__)
            for call, instead in _CALLS[module.__name__].items():
                text = text.replace(call, instead)
            exec(compile(text, module.__spec__.origin, "exec"), vars(module))
        else:
            self._loader.exec_module(module)
        if module.__name__ in _METRICS and hasattr(module, "EvalMetric"):
            for name in _SUMS:
                setattr(module.EvalMetric, name, _Sum(name))
        if module.__name__ == "mxnet.ndarray.ndarray" and _is_2(sys.modules["numpy"]):
            module.NDArray.__array__ = vars(module.NDArray).get("__array__", _as_array)
        if module.__name__ == "mxnet":
            self._finder.replace_numpy()


def found_by_others(finder: Any, name: str, path: Any, target: Any) -> Any:
    """The spec of a module from the other finders of ``sys.meta_path``, or None."""
    for other in sys.meta_path:
        find_spec = getattr(other, "find_spec", None)  # finders of old programs lack it
        spec = find_spec(name, path, target) if find_spec is not None and other is not finder else None
        if spec is not None:
            return spec
    return None


def _is_needed() -> bool:
    """Whether numpy or Python is newer than the releases that MXNet was written for."""
    import numpy

    major, minor = (int(number) for number in re.findall(r"\d+", numpy.__version__)[:2])
    return (major, minor) >= (1, 24) or sys.version_info >= (3, 12)


def install() -> None:
    """Make MXNet's modules importable from now on. A no-op if numpy and Python are old enough, or at the second call.

    Raises
    ------
    ImportError
        There is no numpy.
    """
    if _is_needed() and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
