"""MXNet and all differences between its releases 1.9.1 and 2.0.0b1; no other file compares versions."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import weakref
from typing import Any, Callable, Iterable, Sequence

from mykvrun import numpy_for_mxnet

_INSTALL = "pip install mxnet==1.9.1, or the build for your GPUs, such as mxnet-cu112"


def _import_mxnet() -> Any:
    try:
        if "mxnet" not in sys.modules:
            numpy_for_mxnet.install()
        import mxnet
    except ModuleNotFoundError as error:
        if error.name == "mxnet":
            raise ImportError(f"kvstore_plugin needs MXNet, which is missing: {_INSTALL}.", name="mxnet") from None
        raise ImportError(f"MXNet needs the module {error.name}: pip install {error.name}.", name="mxnet") from None
    except ImportError:
        raise
    except Exception as error:
        python = ".".join(str(number) for number in sys.version_info[:3])
        numpy_version = sys.modules["numpy"].__version__
        raise ImportError(
            f"MXNet cannot be imported with Python {python} and numpy {numpy_version} ({type(error).__name__}: "
            f"{error}). It was tried with numpy 1.23 and 2.5: pip install 'numpy<2.6'.",
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
from mxnet.base import _LIB  # noqa: E402
from mxnet.base import MXNetError as MXNetError  # noqa: E402
from mxnet.gluon.parameter import DeferredInitializationError as DeferredInitializationError  # noqa: E402
from mxnet.gluon.parameter import Parameter  # noqa: E402
from mxnet.gluon.trainer import Trainer as Trainer  # noqa: E402 - a program may put another class under gluon.Trainer
from mxnet.kvstore.base import KVStoreBase as KVStoreBase  # noqa: E402

NDArray = ndarray.NDArray
SparseNDArray = ndarray.sparse.BaseSparseNDArray

# Dictionaries keyed by Parameter.name, which contains a counter of the process; 2.0 has no such dictionaries.
NAME_KEYED_DICTS: tuple = (gluon.ParameterDict,) if MAJOR == 1 else ()

# The module of EvalMetric.
metric = mx.metric if MAJOR == 1 else gluon.metric

# Maximum number of arrays in one call of multi_all_finite; with 500 the process crashes.
_MOST_INPUTS = 200

# DLPack's kind, bits and lanes of the dtypes that a Parameter may have.
_DLPACK_TYPES = {
    "int8": (0, 8, 1),
    "int32": (0, 32, 1),
    "int64": (0, 64, 1),
    "uint8": (1, 8, 1),
    "float16": (2, 16, 1),
    "float32": (2, 32, 1),
    "float64": (2, 64, 1),
}

# Whether a Parameter can have row_sparse values and gradients; Gluon 2.0 cannot initialize such Parameters.
HAS_SPARSE_PARAMETERS: bool = MAJOR == 1

# Whether this build of MXNet supports GPUs.
HAS_GPUS: bool = mx.runtime.Features().is_enabled("CUDA")


def library_handle() -> int:
    """Handle (of dlopen) of the library that Python's MXNet calls."""
    return _LIB._handle


def engine_blocks() -> bool:
    """Whether MXNet runs each operation when it is pushed, as its NaiveEngine does."""
    return os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"


def wait_for_all(forgotten: Callable[[], None] = lambda: None) -> None:
    """Wait until MXNet's engine is idle, and drop errors that were never raised.

    `forgotten` is called for each of these errors. They may be of any class: if the text of an error begins with the
    name of a class, as in "ValueError: ", MXNet raises an error of this class.
    """
    while True:
        try:
            return ndarray.waitall()
        except Exception:
            forgotten()


def contexts(parameter: Parameter) -> list:
    """Devices of a Parameter."""
    return parameter.list_ctx() if MAJOR == 1 else parameter.list_device()


def trainer_contexts(trainer: gluon.Trainer) -> list:
    """The devices on which a Trainer updates weights."""
    return trainer._contexts if MAJOR == 1 else trainer._devices


def trainer_of(parameter: Parameter) -> gluon.Trainer | None:
    """The last Trainer created for a Parameter, or None."""
    trainer = parameter._trainer
    return trainer() if isinstance(trainer, weakref.ref) else trainer


