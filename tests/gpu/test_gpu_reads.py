"""Values of arrays on GPUs that Python reads: copied through the host, never through a device's pointer.

The arrays are of the stand-in for libmxnet, over memory of that for libcudart: host code that reads it dies.
"""

from __future__ import annotations

import ctypes

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
import pytest
from kvstore_plugin.compat import arrays
from kvstore_plugin.elastic import shard_replicas as kept_shares
from kvstore_plugin.parameters import check_in_step as in_step
from kvstore_plugin.parameters import load_tracking as loading
from standin.gpu_support import Cuda, DeviceArray, Mxnet

_ENV = {"MYKV_TEST_POOL": "reads of GPUs"}
_DTYPES = ["float32", "float64", "float16", "uint8", "int32", "int8", "int64"]


class _Library:
    """MXNet's library, and the stand-in for calls whose first argument is an array of it."""

    def __init__(self, standin, real):
        self._standin, self._real = standin, real

    def __getattr__(self, name):
        def call(*arguments):
            is_ours = bool(arguments) and getattr(arguments[0], "value", None) in self._standin.made
            return getattr(self._standin.library if is_ours else self._real, name)(*arguments)

        return call


@pytest.fixture
def on_gpu(monkeypatch):
    """Makes NDArrays on a GPU, with the methods of MXNet's own."""
    cuda, standin = Cuda(), Mxnet()
    made = []

    def make(values):
        memory = DeviceArray(values, 0, cuda)
        array = mx.nd.NDArray(ctypes.c_void_p(standin.array(memory)))
        made.append((array, memory))
        return array

    with monkeypatch.context() as patched:
        patched.setattr(arrays, "HAS_GPUS", True)
        for module in (mx.base, mx.ndarray.ndarray):
            patched.setattr(module, "_LIB", _Library(standin, module._LIB))
        yield make
    for array, memory in made:
        array.handle = ctypes.c_void_p(None)
        memory.free()
    standin.free()


@pytest.mark.ranks(1, env=_ENV)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_the_bytes_of_an_array_on_a_gpu_are_a_copy_that_is_read_only(on_gpu, dtype):
    for shape in [(3, 5), (), (0, 2), (7,)]:
        values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        read = arrays.memory(on_gpu(values))
        assert read.dtype == np.uint8 and read.tobytes() == values.tobytes()
        if read.size:
            with pytest.raises(ValueError, match="read-only"):
                read[:] = 0


@pytest.mark.ranks(1, env=_ENV)
def test_who_looks_at_values_copies_those_on_gpus(on_gpu):
    """check_in_step; shares of the optimizer on the store in ElasticState.commit(); loaded parameters."""
    values = np.random.RandomState(0).standard_normal((100, 30)).astype("float32")
    there, here = on_gpu(values), mx.nd.array(values)
    assert in_step.digest(there) == in_step.digest(here)
    assert kept_shares.pack({"key": there}).tobytes() == kept_shares.pack({"key": here}).tobytes()
    parameter = mykv.compat.mxnet.Parameter("weight", shape=values.shape)
    parameter._data = [there]
    assert not loading._differs(parameter, here)
    assert loading._differs(parameter, here + 1)
