"""MXNET_ENGINE_TYPE=NaiveEngine: each push runs at once, so all ranks must push in the same order."""

from __future__ import annotations

import os

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import MXNetError, array, checksum, mx, numbers, total, value
from mxnet import autograd, gluon
from mxnet.gluon import nn

_ENV = {"MXNET_ENGINE_TYPE": "NaiveEngine"}


@pytest.mark.ranks(2, long=(1, 3), env=_ENV)
def test_pushpull_and_broadcast(rank, size):
    assert os.environ["MXNET_ENGINE_TYPE"] == "NaiveEngine"
    store = mx.kv.create("mykv")
    for dtype in ("float32", "float16", "int64"):
        inout, out = array(numbers(rank, (3, 1001), dtype)), array(np.zeros((3, 1001), dtype))
        store.pushpull("a", inout, out)
        np.testing.assert_array_equal(value(out), total(size, (3, 1001), dtype))
        store.broadcast("b", inout, out)
        np.testing.assert_array_equal(value(out), numbers(0, (3, 1001), dtype))
        store.pushpull("a", inout)
        np.testing.assert_array_equal(value(inout), total(size, (3, 1001), dtype))


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("hybridize", [False, True])
def test_training_with_deferred_initialization(rank, size, gather, distributed, hybridize):
    mx.random.seed(rank)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, activation="tanh"), nn.Dense(5, activation="tanh"), nn.Dense(2))
    net.initialize()
    if hybridize:
        net.hybridize(static_alloc=True, static_shape=True)
    if distributed:
        trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    else:
        mykv.broadcast_parameters(net.collect_params())
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=mx.kv.create("mykv"))
    for step in range(3):
        x = array(np.random.RandomState(10 * step + rank).rand(3, 1, 8, 8).astype("float32"))
        with autograd.record():
            loss = (net(x) ** 2).sum()
        assert len(set(gather(checksum(net)))) == 1
        loss.backward()
        trainer.step(3)
        assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2, env=_ENV)
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_one_rank_has_run_a_forward_before(rank, gather, distributed, first):
    """As net.summary() does. The others have values of the biases only, whose shapes are known."""
    mx.random.seed(rank)
    net = nn.HybridSequential()
    net.add(nn.Dense(5, activation="tanh"), nn.Dense(2), nn.Dense(2))
    net.initialize()
    x = array(np.random.RandomState(rank).rand(3, 4).astype("float32"))
    if rank == first:
        net(x)
    if distributed:
        trainer = mykv.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    else:
        mykv.broadcast_parameters(net.collect_params())
        net(x)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="mykv")
    for _ in range(2):
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        trainer.step(3)
        assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2, env=_ENV)
def test_other_shapes_are_an_error_on_every_rank(rank, size):
    store = mx.kv.create("mykv")
    with pytest.raises(MXNetError) as failure:
        inout = array(np.zeros(3 + rank))
        store.pushpull("key", inout)
        value(inout)
    for word in ("'key'", "(3,)", "(4,)"):
        assert word in str(failure.value)
    inout = array(np.ones(3))
    store.pushpull("key", inout)
    assert (value(inout) == size).all()
