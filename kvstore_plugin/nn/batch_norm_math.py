"""Batch normalization on numpy arrays, in two steps: the sums over the batch, and the results from the sums.

Between the steps the sums of several processes can be added. Arrays have the shape (outer, channels, inner); any array
with a channel axis can be reshaped to it. Arrays are processed in blocks that fit into a core's cache. Sums are
computed in float64, everything else in float32, or in float64 for float64 data.
"""

from __future__ import annotations

from typing import Iterator, NamedTuple

import numpy as np

# Elements of a block: about 1 MB with its temporaries, in float32.
_BLOCK = 1 << 17


class Moments(NamedTuple):
    """Moments of each channel; arrays of float64 and of shape (channels,)."""

    mean: np.ndarray
    variance: np.ndarray  # biased: divided by `count`
    count: float  # elements per channel


def sums(data: np.ndarray) -> np.ndarray:
    """The sums over a part of a batch. Added over all parts, they give the batch's moments.

    Parameters
    ----------
    data : ndarray of float16, float32 or float64, shape (outer, channels, inner)

    Returns
    -------
    ndarray of float64, shape (2 * channels + 1,)
        Sums of the elements, sums of their squares, and the number of elements per channel. The sums of squares
        are computed from deviations from the mean of these data. So even if the variance is small compared with the
        mean, only float64 arithmetic loses digits.
    """
    channels = data.shape[1]
    result = np.zeros(2 * channels + 1)
    total, squares = result[:channels], result[channels:-1]
    result[-1] = count = data.shape[0] * data.shape[2]
    if count == 0:
        return result
    for index, chosen in _blocks(data.shape):
        total[chosen] += data[index].sum(axis=(0, 2), dtype=np.float64)
    mean = (total / count).astype(_working(data))
    for index, chosen in _blocks(data.shape):
        deviation = data[index] - _column(mean[chosen])
        np.multiply(deviation, deviation, out=deviation)
        squares[chosen] += deviation.sum(axis=(0, 2), dtype=np.float64)
    # With the rounded mean m: sum x^2 = sum (x - m)^2 + m (2 sum x - n m).
    rounded = mean.astype(np.float64)
    squares += rounded * (2 * total - count * rounded)
    return result


def moments(total: np.ndarray) -> Moments:
    """The moments of a batch from the `sums` of its parts, added up."""
    channels = (len(total) - 1) // 2
    count = total[-1]
    mean = total[:channels] / count
    return Moments(mean, np.maximum(total[channels:-1] / count - mean * mean, 0), count)


def normalize(data: np.ndarray, mean: np.ndarray, scale: np.ndarray, shift: np.ndarray, out: np.ndarray) -> None:
    """Write ``(data - mean) * scale + shift`` to `out`; mean, scale and shift have the shape (channels,)."""
    mean, scale, shift = (values.astype(_working(data)) for values in (mean, scale, shift))
    for index, chosen in _blocks(data.shape):
        block = data[index] - _column(mean[chosen])
        block *= _column(scale[chosen])
        np.add(block, _column(shift[chosen]), out=out[index], casting="same_kind")


def gradient_sums(data: np.ndarray, gradient: np.ndarray, mean: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    """The sums over a part of a batch. Added over all parts, they are what `data_gradient` needs.

    Parameters
    ----------
    data, gradient : ndarray, shape (outer, channels, inner)
        The data that were normalized, and the gradient of the result.
    mean, inverse : ndarray of float64, shape (channels,)
        The mean, and 1 / the standard deviation, by which the data were normalized.

    Returns
    -------
    ndarray of float64, shape (2 * channels,)
        Sums of the gradient, which are the gradient of beta, and sums of its product with the normalized data, which
        are the gradient of gamma.
    """
    channels = data.shape[1]
    result = np.zeros(2 * channels)
    mean, inverse = mean.astype(_working(data)), inverse.astype(_working(data))
    for index, chosen in _blocks(data.shape):
        result[:channels][chosen] += gradient[index].sum(axis=(0, 2), dtype=np.float64)
        block = data[index] - _column(mean[chosen])
        block *= _column(inverse[chosen])
        block *= gradient[index]
        result[channels:][chosen] += block.sum(axis=(0, 2), dtype=np.float64)
    return result


def data_gradient(
    data: np.ndarray,
    gradient: np.ndarray,
    mean: np.ndarray,
    inverse: np.ndarray,
    gamma: np.ndarray,
    means: np.ndarray,
    out: np.ndarray,
) -> None:
    """Write the gradient of the data to `out`.

    With x the normalized data it is ``gamma * inverse * (gradient - means[0] - x * means[1])`` (Ioffe and Szegedy,
    "Batch Normalization", 2015, arXiv:1502.03167, section 3).

    Parameters
    ----------
    data, gradient, mean, inverse
        As for `gradient_sums`.
    gamma : ndarray, shape (channels,)
    means : ndarray of float64, shape (2, channels)
        The `gradient_sums` of the whole batch divided by the number of its elements per channel; zeros if the mean
        and variance did not come from the batch.
    out : ndarray, shape (outer, channels, inner)
    """
    # As gradient * a - (data - mean) * b - c.
    a = gamma * inverse
    b, c = a * inverse * means[1], a * means[0]
    mean, a, b, c = (values.astype(_working(data)) for values in (mean, a, b, c))
    for index, chosen in _blocks(data.shape):
        block = data[index] - _column(mean[chosen])
        block *= _column(b[chosen])
        block += _column(c[chosen])
        np.subtract(gradient[index] * _column(a[chosen]), block, out=out[index], casting="same_kind")


def _working(data: np.ndarray) -> type:
    """The dtype for computations on `data`."""
    return np.float64 if data.dtype == np.float64 else np.float32


def _column(values: np.ndarray) -> np.ndarray:
    return values[:, np.newaxis]


def _blocks(shape: tuple[int, int, int]) -> Iterator[tuple[tuple[slice, slice], slice]]:
    """The index of each block of an array, and the block's channels."""
    outer, channels, inner = shape
    wide = min(max(_BLOCK // max(inner, 1), 1), max(channels, 1))
    high = max(_BLOCK // max(wide * inner, 1), 1)
    for row in range(0, outer, high):
        for channel in range(0, channels, wide):
            chosen = slice(channel, channel + wide)
            yield (slice(row, row + high), chosen), chosen
