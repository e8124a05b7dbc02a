"""Workers that list the same parameters in different orders: an error, or the order of the names if it is known."""

from __future__ import annotations

import contextlib

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, array, checksum, clear_errors, mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

_LAYERS = 3
_DIFFERENTLY = "The workers (order|number) the parameters.* differently"


def _network(crosses=False):
    """Layers of one shape; with names in which text and number sort differently if `crosses` is true."""
    with contextlib.nullcontext() if IS_2 else mx.name.NameManager():  # which counts from 0
        for _ in range(10 - _LAYERS + 1 if crosses else 0):
            nn.Dense(1)
        net = nn.HybridSequential()
        for _ in range(_LAYERS):
            net.add(nn.Dense(4, in_units=4, use_bias=False))
    net.initialize(mx.init.Xavier())
    return net


def _step(net, trainer, rank):
    with autograd.record():
        loss = (net(array(np.full((1, 4), 1.0 + rank, "float32"))) ** 2).sum()
    loss.backward()
    trainer.step(1)
    return checksum(net)


_CALLS = {
    "DistributedTrainer": lambda params: mykv.DistributedTrainer(params, "sgd"),
    "broadcast_parameters": mykv.broadcast_parameters,
    "the store": lambda params: gluon.Trainer(params, "sgd", kvstore="mykv"),
    "DistributedOptimizer": lambda params: gluon.Trainer(
        params, mykv.DistributedOptimizer(mx.optimizer.create("sgd")), kvstore=None
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.skipif(IS_2, reason="Parameters of MXNet 2.0 have no names of their own")
@pytest.mark.parametrize("call", _CALLS)
def test_a_list_in_another_order_is_an_error_on_all_workers(rank, gather, call):
    mykv.init()
    net = _network()
    params = list(net.collect_params().values())[:: 1 - 2 * rank]
    with pytest.raises(RuntimeError, match=_DIFFERENTLY):
        made = _CALLS[call](params)
        _step(net, made, rank)
    with pytest.raises(RuntimeError, match=_DIFFERENTLY):
        _step(net, _CALLS[call](params), rank)  # the next one too
    clear_errors()
    net = _network()
    assert len(set(gather(_step(net, mykv.DistributedTrainer(net.collect_params(), "sgd"), rank)))) == 1


@pytest.mark.ranks(2)
@pytest.mark.skipif(IS_2, reason="Parameters of MXNet 2.0 have no names of their own")
@pytest.mark.parametrize("call", _CALLS)
def test_a_list_sorted_by_counters_is_an_error_on_all_workers(rank, call):
    mykv.init()
    net = _network(crosses=rank == 0)
    params = net.collect_params()
    with pytest.raises(RuntimeError, match=_DIFFERENTLY):
        _step(net, _CALLS[call]([params[key] for key in sorted(params)]), rank)
    clear_errors()


@pytest.mark.ranks(2)
@pytest.mark.skipif(IS_2, reason="MXNet 2.0 sorts by places in the network")
def test_parameters_that_a_trainer_sorts_differently_for_an_optimizer_are_an_error(rank):
    mykv.init()
    net = _network(crosses=rank == 0)
    trainer = _CALLS["DistributedOptimizer"](net.collect_params())
    for _ in range(2):  # in each step
        with pytest.raises(RuntimeError, match=_DIFFERENTLY):
            _step(net, trainer, rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("call", ["DistributedTrainer", "broadcast_parameters"])
def test_a_dict_of_names_with_counters_is_in_the_order_of_the_counters(rank, gather, call, order):
    mykv.init()
    net = _network(crosses=rank == 0)
    made = _CALLS[call](dict(list(net.collect_params().items())[:: order if rank else 1]))
    assert len(set(gather(checksum(net)))) == 1
    if call == "DistributedTrainer":
        assert len(set(gather(_step(net, made, rank)))) == 1


def _halves(bucket):
    for gradient in bucket.arrays:
        gradient *= 0.5
    bucket.allreduce_()


_DICT_OPTIONS = {
    "plain": {},
    "clipped": {"clip_global_norm": 0.5},
    "on the store": {"update_on_kvstore": True},
    "hook": {"communication_hook": _halves},
    "copied": {"bucket_bytes": 0},
    "groups": {"num_groups": 2},
    "in two": {},
    "stale": {},
    "local": {"period": 2},
}


@pytest.mark.smoke
@pytest.mark.ranks(2, long=(3,))
@pytest.mark.parametrize("how", _DICT_OPTIONS)
def test_a_dict_of_equal_keys_in_another_order_trains_as_in_one_order(rank, gather, how):
    """As where one worker has read part of a network from a file, and lists it first."""
    mykv.init()
    make = mykv.LocalTrainer if how == "local" else mykv.DistributedTrainer
    results = []
    for step in (1, 1 - 2 * (rank == 1)):
        mx.random.seed(rank)
        net = _network()
        params = dict(zip("acb", net.collect_params().values()))
        params = {key: params[key] for key in list(params)[::step]}
        trainer = make(params, "sgd", {"learning_rate": 0.1, "momentum": 0.5}, **_DICT_OPTIONS[how])
        for _ in range(4):
            with autograd.record():
                loss = (net(array(np.full((1, 4), 1.0 + rank, "float32"))) ** 2).sum()
            loss.backward()
            if how == "in two":
                trainer.allreduce_grads()
                trainer.update(1)
            else:
                trainer.step(1, ignore_stale_grad=how == "stale")
        results.append([value.asnumpy() for value in map(gluon.Parameter.data, net.collect_params().values())])
        assert len(set(gather(checksum(net)))) == 1
    for expected, reached in zip(*results):
        np.testing.assert_allclose(reached, expected, rtol=1e-5, atol=1e-7)
