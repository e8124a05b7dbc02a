"""Arrays, networks and data for both releases of MXNet, for tests that import MXNet."""

from __future__ import annotations

import contextlib
import functools
import hashlib

import kvstore_plugin as mykv  # noqa: F401
import mxnet as mx
import numpy as np
from mxnet.gluon import nn

IS_2 = mx.__version__.startswith("2.")
if IS_2:
    mx.npx.set_np()  # blocks of 2.0 take mx.np arrays only

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]
if IS_2:
    DTYPES += ["int16", "uint16", "uint32", "uint64"]

MXNetError = mx.MXNetError


def array(values, kind: str | None = None, ctx=None):
    """An MXNet array with these values and their dtype; `kind`: "nd", "np" or the type of this release's blocks."""
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
    """The values of an MXNet array, possibly empty; waits for them, and raises their error."""
    with mx.util.np_shape(True):
        return array.asnumpy()


def fail(array) -> None:
    """Make `array` carry an MXNet error, like the result of a failed operator."""
    mx.nd.random.normal(0, -1, array.shape, out=array.as_nd_ndarray())


@functools.lru_cache(maxsize=None)
def why_no_layers_in_bfloat16() -> str:
    """Why MXNet cannot compute layers in bfloat16 here, for skipping a test; empty: it can."""
    x = mx.nd.amp_cast(mx.nd.ones((2, 3)), dtype=BFLOAT16)
    try:
        mx.nd.FullyConnected(x, x, num_hidden=2, no_bias=True).wait_to_read()
    except MXNetError as error:
        clear_errors()
        return f"layers in bfloat16 need a CPU with AVX-512: {str(error).strip().splitlines()[-1]}"
    return ""


def parameters(net) -> dict[str, np.ndarray]:
    """Values of all parameters by structural name."""
    return {name: parameter.data(parameter.list_ctx()[0]).asnumpy() for name, parameter in structure(net).items()}


def checksum(net) -> str:
    """Digest of the bits of all parameters."""
    digest = hashlib.sha256()
    for _, values in sorted(parameters(net).items()):
        digest.update(values.tobytes())
    return digest.hexdigest()


def dense_network(seed: int, inputs: int = 6, widths: tuple = (8, 5, 2), dtype: str = "float32", ctx=None):
    """A multilayer perceptron with known shapes, its values drawn by numpy from `seed`."""
    net = nn.HybridSequential()
    with name_scope(net):
        for width in widths:
            net.add(nn.Dense(width, activation="tanh", in_units=inputs, dtype=dtype))
            inputs = width
    net.initialize(ctx=ctx)
    fill(net, seed)
    return net


def conv_network(seed: int, dtype: str = "float32", ctx=None):
    """A convolutional network for images of shape (N, 1, 8, 8), smooth, with values drawn by numpy from `seed`."""
    net = nn.HybridSequential()
    with name_scope(net):
        net.add(
            nn.Conv2D(4, 3, padding=1, activation="tanh", in_channels=1),
            nn.AvgPool2D(),
            nn.Conv2D(6, 3, activation="tanh", in_channels=4),
            nn.Flatten(),
            nn.Dense(3, in_units=24),
        )
    net.initialize(ctx=ctx)
    net.cast(dtype)
    net(array(np.zeros((1, 1, 8, 8), dtype), ctx=ctx))  # 2.0 ignores in_channels until then
    fill(net, seed)
    return net


def layers_named_after_others(others: int):
    """Two layers of one shape, whose names count `others` layers before: with 9, 'dense10' sorts before 'dense9'."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        for _ in range(others):
            nn.Dense(1)
        net.add(nn.Dense(4, in_units=4, use_bias=False), nn.Dense(4, in_units=4, use_bias=False))
    net.initialize(mx.init.Xavier())
    return net


def fill(net, seed: int) -> None:
    """Set the parameters, in the order of their structure, to values drawn by numpy from `seed`."""
    rng = np.random.RandomState(seed)
    for _, parameter in structure(net).items():
        parameter.set_data(array(rng.uniform(-0.5, 0.5, parameter.shape).astype(parameter.dtype)))


def structure(net) -> dict:
    """Parameters by structural name, which is the same in all processes."""
    return dict(net.collect_params()) if IS_2 else net._collect_params_with_prefix()


def name_scope(block):
    return contextlib.nullcontext() if IS_2 else block.name_scope()


def clear_errors() -> None:
    """Wait for all operations and forget their errors.

    An error that was not read stays in arrays and in MXNet's temporary workspaces, from where it reaches results of
    unrelated operators; waitall() raises and removes all of them.
    """
    with contextlib.suppress(MXNetError):
        mx.nd.waitall()
