"""Gradients through collective operations: results of backward passes, on which ranks, and refusals."""

from __future__ import annotations

import contextlib

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.collectives_model import own_rows
from harness.support import MXNetError, array, mx, numbers, value
from kvstore_plugin.compat import recorded, references
from mxnet import autograd

_NAIVE = {"MXNET_ENGINE_TYPE": "NaiveEngine"}


@pytest.fixture(autouse=True)
def initialized():
    mykv.init()


@pytest.fixture(params=["nd", "np"])
def kind(request):
    with mx.util.np_shape(True):
        yield request.param


def _attached(values, kind=None, grad_req="write"):
    made = array(values, kind)
    made.attach_grad(grad_req=grad_req)
    return made


def _weights(rank, shape, dtype="float32"):
    """Other values than `numbers`: the loss of a rank is the sum of these times the result."""
    return numbers(rank + 5, shape, dtype) - 3


def _backward(result, rank):
    """Backward from a weighted sum of a recorded result as this rank's loss."""
    weights = array(_weights(rank, result.shape, result.dtype), "np" if isinstance(result, mx.np.ndarray) else "nd")
    result.backward(weights)


def _everyones_weights(size, shape, dtype="float32"):
    return [_weights(rank, shape, dtype) for rank in range(size)]


@pytest.mark.smoke
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_allreduce(rank, size, kind, dtype):
    for shape in ((3, 5), (), (0, 2)):
        x = _attached(numbers(rank, shape, dtype), kind)
        total = sum(_everyones_weights(size, shape, dtype))
        for op, before, after in ((mykv.Sum, 1, 1), (mykv.Average, 1, 1), (mykv.Sum, 2, 0.5), (mykv.Average, 4, 0.25)):
            with autograd.record():
                y = mykv.allreduce(x, op=op, name="x", prescale_factor=before, postscale_factor=after)
            _backward(y, rank)
            expected = total * (before * after / (size if op is mykv.Average else 1))
            np.testing.assert_allclose(value(x.grad), expected, rtol=1e-3 if dtype == "float16" else 1e-6)
            assert type(y) is type(x)
            if dtype == "float32" and shape:
                x.grad[:] = 0
                with autograd.record():
                    y = mykv.allreduce(x, op=mykv.Sum)
                y.backward(array(np.ones(shape, "float64"), kind))  # MXNet takes another dtype here
                np.testing.assert_array_equal(value(x.grad), np.full(shape, size))


@pytest.mark.ranks(1, 2, 3)
def test_allgather_of_different_lengths(rank, size, kind):
    lengths = [2, 0, 3][:size]
    x = _attached(numbers(rank, (lengths[rank], 4)), kind)
    for _ in range(2):
        with autograd.record():
            y = mykv.allgather(x)
        np.testing.assert_array_equal(value(y), np.concatenate([numbers(r, (n, 4)) for r, n in enumerate(lengths)]))
        _backward(y, rank)
        begin = sum(lengths[:rank])
        total = sum(_everyones_weights(size, (sum(lengths), 4)))
        np.testing.assert_array_equal(value(x.grad), total[begin : begin + lengths[rank]])


@pytest.mark.ranks(1, 2, 3)
def test_reducescatter(rank, size, kind):
    x = _attached(numbers(rank, (5, 2)), kind)
    for op in (mykv.Sum, mykv.Average):
        with autograd.record():
            y = mykv.reducescatter(x, op=op, postscale_factor=2)
        _backward(y, rank)
        shapes = [own_rows(np.zeros((5, 2)), r, size).shape for r in range(size)]
        expected = np.concatenate([_weights(r, shape) for r, shape in enumerate(shapes)])
        np.testing.assert_allclose(value(x.grad), expected * 2 / (size if op is mykv.Average else 1), rtol=1e-6)


@pytest.mark.ranks(1, 2, 3)
def test_broadcast(rank, size, kind):
    for shape in ((4, 2), ()):
        x = _attached(numbers(rank, shape), kind)
        with autograd.record():
            y = mykv.broadcast(x, size - 1)
        _backward(y, rank)
        total = sum(_everyones_weights(size, shape))
        np.testing.assert_array_equal(value(x.grad), total if rank == size - 1 else np.zeros(shape))


