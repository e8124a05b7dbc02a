"""In what form gradients travel between hosts: what the argument `compression` of a trainer says of it.

More ways, which keep what they lose, are named by a dictionary: see gradient_compression.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compat import arrays
from ..compat.mxnet import NDArray, mx
from .gradient_compression import GradientCompression, gradient_compression

_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])  # as MXNet names it


class _Method:
    def __init__(self, name: str, wire: str) -> None:
        self.name = name
        self.wire = wire  # the core's name of the type; empty for the gradient's own

    def compress(self, tensor: NDArray) -> tuple[NDArray, Any]:
        """An array in the type that travels, and what `decompress` needs; as Horovod's compressors have it.

        For programs that call it themselves, around an `allreduce`. A trainer does not: there the core compresses.

        Parameters
        ----------
        tensor : NDArray
            Any shape and dtype; only float32 and float64 are converted.

        Returns
        -------
        NDArray, dtype or None
            The array in 16 bits, or `tensor` itself; and the dtype of `tensor`, or None where it was not converted.
        """
        if not self.wire or arrays.dtype_name(tensor.dtype) not in ("float32", "float64"):
            return tensor, None
        return _cast(tensor, _BFLOAT16 if self.wire == "bfloat16" else self.wire), tensor.dtype

    def decompress(self, tensor: NDArray, ctx: Any) -> NDArray:
        """An array that `compress` has made, or a sum of such, in its own dtype again; `ctx` is what it returned."""
        return tensor if ctx is None else _cast(tensor, ctx)

    def __repr__(self) -> str:
        return f"Compression.{self.name}"

    def __reduce__(self) -> tuple:
        return getattr, (Compression, self.name)  # a copy is this very object


def _cast(tensor: NDArray, dtype: Any) -> NDArray:
    made = tensor.as_nd_ndarray().astype(dtype)  # mx.np has no name for bfloat16
    return made.as_np_ndarray() if isinstance(tensor, mx.np.ndarray) else made


class Compression:
    """Choices for the argument `compression` of `DistributedTrainer`.

    They concern what travels between hosts, where the network is the limit: gradients of float32 and float64 travel in
    16 bits there, and those of other types as they are. Within a host, in shared memory, gradients are summed in their
    own type, which is faster than to convert them, and exact. So on one host all choices give the same bits.

    The argument `compression_params` names these too, and others that make messages shorter still. Each has methods
    ``compress(tensor)`` and ``decompress(tensor, ctx)``, for programs that compress by themselves.

    Attributes
    ----------
    none
        Gradients travel in their own dtype.
    fp16
        As float16, with 11 bits of precision and values up to 65504; larger ones become infinite.
    bf16
        As bfloat16, with 8 bits of precision and the range of float32.
    """

    none = _Method("none", "")
    fp16 = _Method("fp16", "float16")
    bf16 = _Method("bf16", "bfloat16")


def choose(compression: Any, compression_params: Any) -> _Method | GradientCompression:
    """What the arguments `compression` and `compression_params` of a trainer say together.

    The result has an attribute `wire`, the core's text for it.

    Raises
    ------
    TypeError, ValueError
        One of them is wrong, or both choose something.
    """
    if not isinstance(compression, _Method) and hasattr(compression, "decompress"):
        raise TypeError(
            "compression must be an attribute of Compression, such as Compression.fp16, and not a compressor of your "
            f"own, {compression!r}, since the trainer's gradients are compressed in mykv's core. Use its compress() "
            "and decompress() around allreduce_() of each gradient, with a gluon.Trainer(..., kvstore=None)."
        )
    if not isinstance(compression, _Method):
        raise TypeError(
            f"compression must be an attribute of Compression, such as Compression.fp16, not {compression!r}."
        )
    if compression_params is None or compression_params == {}:
        return compression
    if compression is not Compression.none:
        raise ValueError(
            f"Give either compression ({compression!r}) or compression_params ({compression_params!r}), not both."
        )
    chosen = gradient_compression(compression_params)
    named = {method.wire: method for method in (Compression.none, Compression.fp16, Compression.bf16)}
    return named.get(chosen.wire, chosen)
