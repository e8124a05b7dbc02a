"""The collective operations one by one: any dtype and shape, both kinds of array, and Horovod's semantics."""

from __future__ import annotations

import gc
import inspect

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.collectives_model import assert_equal, own_rows, reduced
from harness.support import BFLOAT16, DTYPES, array, mx, numbers, value
from mxnet import autograd

_TWO_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2"}
_NAIVE = {"MXNET_ENGINE_TYPE": "NaiveEngine"}
_OPS = [mykv.Average, mykv.Sum, mykv.Min, mykv.Max, mykv.Product]


@pytest.fixture(autouse=True)
def initialized():
    mykv.init()


@pytest.fixture(params=["nd", "np"])
def kind(request):
    """mx.nd or mx.np arrays; shapes without elements need MXNet's numpy semantics in both."""
    with mx.util.np_shape(True):
        yield request.param


def _everyones(size, shape, dtype):
    return [numbers(rank, shape, dtype) for rank in range(size)]


@pytest.mark.smoke
@pytest.mark.ranks(1, 2, 3, long=(4,))
@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_of_every_dtype_with_every_operator(rank, size, kind, dtype):
    values = _everyones(size, (3, 501), dtype)
    for op in _OPS if dtype != "bool" else _OPS[1:]:
        mine = array(values[rank], kind)
        result = mykv.allreduce(mine, op=op, name="x")
        assert_equal(value(result), reduced(op, values))
        assert type(result) is type(mine) and result is not mine
        np.testing.assert_array_equal(value(mine), values[rank])
        assert mykv.allreduce_(mine, op=op) is mine
        assert_equal(value(mine), reduced(op, values))


@pytest.mark.ranks(4, long=(2,), env=_TWO_HOSTS)
@pytest.mark.parametrize("op", _OPS, ids=str)
def test_allreduce_over_two_hosts(rank, size, op):
    values = _everyones(size, (3, 501), "float32")
    assert_equal(value(mykv.allreduce(array(values[rank]), op=op)), reduced(op, values))


@pytest.mark.ranks(2)
def test_bfloat16(rank, size, kind):
    mine = mx.nd.array(numbers(rank, (100,))).astype(BFLOAT16)
    mine = mine.as_np_ndarray() if kind == "np" else mine
    results = [
        mykv.allreduce(mine, op=mykv.Sum),
        mykv.broadcast(mine, 1),
        mykv.allgather(mine),
        mykv.alltoall(mine),
        mykv.reducescatter(mine, op=mykv.Max),
    ]
    a, b = numbers(0, (100,)), numbers(1, (100,))
    both = np.concatenate([a, b])
    expected = [a + b, b, both, both.reshape(4, 50)[rank::2].reshape(-1), own_rows(np.maximum(a, b), rank, size)]
    for result, right in zip(results, expected):
        assert type(result) is type(mine) and result.as_nd_ndarray().dtype == BFLOAT16
        np.testing.assert_array_equal(result.as_nd_ndarray().astype("float32").asnumpy(), right)


@pytest.mark.ranks(1, 2)
def test_average_is_what_one_gets_without_average_and_op(rank, size):
    mine = array(np.full(3, rank + 1.0))
    mean = (size + 1) / 2
    for result in (
        mykv.allreduce(mine),
        mykv.allreduce(mine, True),
        mykv.allreduce(mine, op=mykv.Average),
        mykv.grouped_allreduce([mine])[0],
        mykv.reducescatter(array(np.full((3 * size), rank + 1.0))),
        mykv.grouped_reducescatter([array(np.full((3 * size), rank + 1.0))])[0],
    ):
        assert (value(result) == mean).all()
    for result in (mykv.allreduce(mine, False), mykv.allreduce(mine, average=False), mykv.allreduce(mine, op=mykv.Sum)):
        assert (value(result) == mean * size).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("call", [mykv.allreduce, mykv.allreduce_])
def test_op_and_average_exclude_each_other(average, call):
    with pytest.raises(ValueError, match="op is Sum and average is"):
        call(array(np.ones(3)), average=average, op=mykv.Sum)


