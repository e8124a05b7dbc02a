"""The argument `compression` of a trainer: the type of gradients between hosts.

For other compressors, with error feedback, see gradient_compression.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compat import arrays
from ..compat.mxnet import NDArray, mx
from .gradient_compression import GradientCompression, gradient_compression

_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])  # MXNet's name of bfloat16


class _Method:
    def __init__(self, name: str, wire: str) -> None:
        self.name = name
        self.wire = wire  # the core's name of the dtype between hosts; empty: gradients keep their dtype

    def compress(self, tensor: NDArray) -> tuple[NDArray, Any]:
        """Convert an array to the compressed dtype, and return it with a context for `decompress`; as in Horovod.

        Programs call this method before an `allreduce` of their own. Trainers do not: the core compresses gradients.

        Parameters
        ----------
        tensor : NDArray
            Any shape and dtype; only float32 and float64 are converted.

        Returns
        -------
        NDArray, dtype or None
            The array in 16 bits, or `tensor` itself. And the context: the dtype of `tensor`, or None if `tensor` was
            not converted.
        """
        if not self.wire or arrays.dtype_name(tensor.dtype) not in ("float32", "float64"):
            return tensor, None
        return _cast(tensor, _BFLOAT16 if self.wire == "bfloat16" else self.wire), tensor.dtype

    def decompress(self, tensor: NDArray, ctx: Any) -> NDArray:
        """An array from `compress`, or a sum of such arrays, in its original dtype; `ctx` comes from `compress`."""
        return tensor if ctx is None else _cast(tensor, ctx)

    def __repr__(self) -> str:
        return f"Compression.{self.name}"

    def __reduce__(self) -> tuple:
        return getattr, (Compression, self.name)  # copying and unpickling give this object itself


def _cast(tensor: NDArray, dtype: Any) -> NDArray:
    made = tensor.as_nd_ndarray().astype(dtype)  # mx.np has no name for bfloat16
    return made.as_np_ndarray() if isinstance(tensor, mx.np.ndarray) else made


class UserCompression:
    """A user's compressor: an object or class with Horovod's methods compress() and decompress().

    Attributes
    ----------
    compressor : object
    wire : str
        Empty: the core compresses nothing.
    """

    wire = ""

    def __init__(self, compressor: Any) -> None:
        self.compressor = compressor

    def __repr__(self) -> str:
        return described(self.compressor)


def described(code: Any) -> str:
    """The qualified name of a function, a class, or an object's class: a text that is the same on all workers."""
    code = getattr(code, "func", code)  # the function inside a functools.partial
    named = code if hasattr(code, "__qualname__") else type(code)
    return f"{named.__module__}.{named.__qualname__}"


class Compression:
    """Choices for the argument `compression` of `DistributedTrainer`.

    They apply to transfers between hosts, where the network is the limit: there gradients of float32 and float64 are
    sent in 16 bits, other gradients unchanged. Within a host, in shared memory, gradients are summed in their own type,
    which is faster than a conversion, and exact. So on one host all choices give the same bits.

    The argument `compression_params` takes these choices too, and compressors with even shorter messages. Each choice
    has methods ``compress(tensor)`` and ``decompress(tensor, ctx)``, for programs that compress arrays themselves.

    Attributes
    ----------
    none
        Gradients keep their own dtype.
    fp16
        As float16, with 11 bits of precision and values up to 65504; larger values become infinite.
    bf16
        As bfloat16, with 8 bits of precision and the range of float32.

    Examples
    --------
    >>> trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", compression=mykv.Compression.fp16)
    >>> mykv.Compression.bf16
    Compression.bf16
    >>> trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", compression=mykv.Compression.none)
    """

    none = _Method("none", "")
    fp16 = _Method("fp16", "float16")
    bf16 = _Method("bf16", "bfloat16")


def choose(compression: Any, compression_params: Any) -> _Method | UserCompression | GradientCompression:
    """The compression that a trainer's arguments `compression` and `compression_params` select.

    The result has an attribute `wire`, the core's text for this compression.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong, or both arguments select a compression.
    """
    if not isinstance(compression, _Method):
        if not callable(getattr(compression, "compress", None)) or not callable(
            getattr(compression, "decompress", None)
        ):
            raise TypeError(
                f"compression must be an attribute of Compression, such as Compression.fp16, not {compression!r}. A "
                "compressor of your own needs methods compress(tensor) and decompress(tensor, ctx)."
            )
        compression = UserCompression(compression)
    if compression_params is None or compression_params == {}:
        return compression
    if compression is not Compression.none:
        raise ValueError(
            f"Give either compression ({compression!r}) or compression_params ({compression_params!r}), not both."
        )
    chosen = gradient_compression(compression_params)
    named = {method.wire: method for method in (Compression.none, Compression.fp16, Compression.bf16)}
    return named.get(chosen.wire, chosen)
