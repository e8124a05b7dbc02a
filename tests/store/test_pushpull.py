"""MyKV.pushpull: the sum over all workers and devices, of any dtype, shape and kind of array."""

from __future__ import annotations

import time

import hypothesis
import numpy as np
import pytest
from harness.support import BFLOAT16, DTYPES, array, mx, numbers, total, value
from hypothesis import strategies
from hypothesis.extra import numpy as arrays_of

_TWO_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2"}


@pytest.fixture
def store():
    return mx.kv.create("mykv")


@pytest.fixture(params=["nd", "np"])
def kind(request):
    """mx.nd or mx.np arrays; shapes without elements need MXNet's numpy semantics in both."""
    with mx.util.np_shape(True):
        yield request.param


@pytest.mark.smoke
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_every_dtype(store, rank, size, kind, dtype):
    mine = array(numbers(rank, (3, 1001), dtype), kind)
    out = array(np.zeros((3, 1001), dtype), kind)
    store.pushpull(3, mine, out)
    np.testing.assert_array_equal(value(out), total(size, (3, 1001), dtype))
    assert out.dtype == mine.dtype and type(out) is type(mine)
    np.testing.assert_array_equal(value(mine), numbers(rank, (3, 1001), dtype))


@pytest.mark.ranks(3, long=(2,))
def test_sum_of_bfloat16(store, rank, size):
    mine = mx.nd.array(numbers(rank, (1000,))).astype(BFLOAT16)
    store.pushpull("brain", mine)
    np.testing.assert_array_equal(mine.astype("float32").asnumpy(), total(size, (1000,)))


@pytest.mark.ranks(2, 4, env=_TWO_HOSTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_over_two_hosts(store, rank, size, dtype):
    mine = array(numbers(rank, (3, 1001), dtype), "np")
    store.pushpull(3, mine)
    np.testing.assert_array_equal(value(mine), total(size, (3, 1001), dtype))


@pytest.mark.ranks(3)
def test_float16_is_summed_in_float32(store, rank):
    mine = array(np.array([2048 if rank == 0 else 1], dtype="float16"))
    store.pushpull("half", mine)
    assert value(mine)[0] == 2050  # 2048 + 1 is 2048 in float16


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (7,), (2, 3, 4, 5)])
def test_every_shape(store, rank, size, kind, shape):
    mine = array(numbers(rank, shape), kind)
    store.pushpull("shape", mine)
    assert mine.shape == shape
    np.testing.assert_array_equal(value(mine), total(size, shape))


@pytest.mark.ranks(3, long=(2,))
def test_array_larger_than_the_memory_for_parts(store, rank, size):
    shape = ((20 << 20) + 17,)  # 80 MB
    mine = mx.nd.full(shape, rank + 1.0)
    mine[-1] = 10.0 * rank
    store.pushpull("large", mine)
    result = mine.asnumpy()
    assert (result[:-1] == size * (size + 1) / 2).all()
    assert result[-1] == 10 * size * (size - 1) / 2


@pytest.mark.ranks(2)
def test_devices_of_a_list_are_summed_and_all_outs_written(store, rank, kind):
    values = [array(np.full(5, 10.0 * rank + k), kind, mx.cpu(k)) for k in range(3)]
    outs = [array(np.zeros(5), kind, mx.cpu(k)) for k in range(3)]
    store.pushpull("devices", values, outs)
    for out in outs:
        assert (value(out) == 0 + 1 + 2 + 10 + 11 + 12).all()
    assert (value(values[2]) == 10 * rank + 2).all()
    store.pushpull("devices", values)
    for inout in values:
        assert (value(inout) == 36).all()
    assert [inout.context.device_id for inout in values] == [0, 1, 2]


@pytest.mark.ranks(2)
def test_list_of_one_and_array_are_the_same(store, rank):
    mine, out = array(np.full(5, rank + 1.0)), array(np.zeros(5))
    store.pushpull("one", [mine] if rank else mine, out if rank else [out])
    assert (value(out) == 3).all()


@pytest.mark.ranks(2)
def test_numbers_of_devices_may_differ_between_ranks(store, rank):
    values = [array(np.ones(5)) for _ in range(1 + rank)]
    store.pushpull("uneven", values)
    assert all((value(inout) == 3).all() for inout in values)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("keys", [[3, 5], ["a", "b"], [3, "3"], (7, 8)])
