"""Every instruction set of this CPU gives the same bits as numpy, for any count, alignment and values."""

from __future__ import annotations

import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

_ENV = {"MYKV_TEST_POOL": "numpy"}  # the ranks of test_core_numpy.py, which never import MXNet
_INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
_DTYPES = ["float16", "bfloat16", "float32", "float64", *_INTEGERS, "bool"]
_OPS = ["sum", "min", "max", "product"]
_COUNTS = [1, 2, 7, 31, 33, 129, 1025, 5003]  # around vectors and blocks of vectors of 16 to 64 bytes, and beyond 2 KB
_BUFFER_BYTES = 64 << 10


@pytest.fixture(scope="module")
def core():
    """The core, initialized over all ranks."""
    from compiled import core
    from mpi4py import MPI

    if not core.is_initialized():
        core.init(MPI.COMM_WORLD.py2f(), {})
    yield core
    assert "mxnet" not in sys.modules


@pytest.fixture(scope="module")
def buffer(core):
    """Memory in the segment, in which buckets begin at any item."""
    return core.allocate(_BUFFER_BYTES)


@pytest.fixture
def paths(core, gather):
    """Every kernel path that runs here, each selected on all ranks before it is yielded."""
    best = core.kernel_path()

    def each():
        for path in core.build_info()["kernels"]:
            if all(gather(core.select_kernel_path(path))):
                yield path
                gather("done")  # the other ranks may still reduce a part for this one

    yield each
    assert core.select_kernel_path(best)
    gather("as it was")


def _item(dtype: str) -> np.dtype:
    """The numpy dtype that holds elements; numpy has no bfloat16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def _canonical_nan(dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return np.uint16(0x7FC0)
    bits = {"float16": 0x7E00, "float32": 0x7FC00000, "float64": 0x7FF8000000000000}[dtype]
    return np.array(bits, f"uint{8 * _item(dtype).itemsize}").view(dtype)


def _widened(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values in the type in which the kernels accumulate."""
    if dtype == "bfloat16":
        return (values.astype("uint32") << 16).view("float32")
    return values.astype("float32") if dtype == "float16" else values


def _narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """The result, rounded once, with the one NaN that all paths give."""
    if dtype == "bfloat16":
        bits = values.view("uint32")
        result = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype("uint16")
    else:
        result = values.astype(dtype)
    return np.where(np.isnan(values), _canonical_nan(dtype), result).astype(_item(dtype))


def _scaled(values: np.ndarray, dtype: str, scale: float) -> np.ndarray:
    if dtype not in _INTEGERS:
        return values * values.dtype.type(scale)
    if scale == 1:
        return values
    limits = np.iinfo(dtype)
    products = [float(value) * scale for value in values.tolist()]
    bounded = [0 if p != p else p if abs(p) == np.inf else int(p) for p in products]
    return np.array([max(limits.min, min(limits.max, p)) for p in bounded], dtype)


def _expected(dtype: str, op: str, inputs: list[np.ndarray], scale: float = 1.0) -> np.ndarray:
    """The specification of csrc/kernels/kernels.h, in numpy."""
    if len(inputs) == 1 and (scale == 1 or dtype == "bool"):
        return inputs[0]
    if dtype == "bool":
        true = [values.view("uint8") != 0 for values in inputs]
        return np.any(true, axis=0) if op in ("sum", "max") else np.all(true, axis=0)
    with np.errstate(all="ignore"):
        total, *others = [_widened(values, dtype) for values in inputs]
        for other in others:
            if op in ("sum", "product"):
                total = total + other if op == "sum" else total * other
            else:
                worse = other < total if op == "min" else other > total
                total = np.where(worse | (other != other), other, total)  # of equals the earlier, and NaN wins
        total = _scaled(total, dtype, scale)
        return total if dtype in _INTEGERS else _narrowed(total, dtype)


def _random_bits(rng: np.random.RandomState, dtype: str, count: int) -> np.ndarray:
    """Elements of any bits: subnormals, infinities, NaNs of any payload, integers that overflow; bools of any byte."""
    return np.frombuffer(rng.bytes(count * _item(dtype).itemsize), _item(dtype)).copy()


def _moderate(rng: np.random.RandomState, dtype: str, count: int) -> np.ndarray:
    """Floats of magnitudes near one, in a sum of which every rounding shows."""
    values = rng.standard_normal(count).astype("float32")
    if dtype == "bfloat16":
        return (values.view("uint32") >> 16).astype("uint16")
    return (values * 100).astype("int64" if dtype in _INTEGERS else dtype).astype(dtype)


def _special(rng: np.random.RandomState, dtype: str, count: int) -> np.ndarray:
    """Zeros of both signs, infinities, NaN and the largest finite numbers, or the ends of the integers' range."""
    if dtype == "bfloat16":
        values = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F7F, 0xFF7F, 0x0001, 0x3F80], "uint16")
    elif dtype in _INTEGERS:
        limits = np.iinfo(dtype)
        values = np.array([limits.min, limits.max, limits.min + 1, limits.max - 1, 0, 1, limits.max // 3], dtype)
    elif dtype == "bool":
        values = np.array([0, 1, 2, 128, 255], "uint8").view("bool")
    else:
        limits = np.finfo(dtype)
        values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, limits.max, -limits.max, limits.tiny, 1.0], dtype)
    return values[rng.randint(len(values), size=count)]