@pytest.mark.ranks(3)
def test_averages_of_integers_are_exact_and_rounded_toward_zero(rank, size):
    """3 * (1. / 3) is 1 in floating point, 49 * (1. / 49) is not; and what is larger than 2**24 is no float32."""
    sums = np.array([0, 1, 2, 3, 4, 5, 3 * 49, 3 * 10**9 + 3, -1, -2, -3, -4, 3 * (2**49 + 1)])
    mine = sums if rank == 1 else np.zeros_like(sums)
    expected = np.trunc(sums / 3).astype("int64")
    np.testing.assert_array_equal(value(mykv.allreduce(array(mine))), expected)
    grouped = mykv.grouped_allreduce([array(mine), array(np.full(2, rank, "float32"))])
    np.testing.assert_array_equal(value(grouped[0]), expected)
    np.testing.assert_array_equal(value(grouped[1]), np.ones(2, "float32"))


def test_averages_of_integers_are_exact_on_any_number_of_ranks():
    from kvstore_plugin.collectives import reduce_ops

    for size in range(1, 300):
        scale = reduce_ops.plan(mykv.Average, [array(np.ones(1, "int64"))], 1, 1, size).scale
        sums = np.arange(-100, 100) * size
        for offset in (0, 1, -1):
            around = np.concatenate([sums, sums + 2**48 // size * size]) + offset
            np.testing.assert_array_equal(np.trunc(around * scale), [int(s / size) for s in around.tolist()])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", _OPS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("before, after", [(0.5, 1), (1, 0.5), (3, 0.25), (-2, 1)])
def test_factors(rank, size, op, dtype, before, after):
    values = _everyones(size, (7, 3), dtype)
    expected = reduced(op, values, before, after)
    mine = array(values[rank])
    result = mykv.allreduce(mine, op=op, prescale_factor=before, postscale_factor=after)
    grouped = mykv.grouped_allreduce([mine, mine], op=op, prescale_factor=before, postscale_factor=after)
    rows = mykv.reducescatter(mine, op=op, prescale_factor=before, postscale_factor=after)
    for one in (result, *grouped):
        assert_equal(value(one), expected)
    assert_equal(value(rows), own_rows(expected, rank, size))
    np.testing.assert_array_equal(value(mine), values[rank])
    assert_equal(value(mykv.allreduce_(mine, op=op, prescale_factor=before, postscale_factor=after)), expected)


@pytest.mark.ranks(2, 3, env=_TWO_HOSTS)
def test_each_ranks_integers_are_scaled_and_truncated_before_the_sum(rank, size, kind):
    """As Horovod does. 1, 3 and 5 times 0.5 on two ranks are 0, 2 and 4; their sums times 0.5 would be 1, 3 and 5."""
    some = mykv.add_process_set(range(1, size))
    half = {"op": mykv.Sum, "prescale_factor": 0.5}
    for dtype in [one for one in DTYPES if "int" in one]:
        values = np.array([1, 3, 5], dtype)
        mine, floats = array(values, kind), array(values.astype("float32"), kind)
        expected = (np.array([0, 1, 2]) * size).astype(dtype)
        mixed = mykv.grouped_allreduce([mine, floats], **half)
        whole = [mykv.allreduce(mine, **half), *mykv.grouped_allreduce([mine, mine], **half), mixed[0]]
        whole += [mykv.allreduce_(array(values, kind), **half)]
        whole += mykv.grouped_allreduce_([array(values, kind), array(values, kind)], **half)
        for one in whole:
            assert_equal(value(one), expected)
        assert_equal(value(mixed[1]), np.array([0.5, 1.5, 2.5], "float32") * np.float32(size))
        for one in [mykv.reducescatter(mine, **half), *mykv.grouped_reducescatter([mine, mine], **half)]:
            assert_equal(value(one), own_rows(expected, rank, size))
        if some.included():
            assert_equal(value(mykv.allreduce(mine, process_set=some, **half)), expected // size * (size - 1))
        average = mykv.allreduce(mine, prescale_factor=1.5, postscale_factor=2)
        assert_equal(value(average), reduced(mykv.Average, [values] * size, 1.5, 2))
    mykv.remove_process_set(some)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (0, 3), (1,), (7,), (5, 3, 2)])
def test_every_shape(rank, size, kind, shape):
    values = _everyones(size, shape, "float32")
    total = reduced(mykv.Sum, values)
    mine = array(values[rank], kind)
    assert_equal(value(mykv.allreduce(mine, op=mykv.Sum)), total)
    assert_equal(value(mykv.broadcast(mine, 1)), values[1])
    assert_equal(value(mykv.grouped_allreduce([mine, mine], op=mykv.Sum)[1]), total)
    assert_equal(value(mykv.broadcast_(mine, 0)), values[0])
    mine = array(values[rank], kind)
    if shape:
        assert_equal(value(mykv.allgather(mine)), np.concatenate(values))
        assert_equal(value(mykv.reducescatter(mine, op=mykv.Sum)), own_rows(total, rank, size))
        assert_equal(value(mykv.grouped_reducescatter([mine], op=mykv.Sum)[0]), own_rows(total, rank, size))
        both = mykv.alltoall(mine, [0, shape[0]])
        assert_equal(value(both[0]), np.concatenate(values) if rank else values[0][:0])


@pytest.mark.ranks(3, long=(2,))
def test_large_arrays(rank, size):
    """Larger than one part: 40 MB."""
    count = (10 << 20) + 17
    mine = mx.nd.full((count,), rank + 1.0)
    total = size * (size + 1) / 2
    assert (mykv.allreduce(mine, op=mykv.Sum).asnumpy() == total).all()
    whole = mykv.allgather(mine).asnumpy().reshape(size, count)
    assert (whole == np.arange(1, size + 1)[:, None]).all()
    assert (mykv.reducescatter(mine, op=mykv.Sum).asnumpy() == total).all()
    assert (mykv.broadcast(mine, size - 1).asnumpy() == size).all()
    splits = [count - 5 * (size - 1)] + [5] * (size - 1)
    output, received = mykv.alltoall(mine, splits)
    assert received.asnumpy().tolist() == [splits[rank]] * size
    np.testing.assert_array_equal(output.asnumpy(), np.repeat(np.arange(1.0, size + 1), splits[rank]))


@pytest.mark.ranks(1, 2, 3)
def test_group_of_many_dtypes_is_one_operation(rank, size, kind):
    shapes = [(3, 2), (), (0, 4), (1001,), (2, 2, 2)]
    types = [dtype for dtype in DTYPES if dtype != "bool"]
    values = [
        [numbers(other + k, shapes[k % len(shapes)], types[k % len(types)]) for k in range(20)] for other in range(size)
    ]
    mine = [array(one, kind) for one in values[rank]]
    for result, every in zip(mykv.grouped_allreduce(mine, name="g"), zip(*values)):
        assert_equal(value(result), reduced(mykv.Average, list(every)))
    assert mykv.grouped_allreduce_(mine, name="g", op=mykv.Sum) is mine
    for result, every in zip(mine, zip(*values)):
        assert_equal(value(result), reduced(mykv.Sum, list(every)))


@pytest.mark.ranks(2)
def test_empty_group_is_nothing(rank):
    assert mykv.grouped_allreduce([]) == [] and mykv.grouped_allreduce_([], name="g") == []
    assert mykv.grouped_reducescatter([]) == [] and mykv.grouped_allgather([]) == []
    assert (value(mykv.allreduce(array(np.ones(3)), name="g")) == 1).all()


@pytest.mark.ranks(1, 2, 3)
def test_broadcast_from_every_root_keeps_every_bit(rank, size, kind):
    for root in range(size):
        bits = np.array([np.nan, -0.0, np.inf, 5e-324, root], "float64")
        mine = array(bits if rank == root else np.full(5, 7.0), kind)
        result = mykv.broadcast(mine, root, name="b")
        assert value(result).tobytes() == bits.tobytes() and type(result) is type(mine)
        assert value(mine).tobytes() == (bits if rank == root else np.full(5, 7.0)).tobytes()
        assert mykv.broadcast_(mine, root_rank=root) is mine
        assert value(mine).tobytes() == bits.tobytes()


@pytest.mark.ranks(1, 3, long=(2, 4))
@pytest.mark.parametrize("dtype", DTYPES)
def test_allgather_with_other_first_dimensions(rank, size, kind, dtype):
    values = [numbers(other, ((other * 2) % 5, 3), dtype) for other in range(size)]
    mine = array(values[rank], kind)
    result = mykv.allgather(mine, name="x")
    assert_equal(value(result), np.concatenate(values))
    assert type(result) is type(mine)


@pytest.mark.ranks(2, 4, env=_TWO_HOSTS)
def test_waiting_operations_over_two_hosts(rank, size):
    values = [numbers(other, (other + 1, 3)) for other in range(size)]
    assert_equal(value(mykv.allgather(array(values[rank]))), np.concatenate(values))
    output, received = mykv.alltoall(array(values[rank]), [rank + 1] + [0] * (size - 1))
    assert_equal(value(output), np.concatenate(values) if rank == 0 else values[0][:0])
    assert value(received).tolist() == ([other + 1 for other in range(size)] if rank == 0 else [0] * size)
    assert_equal(
        value(mykv.reducescatter(array(np.ones((5, 2))), op=mykv.Sum)),
        own_rows(np.full((5, 2), size * 1.0), rank, size),
    )
    mykv.barrier()


@pytest.mark.ranks(3, long=(2,))
def test_allgather_where_some_or_all_have_no_rows(rank, size, kind):
    assert value(mykv.allgather(array(np.zeros((0, 2, 3)), kind))).shape == (0, 2, 3)
    mine = np.full((5 if rank == 1 else 0, 2), rank, "float32")
    np.testing.assert_array_equal(value(mykv.allgather(array(mine, kind))), np.ones((5, 2)))


@pytest.mark.ranks(1, 2, 3)
def test_grouped_allgather(rank, size, kind):
    values = [[numbers(other, (other + 1, 2)), numbers(other, (2 - other % 2,), "int32")] for other in range(size)]
    results = mykv.grouped_allgather([array(one, kind) for one in values[rank]], name="g")
    for result, every in zip(results, zip(*values)):
        assert_equal(value(result), np.concatenate(every))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("given", ["nd", "np", "list", "tuple", "numpy"])
def test_alltoall_with_splits(rank, size, kind, given):
    matrix = np.random.RandomState(size).randint(0, 4, (size, size)).astype("int32")
    values = [numbers(other, (matrix[other].sum(), 2)) for other in range(size)]
    parts = [np.split(values[other], np.cumsum(matrix[other])[:-1])[rank] for other in range(size)]
    splits = matrix[rank]
    if given in ("nd", "np"):
        splits = array(splits, given)
    elif given != "numpy":
        splits = {"list": list, "tuple": tuple}[given](splits.tolist())
    mine = array(values[rank], kind)
    output, received = mykv.alltoall(mine, splits, name="x")
    assert_equal(value(output), np.concatenate(parts))
    assert_equal(value(received), matrix[:, rank])
    assert type(output) is type(received) is type(mine)


@pytest.mark.ranks(1, 2, 3)
def test_alltoall_without_splits_gives_the_output_alone(rank, size, kind):
    mine = array(numbers(rank, (2 * size, 3)), kind)
    output = mykv.alltoall(mine)
    expected = [numbers(other, (2 * size, 3))[2 * rank : 2 * rank + 2] for other in range(size)]
    assert_equal(value(output), np.concatenate(expected))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 100])