def test_list_of_keys_with_a_list_of_values(store, rank, keys):
    values = [array(np.full(4, rank + 1.0)), array(np.full((2, 2), 10.0 * rank))]
    outs = [array(np.zeros(4)), array(np.zeros((2, 2)))]
    store.pushpull(keys, values, outs)
    assert (value(outs[0]) == 3).all() and (value(outs[1]) == 10).all()
    store.pushpull(keys, values)
    assert (value(values[0]) == 3).all() and (value(values[1]) == 10).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("keys", [2, 3])
def test_arrays_that_are_crossed_are_read_before_they_are_written(store, rank, keys):
    """The output of a key is the input of the next key."""
    arrays = [array(np.full(4, 10.0**k * (rank + 1))) for k in range(keys)]
    store.pushpull(list(range(keys)), arrays, arrays[1:] + arrays[:1])
    for k in range(keys):
        assert (value(arrays[(k + 1) % keys]) == 3 * 10.0**k).all()


@pytest.mark.ranks(2)
def test_list_of_keys_with_lists_of_devices(store, rank):
    values = [[array(np.full(3, rank + k + 10.0 * device)) for device in range(2)] for k in range(2)]
    store.pushpull(["x", "y"], values)
    for k in range(2):
        expected = sum(other + k + 10 * device for other in range(2) for device in range(2))
        assert all((value(inout) == expected).all() for inout in values[k])


@pytest.mark.ranks(2)
def test_list_of_keys_against_the_keys_one_by_one(store, rank):
    values = [array(np.full(4, rank + 1.0)) for _ in range(2)]
    if rank == 0:
        store.pushpull(["p", "q"], values)
    else:
        store.pushpull("q", values[1])
        store.pushpull("p", values[0])
    assert all((value(inout) == 3).all() for inout in values)


@pytest.mark.ranks(2)
def test_empty_list_of_keys_does_nothing(store):
    store.pushpull([], [])


@pytest.mark.ranks(2)
def test_int_and_str_keys_differ(store, rank):
    one, other = array(np.full(3, 1.0)), array(np.full(3, 10.0))
    for key, inout in ((3, one), ("3", other)) if rank else (("3", other), (3, one)):
        store.pushpull(key, inout)
    assert (value(one) == 2).all() and (value(other) == 20).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("key", ["", "with space", "sl/ash", "日本", -1, 2**40, True, np.int64(9)])
def test_unusual_keys(store, key):
    if isinstance(key, np.integer):
        key = int(key)
    inout = array(np.ones(3))
    store.pushpull(key, inout)
    assert (value(inout) == 2).all()


@pytest.mark.ranks(3, long=(2,))
def test_different_order_on_different_ranks_is_no_deadlock(store, rank, size):
    arrays = {k: array(np.full(50 * k + 1, float(k))) for k in range(60)}
    for k in np.random.RandomState(rank).permutation(60):
        store.pushpull(int(k), arrays[k], priority=int(k) if rank else -int(k))
    for k, inout in arrays.items():
        assert (value(inout) == size * k).all()


@pytest.mark.ranks(2)
def test_engine_orders_the_sum_between_what_writes_and_what_reads(store, rank):
    """No wait anywhere: each step of a chain depends on the one before."""
    x = mx.nd.full((1000, 100), rank + 1.0)
    for _ in range(20):
        x = x * 2
        store.pushpull("chain", x)  # (1 + 2) 2 = 6 after the first turn, then equal on both: times 4
        x = x + 0
    assert (x.asnumpy() == 6 * 4.0**19).all()


@pytest.mark.ranks(2)
def test_write_after_the_call_does_not_reach_the_sum(store, rank):
    mine, out = mx.nd.full((1 << 20,), 1.0), mx.nd.zeros((1 << 20,))
    store.pushpull("overwritten", mine, out)
    mine[:] = 100
    assert (out.asnumpy() == 2).all() and (mine.asnumpy() == 100).all()


@pytest.mark.ranks(2)
def test_call_returns_at_once(store, rank, gather):
    big = mx.nd.ones((25 << 20,))  # 100 MB
    small = mx.nd.ones((10,))
    for inout in (big, small):
        inout.wait_to_read()
        store.pushpull("warm", small)
        small.wait_to_read()
        seconds = []
        for _ in range(10):
            gather("both are ready")
            begin = time.perf_counter()
            store.pushpull("at once", inout)
            seconds.append(time.perf_counter() - begin)
            inout.wait_to_read()
        # Waiting for the sum would take many times as long, every time; but threads that compute it may hold the core.
        assert sorted(seconds)[2] < 1e-3, seconds