@pytest.mark.ranks(1, 2, 3)
def test_alltoall(rank, size, kind):
    splits = [[(s + 2 * r) % 3 for r in range(size)] for s in range(size)]  # from s to r
    x = _attached(numbers(rank, (sum(splits[rank]), 2)), kind)
    with autograd.record():
        y, received = mykv.alltoall(x, splits=splits[rank])
    _backward(y, rank)
    assert received.asnumpy().tolist() == [splits[s][rank] for s in range(size)]
    expected = []
    for r in range(size):
        weights = _weights(r, (sum(splits[s][r] for s in range(size)), 2))
        begin = sum(splits[s][r] for s in range(rank))
        expected.append(weights[begin : begin + splits[rank][r]])
    np.testing.assert_array_equal(value(x.grad), np.concatenate(expected))


@pytest.mark.ranks(2)
def test_grouped_forms(rank, size, kind):
    a, b = _attached(numbers(rank, (3,)), kind), _attached(numbers(rank, (4, 2), "float64"), kind)
    count = array(np.array([rank], "int64"), kind)
    with autograd.record():
        first, counts, second = mykv.grouped_allreduce([a, count, b], op=mykv.Average)
        loss = (first * first).sum()
    loss.backward()  # b needs no gradient
    mean = (numbers(0, (3,)) + numbers(1, (3,))) / 2
    np.testing.assert_allclose(value(a.grad), 2 * mean, rtol=1e-6)
    np.testing.assert_array_equal(value(b.grad), 0)
    assert int(value(counts)[0]) == 0
    with autograd.record():
        gathered = mykv.grouped_allgather([a, count, b])
        parts = mykv.grouped_reducescatter([a, b], op=mykv.Sum)
        loss = gathered[0].sum() + 2 * parts[0].sum()
        loss = loss + 3 * gathered[2].sum().astype("float32") + 4 * parts[1].sum().astype("float32")
    loss.backward()
    np.testing.assert_array_equal(value(a.grad), np.full(3, 2 + 2))
    np.testing.assert_array_equal(value(b.grad), np.full((4, 2), 6 + 4))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_several_uses_of_one_result_and_several_passes(rank, size, grad_req):
    x = _attached(numbers(rank, (3,)), grad_req=grad_req)
    for _ in range(2):
        with autograd.record():
            y = mykv.allreduce(x, op=mykv.Sum)
            loss = (2 * y).sum() + (y * (rank + 1)).sum() + x.sum()
        loss.backward()
    np.testing.assert_array_equal(value(x.grad), np.full(3, (2 + 1 + 2 + 2 + 1) * (2 if grad_req == "add" else 1)))
    with autograd.record():
        loss = (mykv.allreduce(x, op=mykv.Sum) * (rank + 1)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    before = 16 if grad_req == "add" else 0
    np.testing.assert_array_equal(value(x.grad), np.full(3, before + (6 if grad_req == "add" else 3)))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_backward_passes_in_another_order_on_each_rank(rank, size, grad_req):
    """Also of one array: the pass that is first on this rank must not hold up the other."""
    x = _attached(np.zeros(3, "float32"), grad_req=grad_req)
    losses = []
    for number in range(3):
        with autograd.record():
            losses.append((mykv.allreduce(x, op=mykv.Sum) * 10.0**number).sum())
            losses.append((mykv.allgather(x) * 2 * 10.0**number).sum())
    order = losses[rank:] + losses[:rank]
    for loss in order:
        loss.backward()
    if grad_req == "add":
        np.testing.assert_array_equal(value(x.grad), np.full(3, 3 * 111 * size))
    else:
        position = (rank - 1) % len(losses)
        last = (1 + position % 2) * 10.0 ** (position // 2)
        np.testing.assert_array_equal(value(x.grad), np.full(3, last * size))


@pytest.mark.ranks(2)
def test_a_rank_whose_array_needs_no_gradient_takes_part(rank, size):
    x = array(numbers(rank, (4,)))
    if rank == 0:
        x.attach_grad()
    w = _attached(np.full(4, 2, "float32"))
    with autograd.record():
        loss = 0
        for call in (mykv.allreduce, mykv.allgather, mykv.reducescatter, mykv.alltoall):
            y = call(x, **({"op": mykv.Sum} if call in (mykv.allreduce, mykv.reducescatter) else {}))
            loss = loss + (y.sum() * w).sum()
        loss = loss + (mykv.broadcast(x, 0) * w).sum()
    loss.backward()
    if rank == 0:
        np.testing.assert_array_equal(value(x.grad), np.full(4, 8 * (2 + 2 + 1 + 1) + 4))


@pytest.mark.ranks(2)
def test_nothing_is_recorded_where_no_rank_needs_a_gradient(rank, size):
    x = array(numbers(rank, (4,)))
    with autograd.record():
        gathered = mykv.allgather(x)
        w = _attached(np.ones(8, "float32"))
    with autograd.record():
        loss = (gathered * w).sum()
    if rank == 0:
        loss.backward()
        np.testing.assert_array_equal(value(w.grad), value(gathered))
    y = mykv.allreduce(_attached(numbers(rank, (4,))), op=mykv.Sum)  # outside of record(), as any operator of MXNet
    with pytest.raises(MXNetError, match="computation|recorded"):
        y.backward()
    mykv.barrier()


@pytest.mark.ranks(2)
def test_a_call_that_only_one_rank_records_is_an_error_on_both(rank, size):
    x = _attached(numbers(rank, (4,)))
    calls = {
        "allreduce": lambda: mykv.allreduce(x),
        "broadcast": lambda: mykv.broadcast(x, 0),
        "reducescatter": lambda: mykv.reducescatter(x),
        "allgather": lambda: mykv.allgather(x),
        "alltoall": lambda: mykv.alltoall(x),
    }
    for name, call in calls.items():
        with pytest.raises(MXNetError, match=r"autograd\.record\(\)"), (
            autograd.record() if rank else contextlib.nullcontext()
        ):
            value(call())
        with autograd.record():
            y = call()
        y.backward()
        assert value(x.grad).any() or name == "broadcast"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", [mykv.Min, mykv.Max, mykv.Product], ids=str)
def test_operators_without_a_gradient(op, rank, size):
    x = _attached(numbers(rank, (4,)))
    with autograd.record():
        results = [mykv.allreduce(x, op=op), mykv.reducescatter(x, op=op), *mykv.grouped_allreduce([x], op=op)]
    for y in results:
        assert np.isfinite(value(y)).all()  # the values are there
        y.backward()
        with pytest.raises(MXNetError, match=f"op={op} has no gradient: only Sum and Average have"):
            value(x.grad)


@pytest.mark.ranks(2)
def test_a_call_in_place_refuses_recorded_arrays(rank, size):
    x = _attached(numbers(rank, (4,)))
    other = array(numbers(rank, (4,)))
    calls = {
        "allreduce_": lambda y: mykv.allreduce_(y, op=mykv.Sum),
        "broadcast_": lambda y: mykv.broadcast_(y, 0),
        "grouped_allreduce_": lambda y: mykv.grouped_allreduce_([y], op=mykv.Sum),
    }
    for name, call in calls.items():
        with autograd.record():
            for tensor in (x, 2 * x):
                with pytest.raises(ValueError, match=f"{name} would overwrite an array that autograd.record"):
                    call(tensor)
            call(other)
            with autograd.pause():
                call(x)
    np.testing.assert_array_equal(value(other), value(x))


@pytest.mark.ranks(1)
def test_second_order_is_refused():
    x = _attached(np.ones(3, "float32"))
    with autograd.record():
        y = mykv.allreduce(x * x, op=mykv.Sum)
        gradient = autograd.grad(y, [x], create_graph=True)[0].sum()
    with pytest.raises(MXNetError, match="non-differentiable"):
        gradient.backward()


@pytest.mark.ranks(2)
def test_a_rank_without_its_backward_pass_is_missed(rank, size):
    x = _attached(numbers(rank, (4,)))
    with autograd.record():
        y = mykv.allreduce(x, op=mykv.Sum, name="y")
    if rank == 0:
        y.backward()
        with pytest.raises(MXNetError, match="waits in the backward of allreduce 'y'"):
            value(x.grad)
    with contextlib.suppress(MXNetError):  # rank 1 waits here meanwhile, and its call is given up too if it is in time
        mykv.barrier()
    mykv.barrier()


# glibc unmaps an array of more bytes as soon as it is freed, so a late read ends the worker.
@pytest.mark.ranks(2, env={"MALLOC_MMAP_THRESHOLD_": "65536"})
@pytest.mark.parametrize("layer, shape", [("Conv2D", (4, 3, 32, 32)), ("Conv1D", (16, 3, 1000))])
def test_behind_layers_whose_gradient_has_a_layout_of_its_own(rank, size, gather, layer, shape):
    """MXNet frees the copy of such a gradient before an operator in Python has run."""
    make = getattr(mx.gluon.nn, layer)
    first, second = make(16, 3, in_channels=3), make(32, 3, in_channels=16)
    for one in (first, second):
        one.initialize(mx.init.Constant(0.05))
    x = _attached(np.random.RandomState(rank).randn(*shape).astype("float32"))
    gradients = []
    for call in (lambda h: h * 1, lambda h: mykv.allreduce(h, op=mykv.Sum)):
        with autograd.record():
            y = second(call(first(x)))
            loss = y.sum()
        loss.backward()
        for filling in [mx.nd.full((4, 16, 30, 30), 7.0) for _ in range(60)]:
            filling.wait_to_read()
        gradients.append(value(x.grad).copy())
    np.testing.assert_allclose(gradients[1], 2 * gradients[0], rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2, env=_NAIVE)
def test_an_engine_that_blocks(rank, size):
    x = _attached(numbers(rank, (4,)), grad_req="add")
    with autograd.record():
        y = mykv.allgather(mykv.allreduce(x, op=mykv.Sum))
        _backward(y, rank)
    total = sum(_everyones_weights(size, (8,)))
    np.testing.assert_array_equal(value(x.grad), total[:4] + total[4:])


@pytest.mark.ranks(4, env={"MYKV_VIRTUAL_HOSTS": "2"})
def test_over_two_hosts(rank, size):
    x = _attached(numbers(rank, (4, 3)))
    with autograd.record():
        y = mykv.allgather(mykv.broadcast(mykv.allreduce(x, op=mykv.Average), 3))
        loss = (mykv.reducescatter(y, op=mykv.Sum) ** 2).sum() + (mykv.alltoall(x) * rank).sum()
    loss.backward()
    mean = sum(numbers(r, (4, 3)) for r in range(size)) / size
    # y has the mean four times, and is added up four times: the sum of squares is 4 * 16 * mean ** 2.
    expected = 2 * 4 * 16 * mean / size + np.arange(4)[:, None]
    np.testing.assert_allclose(value(x.grad), expected, rtol=1e-6)


@pytest.mark.ranks(1)
def test_nothing_is_kept_of_a_graph_that_is_gone():
    x = _attached(np.ones(3, "float32"))
    before = set(recorded._entries)
    for runs in (True, False):
        with autograd.record():
            y = mykv.allreduce(x, op=mykv.Sum)
        if runs:
            y.backward()
        del y
        mx.nd.waitall()
        references.settle(lambda: not set(recorded._entries) - before)
        assert not set(recorded._entries) - before


@pytest.mark.ranks(3)
def test_a_process_set(rank, size):
    some = mykv.add_process_set([0, 2])
    x = _attached(numbers(rank, (4,)))
    if rank != 1:
        with autograd.record():
            y = mykv.allreduce(mykv.allgather(x, process_set=some), op=mykv.Sum, process_set=some)
            y = y + mykv.broadcast(y, 2, process_set=some)
        _backward(y, rank)
        total = _weights(0, (8,)) + _weights(2, (8,))
        mine = slice(0, 4) if rank == 0 else slice(4, 8)
        # With s = allreduce(allgather(x)), y = s + broadcast(s): each term gives the total to s, and both ranks add up.
        np.testing.assert_array_equal(value(x.grad), 4 * total[mine])
    mykv.remove_process_set(some)
