"""The collective operations in numpy: the expected results for all ranks' values."""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np

_TOLERANCE = {"float16": 4e-3, "float32": 1e-6, "float64": 1e-13}


def reduced(op, values: list, before: float = 1.0, after: float = 1.0) -> np.ndarray:
    """Elementwise reduction of the ranks' `values`, in their dtype; integers are truncated at each scaling."""
    dtype = values[0].dtype
    if dtype.kind == "b":
        return np.any(values, axis=0) if op in (mykv.Sum, mykv.Max) else np.all(values, axis=0)
    if op in (mykv.Sum, mykv.Average):
        if dtype.kind == "f":
            whole = np.sum([value.astype("float64") for value in values], axis=0) * before
        else:
            whole = np.sum([_scaled(value, before) for value in values], axis=0, dtype=dtype)
        return _scaled(whole, after, len(values) if op is mykv.Average else 1).astype(dtype)
    function = {mykv.Min: np.minimum, mykv.Max: np.maximum, mykv.Product: np.multiply}[op]
    wide = "float64" if dtype.kind == "f" else dtype
    first = [_scaled(value, before).astype(wide) for value in values]
    return _scaled(function.reduce(first, dtype=wide), after).astype(dtype)


def _scaled(value: np.ndarray, factor: float, divisor: int = 1) -> np.ndarray:
    if factor == 1 and divisor == 1:
        return value
    scaled = value.astype("float64") * factor / divisor
    if value.dtype.kind == "f":
        return scaled
    limits = np.iinfo(value.dtype)
    return np.clip(np.trunc(scaled), limits.min, limits.max).astype(value.dtype)


def own_rows(whole: np.ndarray, rank: int, size: int) -> np.ndarray:
    """A rank's rows after a reducescatter."""
    return np.array_split(whole, size)[rank]


def assert_equal(result: np.ndarray, expected: np.ndarray) -> None:
    """Check for the same dtype and shape, and equal values up to the dtype's rounding."""
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    tolerance = _TOLERANCE.get(str(expected.dtype), 0)
    np.testing.assert_allclose(result.astype("float64"), expected.astype("float64"), rtol=tolerance, atol=0)