@pytest.mark.ranks(2)
def test_call_returns_while_the_peer_is_not_there_yet(store, rank, gather):
    inout = mx.nd.ones((1000,))
    if rank == 1:
        gather("rank 0 has returned and goes on")
    store.pushpull("alone", inout)
    if rank == 0:
        other = (mx.nd.ones((10,)) * 3).asnumpy()  # the engine is free for others meanwhile
        assert (other == 3).all()
        gather("rank 0 has returned and goes on")
    assert (inout.asnumpy() == 2).all()


@pytest.mark.ranks(2)
def test_arrays_may_be_dropped_after_the_call(store, rank):
    for _ in range(50):
        store.pushpull("dropped", mx.nd.ones((100_000,)))
    last = mx.nd.ones((10,))
    store.pushpull("last", last)
    mx.nd.waitall()
    assert (last.asnumpy() == 2).all()


@pytest.mark.ranks(2)
def test_output_of_a_convolution_in_a_layout_of_its_own(store, rank):
    """oneDNN leaves convolution outputs in a blocked layout, whose memory is not the array's values in order."""
    rng = np.random.RandomState(0)
    data, weight = mx.nd.array(rng.randn(2, 16, 12, 12)), mx.nd.array(rng.randn(16, 16, 3, 3))
    expected = mx.nd.Convolution(data, weight, kernel=(3, 3), num_filter=16, no_bias=True).asnumpy()
    for _ in range(3):
        out = mx.nd.Convolution(data * (rank + 1), weight, kernel=(3, 3), num_filter=16, no_bias=True)
        store.pushpull("blocked", out)
        np.testing.assert_allclose(out.asnumpy(), 3 * expected, rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(2)
def test_slice_and_reshape_share_memory_with_the_whole(store, rank):
    whole = mx.nd.arange(12) + rank
    store.pushpull("part", whole[4:8])
    expected = np.arange(12.0) + rank
    expected[4:8] = 2 * np.arange(4, 8) + 1
    np.testing.assert_array_equal(whole.asnumpy(), expected)


@pytest.mark.ranks(2)
def test_gradient_of_a_recorded_network(store, rank):
    x = mx.nd.ones((4,)) * (rank + 1)
    x.attach_grad()
    with mx.autograd.record():
        y = (x * x).sum()
    y.backward()
    store.pushpull("grad", x.grad)
    assert (x.grad.asnumpy() == 2 + 4).all()


@pytest.mark.ranks(2)
def test_nan_and_infinity_are_summed_as_numpy_does(store, rank):
    inf, nan = np.inf, np.nan
    mine = array(np.array([[1.0, inf, nan, inf, -0.0], [1.0, 1.0, 1.0, -inf, -0.0]][rank], dtype="float32"))
    store.pushpull("special", mine)
    np.testing.assert_array_equal(value(mine), np.array([2.0, inf, nan, nan, -0.0]))


@pytest.mark.ranks(3, long=(2,))
@hypothesis.settings(max_examples=60)
@hypothesis.given(data=strategies.data())
def test_any_calls_are_those_of_numpy(rank, size, data):
    """Any keys, dtypes, shapes, kinds of array and numbers of devices, pushed in any order on each rank."""
    store = mx.kv.create("mykv")
    key = strategies.one_of(strategies.integers(-3, 3), strategies.text(max_size=2))
    call = strategies.tuples(
        strategies.sampled_from(DTYPES),
        arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=30),
        strategies.sampled_from(["nd", "np"]),
        strategies.integers(1, 3),  # devices
        strategies.one_of(strategies.none(), strategies.integers(1, 3)),  # outs; None is in place
    )
    calls = data.draw(strategies.dictionaries(key, call, min_size=1, max_size=5))
    order = data.draw(strategies.permutations(list(calls)))
    results = {}
    with mx.util.np_shape(True):
        for k in order if rank % 2 else order[::-1]:
            dtype, shape, kind, devices, outs = calls[k]
            if outs is not None and 1 not in (devices, outs):
                outs = devices  # lists of several must be on the same ones
            values = [array(numbers(rank + 5 * d, shape, dtype), kind, mx.cpu(d)) for d in range(devices)]
            targets = values if outs is None else [array(np.zeros(shape, dtype), kind, mx.cpu(d)) for d in range(outs)]
            store.pushpull(k, values, None if outs is None else targets)
            results[k] = targets
        for k in order:
            dtype, shape, _, devices, _ = calls[k]
            expected = sum(
                numbers(other + 5 * d, shape, dtype).astype("float64") for other in range(size) for d in range(devices)
            )
            for target in results[k]:
                np.testing.assert_array_equal(value(target), np.asarray(expected).astype(dtype))
