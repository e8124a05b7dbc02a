"""The sum of squares equals 16 running sums in float64 bit for bit, on every instruction set of this CPU."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import testing

_SUMS = 16
_COUNTS = [0, 1, 15, 16, 17, 1000, 1024, 5003, 70001]


def _model(values: np.ndarray) -> float:
    """The sum for `values` in float64. Narrow types are widened and added up in blocks of 1024."""
    squares = values * values
    whole = len(values) - len(values) % _SUMS
    lanes = np.zeros(_SUMS)
    for row in squares[:whole].reshape(-1, _SUMS):
        lanes += row
    total = 0.0
    for one in [*lanes, *squares[whole:]]:
        total += one
    return total


@pytest.fixture(params=["avx512", "avx2", "generic"])
def path(request):
    best = testing.kernel_path()
    if not testing.select_kernel_path(request.param):
        pytest.skip(f"this CPU does not run {request.param}")
    yield request.param
    assert testing.select_kernel_path(best)


@pytest.mark.parametrize("count", _COUNTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_values(path, dtype, count):
    values = np.random.RandomState(count).randn(count + 3).astype(dtype)[3:]  # not aligned to a vector
    assert testing.sum_of_squares(dtype, values) == _model(values.astype("float64"))


@pytest.mark.parametrize("count", _COUNTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_values(path, dtype, count):
    wide = np.random.RandomState(count).randn(count).astype("float32")
    if dtype == "float16":
        values = wide.astype("float16")
        widened = values.astype("float64")
    else:
        values = (wide.view("uint32") >> 16).astype("uint16")
        widened = (values.astype("uint32") << 16).view("float32").astype("float64")
    expected = 0.0
    for begin in range(0, count, 1024):
        expected += _model(widened[begin : begin + 1024])
    assert testing.sum_of_squares(dtype, values) == expected


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 40, 1000])
def test_infinity_and_nan_are_in_the_sum(path, wrong, at):
    values = np.ones(1001, "float32")
    values[at] = wrong
    total = testing.sum_of_squares("float32", values)
    assert np.isnan(total) if np.isnan(wrong) else total == np.inf


def test_subnormal_numbers_count(path):
    values = np.full(64, 1e-40, "float32")
    assert testing.sum_of_squares("float32", values) == _model(values.astype("float64")) > 0
