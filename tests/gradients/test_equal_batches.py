"""Workers that train on the same batches get one warning; others get none."""

from __future__ import annotations

import kvstore_plugin as mykv
import pytest
from harness import marks
from harness.support import array, dense_network, mx, numbers
from kvstore_plugin.gradients import equal_batches
from mxnet import autograd, gluon

_SGD = ("sgd", {"learning_rate": 0.01})
_KINDS = {
    "own": lambda params: mykv.DistributedTrainer(params, *_SGD),
    "own on the store": lambda params: mykv.DistributedTrainer(params, *_SGD, update_on_kvstore=True),
    "copied": lambda params: mykv.DistributedTrainer(params, *_SGD, bucket_bytes=0),
    "stock": lambda params: gluon.Trainer(params, *_SGD, kvstore="mykv", update_on_kvstore=False),
    "stock on the store": lambda params: gluon.Trainer(params, *_SGD, kvstore="mykv", update_on_kvstore=True),
}


@pytest.fixture
def warned(monkeypatch, caplog):
    monkeypatch.setattr(equal_batches, "_told", False)
    mykv.init()
    return lambda: caplog.text.count("had the same gradients in a step, so they train on the same batches")


def _train(trainer, net, batch, factor=1.0, dtype="float32"):
    for step in range(8):
        with autograd.record():
            loss = (net(array(numbers(batch + 10 * step, (4, 6), dtype) / 10)) ** 2).sum() * factor
        loss.backward()
        trainer.step(4)
        mx.nd.waitall()


@pytest.mark.ranks(2, long=(3,))
@pytest.mark.parametrize(
    "kind", ["own", "stock on the store", *map(marks.long, ["own on the store", "copied", "stock"])]
)
def test_equal_batches_are_told_once_on_rank_0(rank, kind, warned):
    for _ in range(2):
        net = dense_network(rank)
        mykv.broadcast_parameters(net.collect_params())
        _train(_KINDS[kind](net.collect_params()), net, batch=0)
        assert warned() == (rank == 0)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["own", "stock on the store"])
def test_batches_of_their_own_are_not_told(rank, kind, warned):
    net = dense_network(0)
    _train(_KINDS[kind](net.collect_params()), net, batch=rank)
    assert not warned()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("factor", [0.0, float("nan")])
def test_gradients_that_are_zero_or_no_numbers_say_nothing(rank, factor, warned):
    net = dense_network(0)
    _train(_KINDS["own"](net.collect_params()), net, 0, factor)
    assert not warned()


@pytest.mark.ranks(3)
def test_a_process_set_may_have_the_same_batches(rank, warned):
    pair = mykv.add_process_set([0, 1])
    net = dense_network(0)
    _train(mykv.DistributedTrainer(net.collect_params(), *_SGD, process_set=pair), net, batch=0)
    assert not warned()
    mykv.remove_process_set(pair)


@pytest.mark.ranks(2)
def test_workers_that_divide_a_network_may_have_the_same_batches(rank, warned):
    net = dense_network(0)
    own = {net[0].weight: None}
    _train(mykv.DistributedTrainer(net.collect_params(), *_SGD, parameter_process_sets=own), net, batch=0)
    assert not warned()


@pytest.mark.ranks(2)
def test_gradients_of_float64(rank, warned):
    net = dense_network(0, dtype="float64")
    _train(_KINDS["own"](net.collect_params()), net, 0, dtype="float64")
    assert warned() == (rank == 0)
