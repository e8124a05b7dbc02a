"""MXNet itself, and everything that differs between its releases 1.9.1 and 2.0.0b1; no other file compares versions."""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import Any, Callable

_INSTALL = "pip install 'mxnet==1.9.1' 'numpy<1.24', or the build for your GPUs, such as mxnet-cu112"


def _numpy_with_bool() -> str:
    """Put numpy.bool back, which MXNet uses and numpy 1.24 removed, and return numpy's version.

    MXNet asks for numpy<1.24 for its sake, but there is no such numpy for Python 3.12.
    """
    import numpy

    major, minor = (int(number) for number in re.findall(r"\d+", numpy.__version__)[:2])
    if (major, minor) >= (2, 0) and "mxnet" not in sys.modules:
        raise ImportError(f"numpy {numpy.__version__} is too new for MXNet: {_numpy_remedy()}.", name="mxnet")
    if (major, minor) >= (1, 24) and "bool" not in vars(numpy):
        numpy.bool = bool
    return numpy.__version__


def _numpy_remedy() -> str:
    return "pip install 'numpy<2'" if sys.version_info >= (3, 12) else "pip install 'numpy<1.24'"


def _import_mxnet() -> Any:
    try:
        numpy_version = _numpy_with_bool()
        import mxnet
    except ModuleNotFoundError as error:
        if error.name == "mxnet":
            raise ImportError(f"kvstore_plugin needs MXNet, which is missing: {_INSTALL}.", name="mxnet") from None
        package = "setuptools" if error.name == "distutils" else error.name  # Python 3.12 has no distutils of its own
        raise ImportError(f"MXNet needs the module {error.name}: pip install {package}.", name="mxnet") from None
    except ImportError:
        raise
    except Exception as error:
        python = ".".join(str(number) for number in sys.version_info[:3])
        raise ImportError(
            f"MXNet cannot be imported with Python {python} and numpy {numpy_version} ({type(error).__name__}: "
            f"{error}); it works with Python 3.8 to 3.11 and numpy<1.24: {_numpy_remedy()}.",
            name="mxnet",
        ) from error
    version = getattr(mxnet, "__version__", "unknown")
    if not re.match(r"(1\.9|2\.0)\.", version):
        raise ImportError(
            f"kvstore_plugin works with MXNet 1.9 and 2.0, but this is MXNet {version}: {_INSTALL}.", name="mxnet"
        )
    return mxnet


mx = _import_mxnet()

MAJOR = int(mx.__version__.split(".")[0])

from mxnet import autograd, gluon, ndarray  # noqa: E402
from mxnet.base import _LIB, MXNetError  # noqa: E402
from mxnet.gluon.parameter import DeferredInitializationError, Parameter  # noqa: E402
from mxnet.kvstore.base import KVStoreBase  # noqa: E402

NDArray = ndarray.NDArray
SparseNDArray = ndarray.sparse.BaseSparseNDArray

# Dictionaries whose keys are Parameter.name, which carries a counter of the process; 2.0 has none.
NAME_KEYED_DICTS: tuple = (gluon.ParameterDict,) if MAJOR == 1 else ()

# The module of EvalMetric.
metric = mx.metric if MAJOR == 1 else gluon.metric

# Whether this build has devices besides the CPU.
HAS_GPUS: bool = mx.runtime.Features().is_enabled("CUDA")

__all__ = [
    "HAS_GPUS",
    "MAJOR",
    "NAME_KEYED_DICTS",
    "DeferredInitializationError",
    "KVStoreBase",
    "MXNetError",
    "NDArray",
    "Parameter",
    "SparseNDArray",
    "autograd",
    "contexts",
    "create_stores_by_name",
    "engine_blocks",
    "fill_with_zeros",
    "gluon",
    "library_handle",
    "metric",
    "mx",
    "set_trainer_contexts",
    "sum_over_devices",
    "trainer_contexts",
    "updater_with",
    "view_of_memory",
    "wait_for_all",
]


def library_handle() -> int:
    """Handle (of dlopen) of the library that Python's MXNet calls."""
    return _LIB._handle


def engine_blocks() -> bool:
    """Whether MXNet runs each operation when it is pushed, as its NaiveEngine does."""
    return os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"


def wait_for_all() -> None:
    """Wait until MXNet's engine has nothing to do, and take the errors out of it that nobody has looked at."""
    while True:
        try:
            return ndarray.waitall()
        except MXNetError:
            continue


def contexts(parameter: Parameter) -> list:
    """Devices of a Parameter."""
    return parameter.list_ctx() if MAJOR == 1 else parameter.list_device()


def trainer_contexts(trainer: gluon.Trainer) -> list:
    """Devices that a Trainer has an updater for."""
    return trainer._contexts if MAJOR == 1 else trainer._devices


def set_trainer_contexts(trainer: gluon.Trainer, devices: list) -> None:
    """Tell a Trainer that its parameters live on other devices now."""
    setattr(trainer, "_contexts" if MAJOR == 1 else "_devices", devices)


def updater_with(optimizer: Any, states: bytes) -> Any:
    """An updater with states of another, which move to the device of a weight when that is updated first."""
    updater = mx.optimizer.get_updater(optimizer)
    updater.set_states(states)
    return updater


def fill_with_zeros(array: NDArray) -> None:
    """Set an array, of mx.nd or mx.np and of any shape, to zero."""
    if isinstance(array, mx.np.ndarray):
        array[()] = 0
    else:
        array[:] = 0


def sum_over_devices(replicas: list) -> None:
    """Overwrite each of some arrays, of one shape on several devices, with their sum."""
    total = replicas[0].copy()
    for array in replicas[1:]:
        total += array.as_in_context(total.context)
    for array in replicas:
        total.copyto(array)


def view_of_memory(memory: Any, like: NDArray) -> NDArray:
    """An array over the memory of a numpy array, without a copy, of mx.np or mx.nd as `like` is."""
    view = ndarray.from_numpy(memory, zero_copy=True)
    return view.as_np_ndarray() if isinstance(like, mx.np.ndarray) else view


def create_stores_by_name(name: str) -> None:
    """Make MXNet create the store `name` where a Trainer is given its name.

    MXNet's own _create_kvstore drops the name of a store without a word where a process has one device, and every
    worker would train alone. The function is imported by name, so that it has to be replaced in each module.
    """
    import mxnet.model

    original = mxnet.model._create_kvstore
    if getattr(original, "creates_stores_by_name", None) == name:
        return
    replacement = _creating(original, name)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("mxnet.") and vars(module).get("_create_kvstore") is original:
            module._create_kvstore = replacement


def _creating(original: Callable, name: str) -> Callable:
    @functools.wraps(original)
    def _create_kvstore(kvstore: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kvstore, str) and kvstore.lower() == name:
            kvstore = mx.kv.create(name)
        return original(kvstore, *args, **kwargs)

    _create_kvstore.creates_stores_by_name = name
    return _create_kvstore