def set_trainer_contexts(trainer: gluon.Trainer, devices: list) -> None:
    """Tell a Trainer that its parameters have moved to other devices."""
    setattr(trainer, "_contexts" if MAJOR == 1 else "_devices", devices)


def updater_with(optimizer: Any, states: bytes) -> Any:
    """An updater with the states of another updater; a state moves to its weight's device at the first update."""
    updater = mx.optimizer.get_updater(optimizer)
    updater.set_states(states)
    return updater


def all_finite(arrays: Sequence[NDArray]) -> bool:
    """Whether no element of some floating-point arrays is infinite or NaN. Waits for the arrays."""
    return all(flag.asscalar() for flag in finite_flags(arrays))


def finite_flags(arrays: Sequence[NDArray]) -> list[NDArray]:
    """Flags of one element, each for some of the floating-point arrays: 1 if these arrays are finite, otherwise 0."""
    alike: dict[Any, list] = {}  # multi_all_finite takes arrays of one dtype
    for array in arrays:
        alike.setdefault(array.dtype, []).append(array.as_nd_ndarray())
    packs = [one[i : i + _MOST_INPUTS] for one in alike.values() for i in range(0, len(one), _MOST_INPUTS)]
    with autograd.pause():
        return [ndarray.multi_all_finite(*pack, num_arrays=len(pack)) for pack in packs]


def forget_recorded(block: gluon.Block) -> None:
    """Make a hybridized block, but not its children, trace its next forward pass again and infer missing shapes."""
    if not isinstance(block, gluon.HybridBlock):
        return
    block._clear_cached_op()
    if MAJOR == 2 and any(parameter._data is None for parameter in block._reg_params.values()):
        block._called_infer_shape_already = False


def set_current_device(optimizer: Any, device_id: int) -> None:
    """Select the device whose updates an optimizer counts; an optimizer has counters for each device."""
    (optimizer._set_current_context if MAJOR == 1 else optimizer._set_current_device)(device_id)


def continue_counts(optimizer: Any, device_ids: Iterable[int]) -> None:
    """Give these devices an optimizer's counts of updates: for each key, the largest count of any device.

    MXNet counts per device number, from zero on a new device. A file of states has the device numbers of the worker
    that saved the file; the other workers may have other devices.

    Parameters
    ----------
    optimizer : Optimizer
    device_ids : iterable of int
        Numbers of the devices on which the optimizer updates weights. If empty, the devices that it already counts.
    """
    known = getattr(optimizer, "_all_index_update_counts", None) or {0: optimizer._index_update_count}
    counts: dict = {}
    for of_device in known.values():
        for key, count in of_device.items():
            counts[key] = max(count, counts.get(key, count))
    numbers = set(device_ids) or set(known)
    optimizer._all_index_update_counts = {number: dict(counts) for number in numbers}
    set_current_device(optimizer, min(numbers))


def counted_together(optimizer: Any) -> int:
    """How many updates, of keys of one dtype, an updater counts before it asks the learning rate schedule for rates."""
    names = ("SGD", "LARS", "LAMB", "LANS", "AdamW", "AdaBelief") if MAJOR == 2 else ("SGD", "LARS")
    kinds = tuple(getattr(mx.optimizer, name) for name in names if hasattr(mx.optimizer, name))
    if not isinstance(optimizer, kinds) or not getattr(optimizer, "use_fused_step", True):
        return 1
    return int(min(max(1, optimizer.aggregate_num), 1 << 30))  # in MXNet 2.0 numpy.inf means all keys


def fill_with_zeros(array: NDArray) -> None:
    """Set an array, of mx.nd or mx.np and of any shape, to zero; a row_sparse array holds no rows afterwards."""
    if isinstance(array, SparseNDArray):
        ndarray.sparse.zeros(array.stype, array.shape, ctx=array.context, dtype=array.dtype).copyto(array)
    elif isinstance(array, mx.np.ndarray):
        array[()] = 0
    else:
        array[:] = 0