_KINDS = {"bits": _random_bits, "moderate": _moderate, "special": _special}


def _values(kind: str, rank: int, dtype: str, count: int) -> np.ndarray:
    return _KINDS[kind](np.random.RandomState(100 * rank + count % 97), dtype, count)


def _reduce_in_place(core, buffer, name, inputs, rank, dtype, op, begin, scale) -> np.ndarray:
    """Reduce this rank's input as elements [begin, ...) of the buffer; the surrounding memory must not change."""
    count = len(inputs[rank])
    memory = np.frombuffer(buffer, "uint8")
    room = memory[: (begin + count + 70) * _item(dtype).itemsize]
    room[:] = 0xA5
    elements = room.view(_item(dtype))
    elements[begin : begin + count].view("uint8")[:] = inputs[rank].view("uint8")
    assert core.submit_bucket(name, buffer, begin, count, dtype, "", op, scale).wait(30)
    result = elements[begin : begin + count].copy()
    elements[begin : begin + count].view("uint8")[:] = 0xA5
    assert (room == 0xA5).all(), "bytes beside the bucket were written"
    return result


def _assert_same_bits(result: np.ndarray, expected: np.ndarray, what: str) -> None:
    if result.tobytes() != np.ascontiguousarray(expected).tobytes():
        unsigned = f"uint{8 * result.itemsize}"
        wrong = np.flatnonzero(result.view(unsigned) != np.ascontiguousarray(expected).view(unsigned))
        first = wrong[0]
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(result)} differ, at {first} {result[first]} instead of {expected[first]}"
        )


@pytest.mark.ranks(2, long=(1, 3), env=_ENV)
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_reductions_in_place_have_the_bits_of_numpy_on_every_path(core, buffer, paths, rank, size, dtype, kind):
    """The arrays of all ranks are inputs and outputs at once."""
    seen = []
    for path in paths():
        seen.append(path)
        for count in _COUNTS:
            inputs = [_values(kind, other, dtype, count) for other in range(size)]
            for begin in (0, 1, 5):
                for op in _OPS:
                    what = f"{path} {dtype} {op} of {count} from {begin}"
                    result = _reduce_in_place(core, buffer, "in place", inputs, rank, dtype, op, begin, 1.0)
                    _assert_same_bits(result, _expected(dtype, op, inputs), what)
    assert "generic" in seen


