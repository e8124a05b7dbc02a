"""MyKV.broadcast: the bits of rank 0's value on every rank."""

from __future__ import annotations

import time

import hypothesis
import numpy as np
import pytest
from harness.support import BFLOAT16, DTYPES, array, mx, numbers, value
from hypothesis import strategies
from hypothesis.extra import numpy as arrays_of


@pytest.fixture
def store():
    return mx.kv.create("mykv")


@pytest.mark.smoke
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["nd", "np"])
def test_bits_of_rank_0_arrive_for_every_dtype(store, rank, kind, dtype):
    values = [numbers(k, (3, 1001), dtype) for k in (0, rank)]
    mine, out = array(values[1], kind), array(np.zeros((3, 1001), dtype), kind)
    store.broadcast("key", mine, out)
    np.testing.assert_array_equal(value(out), values[0])
    np.testing.assert_array_equal(value(mine), values[1])


@pytest.mark.ranks(4, env={"MYKV_VIRTUAL_HOSTS": "2"})
def test_over_two_hosts(store, rank):
    out = array(np.zeros(100_000))
    store.broadcast("key", array(numbers(rank, (100_000,), "float64")), out)
    np.testing.assert_array_equal(value(out), numbers(0, (100_000,), "float64"))


@pytest.mark.ranks(2)
def test_bfloat16(store, rank):
    mine = mx.nd.array(numbers(rank, (1000,))).astype(BFLOAT16)
    store.broadcast("brain", mine, None)
    np.testing.assert_array_equal(mine.astype("float32").asnumpy(), numbers(0, (1000,)))


@pytest.mark.ranks(2)
def test_out_none_means_into_value(store, rank):
    for arguments in ((), (None,)):
        mine = array(np.full(5, rank + 1.0))
        store.broadcast("inplace", mine, *arguments)
        assert (value(mine) == 1).all()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_nan_of_another_rank_never_leaks_in(store, rank, dtype):
    special = np.full(100, np.nan if rank else 1.5, dtype)
    out = array(np.full(100, np.nan, dtype))
    store.broadcast("leak", array(special), out)
    assert (value(out) == 1.5).all()


@pytest.mark.ranks(2)
def test_every_bit_is_kept(store, rank):
    bits = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000001], dtype="uint32")
    mine = array((bits if rank == 0 else bits * 0).view("float32"))
    store.broadcast("bits", mine)
    np.testing.assert_array_equal(value(mine).view("uint32"), bits)


@pytest.mark.ranks(2)
def test_value_is_nowhere_changed(store, rank):
    mine, out = array(np.full(5, rank + 1.0)), array(np.zeros(5))
    store.broadcast("kept", mine, out)
    assert (value(out) == 1).all() and (value(mine) == rank + 1).all()


@pytest.mark.ranks(2)
def test_value_in_its_own_out_as_the_trainer_passes_it(store, rank):
    arrays = [array(np.full(5, 10.0 * rank + k), None, mx.cpu(k)) for k in range(3)]
    store.broadcast("trainer", arrays[0], arrays)
    for inout in arrays:
        assert (value(inout) == 0).all()


@pytest.mark.ranks(2)
def test_out_of_several_devices(store, rank):
    outs = [array(np.zeros(5), None, mx.cpu(k)) for k in range(3)]
    store.broadcast("devices", array(np.full(5, rank + 1.0)), outs)
    assert all((value(out) == 1).all() for out in outs)


@pytest.mark.ranks(2)
def test_list_of_keys(store, rank):
    values = [array(np.full(4, rank + 1.0)), array(np.full((2, 2), rank + 10.0))]
    outs = [array(np.zeros(4)), [array(np.zeros((2, 2))) for _ in range(2)]]
    store.broadcast(["a", 7], values, outs)
    assert (value(outs[0]) == 1).all() and all((value(out) == 10).all() for out in outs[1])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (2, 3, 4)])
@pytest.mark.parametrize("kind", ["nd", "np"])
def test_every_shape(store, rank, kind, shape):
    with mx.util.np_shape(True):
        mine = array(numbers(rank, shape), kind)
        store.broadcast("shape", mine)
        assert mine.shape == shape
        np.testing.assert_array_equal(value(mine), numbers(0, shape))


@pytest.mark.ranks(2)
def test_large_array_and_return_at_once(store, rank, gather):
    mine = mx.nd.full((25 << 20,), rank + 1.0)  # 100 MB
    mine.wait_to_read()
    seconds = []
    for _ in range(5):
        gather("both are ready")
        begin = time.perf_counter()
        store.broadcast("large", mine)
        seconds.append(time.perf_counter() - begin)
        mine.wait_to_read()
    assert min(seconds) < 1e-3, seconds  # other work may delay some
    assert (mine.asnumpy() == 1).all()


@pytest.mark.ranks(2)
def test_key_is_shared_with_pushpull_in_the_order_of_calls(store, rank):
    inout = array(np.full(5, rank + 1.0))
    store.broadcast("both", inout)
    store.pushpull("both", inout)
    store.broadcast("both", inout)
    assert (value(inout) == 2).all()


@pytest.mark.ranks(2)
def test_weights_in_a_layout_of_their_own(store, rank):
    """oneDNN leaves the output of a convolution in a blocked layout."""
    rng = np.random.RandomState(0)
    data, weight = mx.nd.array(rng.randn(2, 16, 12, 12)), mx.nd.array(rng.randn(16, 16, 3, 3))
    outputs = [mx.nd.Convolution(data * (k + 1), weight, kernel=(3, 3), num_filter=16, no_bias=True) for k in range(2)]
    expected = mx.nd.Convolution(data, weight, kernel=(3, 3), num_filter=16, no_bias=True).asnumpy()
    store.broadcast("blocked", outputs[rank])
    np.testing.assert_array_equal(outputs[rank].asnumpy(), expected)


@pytest.mark.ranks(3, long=(2,))
@hypothesis.settings(max_examples=40)
@hypothesis.given(
    values=arrays_of.arrays(
        strategies.sampled_from(DTYPES), arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=20)
    ),
    key=strategies.one_of(strategies.integers(), strategies.text(max_size=3)),
    kind=strategies.sampled_from(["nd", "np"]),
    outs=strategies.one_of(strategies.none(), strategies.integers(1, 3)),
)
def test_any_array_arrives_bit_for_bit(rank, size, values, key, kind, outs):
    store = mx.kv.create("mykv")
    with mx.util.np_shape(True):
        mine = array(values if rank == 0 else np.zeros_like(values), kind)
        targets = None if outs is None else [array(np.ones_like(values), kind, mx.cpu(d)) for d in range(outs)]
        store.broadcast(key, mine, targets)
        for target in targets or [mine]:
            assert value(target).tobytes() == values.tobytes()