def test_reducescatter_gives_the_lower_ranks_one_row_more(rank, size, kind, rows):
    values = _everyones(size, (rows, 3), "float64")
    expected = own_rows(reduced(mykv.Sum, values), rank, size)
    assert_equal(value(mykv.reducescatter(array(values[rank], kind), op=mykv.Sum)), expected)
    assert_equal(value(mykv.grouped_reducescatter([array(values[rank], kind)] * 2, op=mykv.Sum)[1]), expected)


@pytest.mark.ranks(3, long=(2,))
def test_barrier_waits_for_all(rank, size, gather, tmp_path):
    import time

    time.sleep(0.3 * rank)
    arrived = time.time()
    mykv.barrier()
    left = time.time()
    assert max(one[0] for one in gather((arrived, left))) <= left


@pytest.mark.ranks(2)
def test_result_may_be_used_before_it_is_ready(rank, size, gather):
    """The other rank has not begun when this rank continues."""
    shape = (1000, 100)
    if rank == 0:
        result = mykv.allreduce(mx.nd.ones(shape), op=mykv.Sum, name="late") * 2 + 1
        given = mykv.broadcast(mx.nd.zeros(shape), 1, name="given") + result
    gather("rank 0 has gone on")
    if rank == 1:
        given = (
            mykv.broadcast(mx.nd.ones(shape), 1, name="given")
            + mykv.allreduce(mx.nd.ones(shape), op=mykv.Sum, name="late") * 2
            + 1
        )
    assert (given.asnumpy() == 6).all()