@pytest.mark.ranks(2, long=(1,), env=_ENV)
@pytest.mark.parametrize("scale", [1 / 3, -2.0, 0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_scaled_reductions_have_the_bits_of_numpy_on_every_path(core, buffer, paths, rank, size, dtype, scale):
    name = f"scaled by {scale}"
    for path in paths():
        for kind in _KINDS:
            for count in (1, 33, 1025):
                inputs = [_values(kind, other, dtype, count) for other in range(size)]
                for op in ("sum", "max"):
                    result = _reduce_in_place(core, buffer, name, inputs, rank, dtype, op, 3, scale)
                    _assert_same_bits(
                        result, _expected(dtype, op, inputs, scale), f"{path} {dtype} {op} {kind} {count}"
                    )


@pytest.mark.ranks(1, env=_ENV)
@pytest.mark.parametrize("n_inputs", [1, 2, 3])
@pytest.mark.parametrize("dtype", [dtype for dtype in _DTYPES if dtype != "bfloat16"])
def test_replicas_at_any_item_have_the_bits_of_numpy_on_every_path(core, paths, dtype, n_inputs):
    """Inputs that lie apart by any number of items are read where they are and summed into another place."""
    for path in paths():
        for kind in _KINDS:
            for count in _COUNTS:
                inputs = []
                for number in range(n_inputs):
                    room = np.empty(count + 2 * number + 1, _item(dtype))  # begins at item 1, 3, 5 of its memory
                    inputs.append(room[2 * number + 1 :])
                    inputs[-1].view("uint8")[:] = _values(kind, number, dtype, count).view("uint8")
                kept = [values.copy() for values in inputs]
                for op in _OPS:
                    result = np.empty(count + 1, _item(dtype))[1:]
                    assert core.submit_allreduce("replicas", inputs, [result], op).wait(30)
                    _assert_same_bits(result, _expected(dtype, op, inputs), f"{path} {dtype} {op} {kind} {count}")
                for values, before in zip(inputs, kept):
                    assert values.tobytes() == before.tobytes()
                assert core.submit_allreduce("replicas", inputs, inputs[-1:]).wait(30)
                _assert_same_bits(inputs[-1], _expected(dtype, "sum", kept), f"{path} {dtype} in place {kind} {count}")


@pytest.mark.ranks(2, 3, env=_ENV)
def test_half_precision_is_accumulated_in_float32_and_rounded_once(core, buffer, paths, rank, size):
    inputs = [np.array([2048, 1, 65504, 6e-8], "float16") if r == 0 else np.ones(4, "float16") for r in range(size)]
    exact = np.sum([values.astype("float64") for values in inputs], axis=0)
    for path in paths():
        result = _reduce_in_place(core, buffer, "half", inputs, rank, "float16", "sum", 0, 1.0)
        _assert_same_bits(result, exact.astype("float16"), path)
    if size == 3:
        assert exact[0] == 2050 and np.float16(2048) + np.float16(1) + np.float16(1) == 2048


@pytest.mark.ranks(2, env=_ENV)
def test_an_integer_sum_wraps_around_and_a_scaled_one_stays_within_its_range(core, buffer, paths, rank, size):
    inputs = [np.full(100, 100, "int8")] * 2
    for _ in paths():
        wrapped = _reduce_in_place(core, buffer, "wraps", inputs, rank, "int8", "sum", 1, 1.0)
        assert (wrapped == 200 - 256).all()
        third = _reduce_in_place(core, buffer, "thirds", [np.full(100, 1, "int8")] * 2, rank, "int8", "sum", 1, 0.5)
        assert (third == 1).all()
        bounded = _reduce_in_place(core, buffer, "bounded", [np.full(9, 50, "int8")] * 2, rank, "int8", "sum", 1, 2.0)
        assert (bounded == 127).all()


@pytest.mark.ranks(2, env=_ENV)
def test_nan_wins_and_zeros_keep_the_sign_of_the_lower_rank(core, buffer, paths, rank):
    inputs = [np.array([np.nan, 1, -0.0, 0.0, np.inf]), np.array([1, np.nan, 0.0, -0.0, -np.inf])]
    for _ in paths():
        smallest = _reduce_in_place(core, buffer, "least", inputs, rank, "float64", "min", 1, 1.0)
        largest = _reduce_in_place(core, buffer, "most", inputs, rank, "float64", "max", 1, 1.0)
        np.testing.assert_array_equal(smallest, np.minimum(*inputs))
        np.testing.assert_array_equal(largest, np.maximum(*inputs))
        for result in (smallest, largest):
            assert np.signbit(result[2]) and not np.signbit(result[3])
        total = _reduce_in_place(core, buffer, "total", inputs, rank, "float64", "sum", 1, 1.0)
        assert np.isnan(total[[0, 1, 4]]).all() and not np.signbit(total[2:4]).any()


@pytest.mark.ranks(1, 2, env=_ENV)
@hypothesis.settings(max_examples=80)
@hypothesis.given(
    dtype=strategies.sampled_from(_DTYPES),
    op=strategies.sampled_from(_OPS),
    count=strategies.integers(1, 700),
    begin=strategies.integers(0, 40),
    scale=strategies.one_of(strategies.just(1.0), strategies.floats(width=32)),
    seed=strategies.integers(0, 999),
)
def test_any_reduction_has_the_bits_of_numpy_on_every_path(
    core, buffer, paths, rank, size, dtype, op, count, begin, scale, seed
):
    inputs = [_random_bits(np.random.RandomState(seed + other), dtype, count) for other in range(size)]
    for path in paths():
        result = _reduce_in_place(core, buffer, "any", inputs, rank, dtype, op, begin, scale)
        _assert_same_bits(result, _expected(dtype, op, inputs, scale), path)


@pytest.mark.ranks(1, env=_ENV)
def test_a_path_that_is_not_there_is_not_selected(core):
    before = core.kernel_path()
    assert core.select_kernel_path("abacus") is False
    assert core.kernel_path() == before and before in core.build_info()["kernels"]


def test_the_setting_of_the_last_init_selects_the_path(mpirun):
    script = """
    import os
    import kvstore_plugin as mykv
    from compiled import core

    best = core.kernel_path()
    for setting, expected in (("generic", "generic"), ("best", best), ("generic", "generic"), (None, best)):
        os.environ.pop("MYKV_KERNELS", None)
        if setting is not None:
            os.environ["MYKV_KERNELS"] = setting
        mykv.init()
        assert core.kernel_path() == expected, (setting, core.kernel_path())
        mykv.shutdown()
    print("selected")
    """
    result = mpirun(2, script)
    assert result.code == 0 and result.stdout.count("selected") == 2, result.text


@pytest.mark.long
def test_a_setting_that_is_no_path_is_refused(mpirun):
    result = mpirun(2, "import kvstore_plugin as mykv\nmykv.init()", env={"MYKV_KERNELS": "abacus"})
    sentence = "ValueError: MYKV_KERNELS must be one of best, avx512, avx2, generic, but it is 'abacus'."
    assert result.code != 0 and sentence in result.stderr, result.text


def test_a_path_that_this_processor_lacks_is_an_error_that_says_what_there_is():
    class Core:
        def select_kernel_path(self, name):
            return False

        def build_info(self):
            return {"kernels": ["avx2", "generic"]}

    from kvstore_plugin.world import process

    with pytest.raises(ValueError, match=r"^MYKV_KERNELS is 'avx512', .*\(it was built with avx2, generic\)"):
        process._select_kernels(Core(), "avx512")
