"""A gluon.Trainer that was given no store trains on each worker alone, and a warning says so."""

from __future__ import annotations

import kvstore_plugin as mykv
import pytest
from harness.support import array, dense_network, mx, numbers
from kvstore_plugin.integrations import separate_steps
from kvstore_plugin.world import process
from mxnet import autograd, gluon

_SGD = ("sgd", {"learning_rate": 0.01})


def _stock(net, **options):
    return gluon.Trainer(net.collect_params(), *_SGD, **options)


def _optimizer_of_horovod(net):
    return gluon.Trainer(net.collect_params(), mykv.DistributedOptimizer(mx.optimizer.SGD()), kvstore=None)


# How a trainer is created, and whether the workers train together.
_TRAINERS = {
    "stock": (_stock, False),
    "no store": (lambda net: _stock(net, kvstore=None), False),
    "name of the store": (lambda net: _stock(net, kvstore="mykv"), True),
    "DistributedTrainer": (lambda net: mykv.DistributedTrainer(net.collect_params(), *_SGD), True),
    "LocalTrainer": (lambda net: mykv.LocalTrainer(net.collect_params(), *_SGD, period=100), True),
    "DistributedOptimizer": (_optimizer_of_horovod, True),
}


def _train(net, trainer, rank, steps, between=lambda: None):
    for step in range(steps):
        with autograd.record():
            loss = (net(array(numbers(rank + 10 * step, (4, 6)))) ** 2).sum()
        loss.backward()
        between()
        trainer.step(4)
    mx.nd.waitall()


@pytest.fixture
def warned(monkeypatch, caplog):
    monkeypatch.setattr(separate_steps, "_told", False)
    mykv.shutdown()  # steps of earlier tests count no more
    mykv.init()
    return lambda: [one.getMessage() for one in caplog.records if "exchanged nothing" in one.getMessage()]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("how", list(_TRAINERS))
def test_steps_without_exchange_are_told_once_on_rank_0(rank, size, how, warned):
    make, together = _TRAINERS[how]
    net = dense_network(rank)
    mykv.broadcast_parameters(net.collect_params())
    trainer = make(net)
    _train(net, trainer, rank, 10)
    assert not warned()
    _train(net, trainer, rank, 40)
    alone = size > 1 and not together
    assert len(warned()) == (alone and rank == 0), warned()
    assert not alone or rank > 0 or "the 2 workers" in warned()[0]


@pytest.mark.ranks(2)
def test_operations_that_have_not_ended_count(rank, warned, monkeypatch):
    monkeypatch.setattr(process, "operations", lambda: 0)  # as where the engine is many steps behind
    net = dense_network(rank)
    mykv.broadcast_parameters(net.collect_params())
    _train(net, _optimizer_of_horovod(net), rank, 30)
    assert not warned()


@pytest.mark.ranks(2)
def test_program_that_sums_gradients_by_itself_is_not_warned(rank, warned):
    net = dense_network(rank)
    mykv.broadcast_parameters(net.collect_params())
    trainer = _stock(net, kvstore=None)
    gradients = [one.grad() for one in net.collect_params().values()]
    _train(net, trainer, rank, 30, lambda: mykv.grouped_allreduce_(gradients, name="by hand"))
    assert not warned()


@pytest.mark.ranks(2)
def test_two_trainers_of_which_one_trains_together_are_not_warned(rank, warned):
    nets = [dense_network(rank), dense_network(rank)]
    trainers = [_stock(nets[0]), mykv.DistributedTrainer(nets[1].collect_params(), *_SGD)]
    for _ in range(30):
        for net, trainer in zip(nets, trainers):
            _train(net, trainer, rank, 1)
    assert not warned()


@pytest.mark.ranks(2)
def test_a_trainer_without_a_store_after_steps_together_is_not_warned(rank, warned):
    """As in a program that compares its weights with those of one process."""
    nets = [dense_network(rank), dense_network(rank)]
    _train(nets[0], mykv.DistributedTrainer(nets[0].collect_params(), *_SGD), rank, 3)
    _train(nets[1], _stock(nets[1], kvstore=None), rank, 30)
    assert not warned()
