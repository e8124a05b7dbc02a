"""Arrays over memory that the core has made on a device; here the device is the CPU, which DLPack calls (1, 0)."""

import gc
import weakref

import numpy as np
import pytest
from kvstore_plugin.compat.mxnet import mx, view_of_device_memory

CPU = (1, 0)


class Owner:
    """Stands for the core's memory."""

    def __init__(self, values):
        self.values = values


def view(values, like=None):
    owner = Owner(values)
    like = mx.nd.zeros((1,)) if like is None else like
    return owner, view_of_device_memory(owner, values.ctypes.data, values.shape, values.dtype, CPU, like)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"])
def test_the_array_is_the_memory(dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    _, array = view(values)
    assert array.shape == (2, 3) and np.dtype(array.dtype) == dtype
    assert (array.asnumpy() == np.arange(6).reshape(2, 3)).all()
    array[:] = array * 2
    array.wait_to_read()
    assert (values == 2 * np.arange(6).reshape(2, 3)).all()


def test_its_kind_is_that_of_another_array():
    _, array = view(np.ones(3, dtype=np.float32), mx.np.ones((1,)))
    assert isinstance(array, mx.np.ndarray)


def test_the_owner_lives_as_long_as_the_array():
    owner, array = view(np.ones(3, dtype=np.float32))
    alive = weakref.ref(owner)
    del owner
    gc.collect()
    part = array[1:]
    array.wait_to_read()
    del array
    assert alive() is not None and part.asnumpy().tolist() == [1, 1]
    del part
    mx.nd.waitall()
    gc.collect()
    assert alive() is None
