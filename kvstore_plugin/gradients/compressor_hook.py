"""Runs a user's compressor, with the methods of Horovod's compressors, as a communication hook."""

from __future__ import annotations

from typing import Any

from ..collectives.compression import UserCompression
from ..collectives.reduce import grouped_allreduce_
from ..collectives.reduce_ops import Sum
from ..compat import arrays
from ..compat.mxnet import NDArray
from .communication_hook import GradientBucket


class CompressorHook:
    """Sums the results of compress(), and passes the sums to decompress().

    Parameters
    ----------
    compression : UserCompression
        The compressor.
    predivide : float
        Divisor of the compressed arrays before they are summed, as in Horovod; the result is multiplied by it.
    """

    def __init__(self, compression: UserCompression, predivide: float) -> None:
        self._compressor = compression.compressor
        self._predivide = float(predivide)

    def __call__(self, bucket: GradientBucket) -> None:
        pairs = [_compressed(self._compressor, name, one) for name, one in zip(bucket.names, bucket.arrays)]
        grouped_allreduce_(
            [one for one, _ in pairs],
            op=Sum,
            prescale_factor=1.0 / self._predivide,
            process_set=bucket.process_set,
            priority=bucket.priority,
        )
        factor = bucket.scale * self._predivide
        for name, gradient, (total, context) in zip(bucket.names, bucket.arrays, pairs):
            result = _decompressed(self._compressor, name, gradient, total, context)
            arrays.copy(result if factor == 1.0 else result * factor, gradient)


def _compressed(compressor: Any, name: str, gradient: NDArray) -> tuple[NDArray, Any]:
    made = compressor.compress(gradient)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], NDArray):
        raise TypeError(
            f"compress() of the compressor must return a tuple of an NDArray and a context, but for the gradient of "
            f"{name} it has returned {type(made).__name__}. Return (tensor, ctx)."
        )
    return made


def _decompressed(compressor: Any, name: str, gradient: NDArray, total: NDArray, context: Any) -> NDArray:
    made = compressor.decompress(total, context)
    shape = made.shape if isinstance(made, NDArray) else None
    if shape != gradient.shape:
        raise TypeError(
            f"decompress() of the compressor must return an NDArray of shape {gradient.shape} for the gradient of "
            f"{name}, but has returned {type(made).__name__} of shape {shape}. Return the gradient's shape."
        )
    return made