def hold_all_rows(array: SparseNDArray) -> None:
    """Add missing rows to a row_sparse array, as zeros: MXNet's optimizers do not update missing rows."""
    if array.indices.shape[0] == array.shape[0]:
        return
    with autograd.pause():
        every = ndarray.arange(array.shape[0], ctx=array.context, dtype="int64")
        whole = ndarray.sparse.row_sparse_array((array.tostype("default"), every), shape=array.shape, ctx=array.context)
        whole.copyto(array)


class BatchNorm(gluon.nn.BatchNorm):
    """gluon.nn.BatchNorm whose forward pass, hybridized or not, is the method normalized(F, x, gamma, ...)."""

    if MAJOR == 1:

        def hybrid_forward(self, F: Any, x: Any, *parameters: Any, **named: Any) -> Any:
            names = ("gamma", "beta", "running_mean", "running_var")
            given = [x, *parameters, *(named[name] for name in names if name in named)]
            result = self.normalized(F, *(one.as_nd_ndarray() for one in given))
            return result.as_np_ndarray() if mx.util.is_np_array() else result

    else:

        def forward(self, x: Any) -> Any:
            parameters = (self.gamma, self.beta, self.running_mean, self.running_var)
            given = [x, *(parameter.data(x.device) for parameter in parameters)]
            return self.normalized(ndarray, *(one.as_nd_ndarray() for one in given)).as_np_ndarray()


class BlockOfOneInput(gluon.HybridBlock):
    """A block without parameters whose forward pass, hybridized or not, is the method exchanged(F, x)."""

    if MAJOR == 1:

        def hybrid_forward(self, F: Any, x: Any) -> Any:
            result = self.exchanged(F, x.as_nd_ndarray())
            return result.as_np_ndarray() if mx.util.is_np_array() else result

    else:

        def forward(self, x: Any) -> Any:
            return self.exchanged(ndarray, x.as_nd_ndarray()).as_np_ndarray()


def view_of_memory(memory: Any, like: NDArray) -> NDArray:
    """An array over the memory of a numpy array, without a copy; of mx.np or mx.nd as `like`."""
    view = ndarray.from_numpy(memory, zero_copy=True)
    return view.as_np_ndarray() if isinstance(like, mx.np.ndarray) else view


def view_of_device_memory(
    owner: Any, address: int, shape: Sequence[int], dtype: Any, device: tuple[int, int], like: NDArray
) -> NDArray:
    """An array over memory of a device, without a copy; of mx.np or mx.nd as `like`.

    Parameters
    ----------
    owner : object
        The owner of the memory; is kept alive as long as the array.
    address : int
        Address of the first element; the memory is contiguous.
    shape : sequence of int
        At least one dimension.
    dtype : numpy.dtype
        A dtype that both numpy and DLPack have.
    device : (int, int)
        DLPack's type and number of the device: (2, 1) is gpu(1).
    """
    holder = ndarray.ndarray if MAJOR == 1 else mx.dlpack
    make = _LIB.MXNDArrayFromDLPackEx if MAJOR == 1 else _LIB.MXNDArrayFromDLPack
    lengths = (ctypes.c_int64 * len(shape))(*shape)
    kept = ctypes.py_object((owner, lengths))
    managed = holder.DLManagedTensor()
    tensor = managed.dl_tensor
    tensor.data = address
    tensor.ctx = holder.DLContext(*device)
    tensor.ndim = len(shape)
    tensor.dtype = holder.DLDataType(*_DLPACK_TYPES[str(dtype)])
    tensor.shape = ctypes.cast(lengths, ctypes.POINTER(ctypes.c_int64))
    tensor.strides = None
    tensor.byte_offset = 0
    ctypes.pythonapi.Py_IncRef(kept)  # until MXNet calls the deleter
    managed.manager_ctx = ctypes.c_void_p.from_buffer(kept)
    managed.deleter = holder.dl_managed_tensor_deleter
    handle = mx.base.NDArrayHandle()
    mx.base.check_call(make(ctypes.byref(managed), True, ctypes.byref(handle)))
    view = NDArray(handle=handle)
    return view.as_np_ndarray() if isinstance(like, mx.np.ndarray) else view
