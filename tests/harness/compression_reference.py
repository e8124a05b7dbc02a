"""The compressors in numpy, written from their papers: the core must match them bit for bit.

`Message` unpacks a message, to detect errors of packing too. Arrays have one dimension, and are float32 or
float64; arithmetic is in their type unless noted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

_HEADER = np.dtype([("count", "<u4"), ("is_finite", "<u4"), ("number", "<f8")])


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011): shape (n, 4) uint32 counters to as many outputs."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product1 & low,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product0 & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def random_numbers(seed: int, step: int, stream: int, count: int) -> np.ndarray:
    """The uint32 number of each of the first elements: 64 elements use 16 counters, one word of each in turn."""
    blocks = -(-count // 64)
    counters = np.zeros((blocks * 16, 4), np.uint32)
    counters[:, 0] = np.arange(blocks * 16)
    counters[:, 1:] = step, stream & 0xFFFFFFFF, stream >> 32
    words = philox(counters, (seed & 0xFFFFFFFF, seed >> 32))
    return words.reshape(blocks, 16, 4).transpose(0, 2, 1).reshape(-1)[:count]


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes as bytes: in a group of 16 * (32 / bits), element 16 j + w has bits [j bits, (j + 1) bits) of word w."""
    per_word = 32 // bits
    padded = np.zeros(-(-len(codes) // (16 * per_word)) * 16 * per_word, np.uint32)
    padded[: len(codes)] = codes
    shifts = (np.arange(per_word, dtype=np.uint32) * bits).reshape(1, per_word, 1)
    words = np.bitwise_or.reduce(padded.reshape(-1, per_word, 16) << shifts, axis=1)
    return words.astype("<u4").reshape(-1).view(np.uint8)


def sum_in_rows(values: np.ndarray) -> float:
    """The sum in float64: of each of 16 lanes in order, then over the lanes."""
    rows = np.zeros(-(-len(values) // 16) * 16)
    rows[: len(values)] = values
    lanes = np.cumsum(rows.reshape(-1, 16), axis=0)[-1]
    return float(np.cumsum(lanes)[-1])


class Message(NamedTuple):
    """A compressed message: the bytes, and the decoded values."""

    payload: np.ndarray  # uint8
    number: float
    decoded: np.ndarray


def number_kept(k: float, count: int, total: int) -> int:
    """Number of elements that top-k and random-k keep of a piece: a fraction of it, or its share of a number."""
    return max(1, int(k * count)) if k < 1 else min(count, -(-int(k) * count // total))


def two_bit(values, threshold=0.5, unit=1.0, **_) -> Message:
    """MXNet's 2bit: threshold, -threshold or nothing."""
    level = values.dtype.type(threshold * unit)
    codes = np.where(values >= level, 1, np.where(values <= -level, 2, 0))
    decoded = np.array([0, level, -level], values.dtype)[codes]
    return Message(pack(codes, 2), float(level), decoded)


def one_bit(values, threshold=0.5, unit=1.0, **_) -> Message:
    """MXNet's 1bit: 1 above the threshold, else -1."""
    above = values > values.dtype.type(threshold * unit)
    one = values.dtype.type(unit)
    return Message(pack(above, 1), unit, np.where(above, one, -one))


def sign(values, scaling=True, unit=1.0, **_) -> Message:
    """Signs, times the mean magnitude with scaling."""
    size = values.dtype.type(sum_in_rows(np.abs(values)) / len(values)) if scaling else values.dtype.type(unit)
    positive = values >= 0
    number = float(size) if scaling else unit
    return Message(pack(positive, 1), number, np.where(positive, size, -size))


def _sparse(values, kept, factor) -> Message:
    kept = np.sort(kept)
    sent = values[kept] * values.dtype.type(factor)
    decoded = np.zeros_like(values)
    decoded[kept] = sent
    index = kept.astype("<u2" if len(values) <= 1 << 16 else "<u4")
    return Message(np.concatenate([sent.view(np.uint8), index.view(np.uint8)]), 0.0, decoded)


def top_k(values, k=0.01, total=None, **_) -> Message:
    """The largest magnitudes; of equal ones the first."""
    kept = number_kept(k, len(values), total or len(values))
    return _sparse(values, np.argsort(-np.abs(values), kind="stable")[:kept], 1)


def random_k(values, k=0.01, seed=0, total=None, step=0, stream=0, ef=True, **_) -> Message:
    """The elements with the smallest random numbers; times n / k without error feedback."""
    kept = number_kept(k, len(values), total or len(values))
    numbers = random_numbers(seed, step, stream, len(values))
    return _sparse(values, np.argsort(numbers, kind="stable")[:kept], 1 if ef else len(values) / kept)


def _bits(k: int) -> int:
    return 2 if k <= 1 else 4 if k <= 7 else 8 if k <= 127 else 16


def dithering(values, k=None, partition="linear", normalize="max", seed=0, step=0, stream=0, ef=True, **_) -> Message:
    """Random rounding to levels; scaled to least squares with error feedback."""
    natural = partition == "natural"
    real = values.dtype.type
    k = k or (7 if natural else 127)
    most = 2.0 ** (k - 1) if natural else float(k)
    size = np.abs(values)
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
        norm = float(size.max()) if normalize == "max" else math.sqrt(sum_in_rows(wide * wide))
        if not math.isfinite(norm):
            return Message(pack(np.zeros(len(values), np.uint32), _bits(k)), norm, values)
        factor, level = real(np.float64(most) / np.float64(norm)), real(norm / most)
        if not np.isfinite(factor) or factor == 0:
            factor = level = real(0)
        steps = np.minimum(size * factor, real(most))
    if natural:
        _, exponent = np.frexp(np.maximum(steps, 1))  # steps = m 2^e with m in [0.5, 1)
        below = np.where(steps >= 1, np.ldexp(real(1), exponent - 1), real(0)).astype(real)
        distance = np.where(steps >= 1, below, real(1)).astype(real)
        number = np.where(steps >= 1, exponent, 0)
    else:
        below, distance = np.floor(steps), real(1)
        number = below.astype(np.int64)
    chance = (random_numbers(seed, step, stream, len(values)) >> np.uint32(8)).astype(real) * real(2.0**-24)
    number = number + (chance * distance < steps - below)
    codes = number.astype(np.uint32) | (values < 0).astype(np.uint32) << np.uint32(_bits(k) - 1)
    rounded = np.where(number > 0, np.ldexp(1.0, number - 1), 0.0) if natural else number.astype(real)
    rounded = np.where(values < 0, -rounded, rounded).astype(real)
    if ef:
        first = (rounded * level).astype(np.float64)
        square = sum_in_rows(first * first)
        nearest = sum_in_rows(values.astype(np.float64) * first) / square if square > 0 else 1.0
        level = real(float(level) * (nearest if math.isfinite(nearest) else 1.0))
    return Message(pack(codes, _bits(k)), float(level), rounded * level)


COMPRESSORS = {
    "2bit": two_bit,
    "1bit": one_bit,
    "onebit": sign,
    "topk": top_k,
    "randomk": random_k,
    "dithering": dithering,
}


def text(name: str, **parameters: object) -> str:
    """The core's text for a compressor."""
    return " ".join([name, *(f"{key}={value}" for key, value in parameters.items())])


def compress(name, values, residual=None, total=None, unit=1.0, step=0, stream=0, **parameters):
    """The bytes of a message, the decoded values, and the new residual.

    Returns
    -------
    message, decoded, residual : numpy.ndarray
        `residual` is None if none was given, or error feedback is off.
    """
    feedback = residual is not None and parameters.get("ef", True)
    with np.errstate(all="ignore"):
        corrected = values + residual if feedback else values
    header = np.zeros(1, _HEADER)
    header["count"] = len(values)
    made = COMPRESSORS[name](np.nan_to_num(corrected), total=total, unit=unit, step=step, stream=stream, **parameters)
    if not (np.isfinite(corrected).all() and math.isfinite(made.number)):
        payload, decoded = np.zeros_like(made.payload), np.full_like(values, np.nan)
        return np.concatenate([header.view(np.uint8), payload]), decoded, residual
    header["is_finite"], header["number"] = 1, made.number
    left = corrected - made.decoded if feedback else residual
    return np.concatenate([header.view(np.uint8), made.payload]), made.decoded, left
