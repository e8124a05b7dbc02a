"""Arrays, networks and data as both releases of MXNet have them, for the tests that import MXNet."""

from __future__ import annotations

import hashlib

import kvstore_plugin as mykv  # noqa: F401
import mxnet as mx
import numpy as np

IS_2 = mx.__version__.startswith("2.")
if IS_2:
    mx.npx.set_np()  # blocks of 2.0 take mx.np arrays only

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]
if IS_2:
    DTYPES += ["int16", "uint16", "uint32", "uint64"]

MXNetError = mx.MXNetError


def array(values, kind: str | None = None, ctx=None):
    """An MXNet array with these values and their dtype; `kind` is "nd", "np" or what this release's blocks take."""
    values = np.asarray(values)
    module = mx.np if (kind or ("np" if IS_2 else "nd")) == "np" else mx.nd
    place = {("device" if IS_2 and module is mx.np else "ctx"): ctx} if ctx is not None else {}
    with mx.util.np_shape(True):
        return module.array(values, dtype=values.dtype, **place)


def numbers(rank: int, shape, dtype="float32") -> np.ndarray:
    """Values of a rank, so small that no dtype overflows in a sum over ranks."""
    return ((np.arange(np.prod(shape, dtype=int)) * 7 + rank * 3) % 11).reshape(shape).astype(dtype)


def total(size: int, shape, dtype="float32") -> np.ndarray:
    """Sum of `numbers` over all ranks."""
    return sum(numbers(rank, shape, dtype).astype("float64") for rank in range(size)).astype(dtype)


def value(array) -> np.ndarray:
    """The values of an MXNet array, also of one without elements; waits for them, and raises what they carry."""
    with mx.util.np_shape(True):
        return array.asnumpy()


def fail(array) -> None:
    """Let `array` carry an MXNet error, as the result of an operator that failed in the engine does."""
    mx.nd.random.normal(0, -1, array.shape, out=array.as_nd_ndarray())


def parameters(net) -> dict[str, np.ndarray]:
    """Values of all parameters by structural name."""
    named = net.collect_params() if IS_2 else net._collect_params_with_prefix()
    return {name: parameter.data().asnumpy() for name, parameter in named.items()}


def checksum(net) -> str:
    """Digest of the bits of all parameters."""
    digest = hashlib.sha256()
    for _, values in sorted(parameters(net).items()):
        digest.update(values.tobytes())
    return digest.hexdigest()