@pytest.mark.ranks(2)
def test_input_may_be_deleted_or_changed_at_once(rank, size):
    results = []
    for step in range(30):
        mine = mx.nd.full((1 << 16,), step + rank)
        results.append(mykv.allreduce(mine, op=mykv.Sum))
        results.append(mykv.reducescatter(mine, op=mykv.Sum))
        results.append(mykv.allgather(mine)[: 1 << 16] + (step + 1))
        mine[:] = -1
        del mine
        gc.collect()
    for step, result in enumerate(results):
        assert (result.asnumpy() == 2 * (step // 3) + 1).all()


@pytest.mark.ranks(2)
def test_views_are_reduced_in_place(rank):
    whole = mx.nd.zeros((4, 3))
    mykv.allreduce_(whole[1:3], op=mykv.Sum)
    whole[1:3] = rank + 1
    mykv.allreduce_(whole[1:3], op=mykv.Sum)
    assert whole.asnumpy()[:, 0].tolist() == [0, 3, 3, 0]


@pytest.mark.ranks(2)
def test_operations_while_recording_are_not_recorded(rank):
    x = array(np.full(3, rank + 1.0, "float32"))
    x.attach_grad()
    with autograd.record():
        scaled = mykv.allreduce(x, op=mykv.Min, prescale_factor=2)
        mean = mykv.allreduce(x)
        rows = mykv.grouped_reducescatter([x])[0]
        assert autograd.is_recording() and autograd.is_training()
        loss = (x * x).sum()
    loss.backward()
    assert (value(x.grad) == 2 * (rank + 1)).all()
    assert (value(scaled) == 2).all() and value(mean).shape == (3,) and (value(rows) == 1.5).all()


@pytest.mark.ranks(2)
def test_operations_of_one_name_are_matched_in_their_order(rank):
    results = [mykv.allreduce(array(np.full(3, step)), op=mykv.Sum, name="same") for step in range(20)]
    results += [mykv.allreduce(array(np.full(3, step)), op=mykv.Sum) for step in range(20)]
    for step, result in enumerate(results):
        assert (value(result) == step % 20 * 2).all()


@pytest.mark.ranks(2)
def test_names_may_be_numbers(rank):
    assert (value(mykv.allreduce(array(np.ones(3)), name=3 if rank else "3", op=mykv.Sum)) == 2).all()


@pytest.mark.ranks(2, long=(1, 3), env=_NAIVE)
def test_all_operations_with_an_engine_that_runs_them_at_once(rank, size):
    values = _everyones(size, (5, 3), "float32")
    mine = array(values[rank])
    for op in _OPS:
        assert_equal(value(mykv.allreduce(mine, op=op, prescale_factor=2)), reduced(op, values, 2))
        assert_equal(value(mykv.grouped_allreduce([mine, mine], op=op)[1]), reduced(op, values))
        assert_equal(value(mykv.reducescatter(mine, op=op)), own_rows(reduced(op, values), rank, size))
        assert_equal(value(mykv.grouped_reducescatter([mine], op=op)[0]), own_rows(reduced(op, values), rank, size))
    assert_equal(value(mykv.broadcast(mine, size - 1)), values[-1])
    assert_equal(value(mykv.allgather(mine)), np.concatenate(values))
    assert_equal(value(mykv.grouped_allgather([mine])[0]), np.concatenate(values))
    assert_equal(
        value(mykv.alltoall(mine, [5] + [0] * (size - 1))[0]), np.concatenate(values) if rank == 0 else values[0][:0]
    )
    mykv.barrier()
    assert mykv.allgather_object(rank) == list(range(size))


@pytest.mark.parametrize(
    "function, signature",
    [
        ("allreduce", "tensor average name priority prescale_factor postscale_factor process_set op"),
        ("allreduce_", "tensor average name priority prescale_factor postscale_factor process_set op"),
        ("grouped_allreduce", "tensors average name priority prescale_factor postscale_factor process_set op"),
        ("grouped_allreduce_", "tensors average name priority prescale_factor postscale_factor process_set op"),
        ("allgather", "tensor name priority process_set"),
        ("grouped_allgather", "tensors name priority process_set"),
        ("broadcast", "tensor root_rank name priority process_set"),
        ("broadcast_", "tensor root_rank name priority process_set"),
        ("alltoall", "tensor splits name priority process_set"),
        ("reducescatter", "tensor op name priority process_set prescale_factor postscale_factor"),
        ("grouped_reducescatter", "tensors op name priority process_set prescale_factor postscale_factor"),
        ("barrier", "process_set"),
        ("broadcast_object", "obj root_rank name process_set"),
        ("allgather_object", "obj name process_set"),
        ("add_process_set", "process_set"),
        ("remove_process_set", "process_set"),
        ("init", "comm process_sets"),
    ],
)
def test_arguments_are_those_of_horovod_in_their_order(function, signature):
    assert list(inspect.signature(getattr(mykv, function)).parameters) == signature.split()
