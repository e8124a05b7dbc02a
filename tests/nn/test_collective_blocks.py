"""Collective operations as blocks: the same as the functions, hybridized or not, forward and backward."""

from __future__ import annotations

import copy

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.marks import long
from harness.support import MXNetError, array, mx, numbers, value
from mxnet import autograd
from mxnet.gluon import nn

_MODES = [None, long({}), {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]
_KINDS = {
    "AllReduce": (lambda: mykv.nn.AllReduce(), lambda x: mykv.allreduce(x)),
    "sum": (
        lambda: mykv.nn.AllReduce(mykv.Sum, postscale_factor=0.5),
        lambda x: mykv.allreduce(x, op=mykv.Sum, postscale_factor=0.5),
    ),
    "AllGather": (lambda: mykv.nn.AllGather(), lambda x: mykv.allgather(x)),
    "ReduceScatter": (lambda: mykv.nn.ReduceScatter(mykv.Sum), lambda x: mykv.reducescatter(x, op=mykv.Sum)),
    "Broadcast": (lambda: mykv.nn.Broadcast(0), lambda x: mykv.broadcast(x, 0)),
    "AllToAll": (lambda: mykv.nn.AllToAll(), lambda x: mykv.alltoall(x)),
}


@pytest.fixture(autouse=True)
def initialized():
    mykv.init()


def _network(block, hybridize=None):
    net = nn.HybridSequential()
    first, last = nn.Dense(3, in_units=2, flatten=False), nn.Dense(2, in_units=3, flatten=False)
    net.add(first, block, last)
    net.initialize(mx.init.Constant(0.5))
    if hybridize is not None:
        net.hybridize(**hybridize)
    return net, first, last


@pytest.mark.ranks(2, long=(1, 3))
@pytest.mark.parametrize("hybridize", _MODES)
@pytest.mark.parametrize("name", _KINDS)
def test_gives_what_the_function_gives(name, hybridize, rank, size):
    make, function = _KINDS[name]
    net, first, last = _network(make(), hybridize)
    for step in range(3):
        x = array(numbers(rank + step, (6, 2)))
        found = []
        for call in (lambda x: last(function(first(x))), net):
            x.attach_grad()
            with autograd.record():
                y = call(x)
                loss = (y * (rank + 1)).sum()
            loss.backward()
            found.append([value(y), value(x.grad), value(first.weight.grad())])
        for expected, actual in zip(*found):
            np.testing.assert_allclose(actual, expected, rtol=1e-5)
        assert found[0][1].any() or (name == "Broadcast" and rank > 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hybridize", [None, {}])
def test_one_block_called_twice_and_backward_in_another_order(hybridize, rank, size):
    block = mykv.nn.AllReduce(mykv.Sum)
    net, first, last = _network(block, hybridize)
    losses = []
    for k in range(2):
        x = array(np.full((4, 2), float(k + 1), "float32"))
        x.attach_grad()
        with autograd.record():
            losses.append((x, net(x).sum()))
    for _, loss in losses if rank else losses[::-1]:
        loss.backward()
    for k, (x, loss) in enumerate(losses):
        assert float(value(loss).reshape(())) == pytest.approx(4 * 2 * 3 * 0.5 * 2 * (k + 1))
        np.testing.assert_allclose(value(x.grad), np.full((4, 2), 2 * 2 * 3 * 0.25))


@pytest.mark.ranks(2)
def test_copies_and_blocks_that_one_rank_makes_alone(rank, size):
    block = mykv.nn.AllGather()
    if rank:
        copy.deepcopy(block)
        mykv.nn.AllGather()
    other = copy.deepcopy(block)
    for each in (other, block):
        y = each(array(numbers(rank, (3, 2))))
        np.testing.assert_array_equal(value(y), np.concatenate([numbers(0, (3, 2)), numbers(1, (3, 2))]))


@pytest.mark.ranks(2)
def test_mistakes(rank, size):
    with pytest.raises(ValueError, match="op must be Average or Sum"):
        mykv.nn.AllReduce(mykv.Max)
    with pytest.raises(ValueError, match="root_rank"):
        mykv.nn.Broadcast(2)
    block = mykv.nn.AllReduce()
    y = block(array(numbers(rank, (3 + rank, 2))))
    with pytest.raises(MXNetError, match=r"\(3, ?2\).*\(4, ?2\)"):
        value(y)
    mx.nd.waitall()
    y = block(array(numbers(rank, (3, 2))))
    np.testing.assert_allclose(value(y), (numbers(0, (3, 2)) + numbers(1, (3, 2))) / 2)
