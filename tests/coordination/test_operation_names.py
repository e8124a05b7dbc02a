"""Objects that one rank alone has made, or has failed to make, do not shift the names of later objects."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.interrupts import interrupted_after
from harness.support import array, dense_network, mx
from kvstore_plugin.coordination import deadlock_check
from kvstore_plugin.world import process
from mxnet import autograd, gluon


def _use_optimizer(optimizer, rank):
    weight, gradient = mx.nd.ones(2), mx.nd.full(2, rank + 1)
    optimizer.update([0], [weight], [gradient], [None])
    np.testing.assert_allclose(weight.asnumpy(), 1 - 0.1 * 1.5, rtol=1e-5)


def _use_layer(layer, rank):
    with autograd.record():
        y = layer(array(np.full((1, 2), rank, "float32")))
    np.testing.assert_allclose(y.asnumpy(), 2 * rank - 1, rtol=1e-3)  # normalized over both ranks


def _use_store(store, rank):
    value = array(np.full(2, rank + 1, "float32"))
    store.pushpull(0, value)
    np.testing.assert_array_equal(value.asnumpy(), 3)


def _use_block(block, rank):
    np.testing.assert_array_equal(block(array(np.full((1, 2), rank, "float32"))).asnumpy(), 0.5)


def _twins(one):
    return [copy.deepcopy(one), copy.deepcopy(one)]


def _optimizer(**wrong):
    return mykv.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.1, wd=0), **wrong)


def _layer(**wrong):
    layer = mykv.SyncBatchNorm(in_channels=2, **wrong)
    layer.initialize()
    return layer


_KINDS = {
    "optimizer": (_optimizer, {"num_groups": -1}, _use_optimizer),
    "layer": (_layer, {"num_devices": 2}, _use_layer),
    "store": (mykv.MyKV, {"process_set": "all"}, _use_store),
}
_KINDS_OF_COPIES = {
    "optimizer": _KINDS["optimizer"],
    "layer": _KINDS["layer"],
    "block": (mykv.nn.AllReduce, {}, _use_block),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", _KINDS)
def test_a_constructor_that_fails_on_one_rank(kind, rank):
    make, wrong, use = _KINDS[kind]
    with contextlib.suppress(ValueError, TypeError):
        make(**(wrong if rank == 1 else {}))
    first = make()
    with contextlib.suppress(ValueError, TypeError):
        make(**(wrong if rank == 0 else {}))
    second = make()
    for one in (first, second, make()):
        use(one, rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["optimizer", "layer"])
def test_objects_and_copies_of_one_rank_alone(kind, rank):
    make, _, use = _KINDS[kind]
    first = make()
    use(first, rank)
    kept = []
    if rank == 0:
        kept = [copy.deepcopy(first), make(), copy.deepcopy(first)]  # the best network so far, one to look at
        if kind == "layer":
            kept[0](array(np.ones((2, 2), "float32")))  # evaluation
    before = make()
    del kept
    gc.collect()
    after = make()
    for one in (first, before, after, copy.deepcopy(first), make()):
        use(one, rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("kind", _KINDS_OF_COPIES)
def test_copies_that_ranks_make_at_different_times(kind, duplicate, rank):
    make, _, use = _KINDS_OF_COPIES[kind]
    first = make()
    use(first, rank)
    kept = [duplicate(first)] if rank == 0 else []  # this rank's best network so far
    second = make()
    if rank == 1:
        kept = [duplicate(first)]
    for one in (second, make(), duplicate(first), kept[0], first):
        use(one, rank)


def _use_in_other_orders(optimizers, rank):
    weights = [mx.nd.zeros(1), mx.nd.zeros(1)]
    for number in (0, 1) if rank == 0 else (1, 0):
        optimizers[number].update([0], [weights[number]], [mx.nd.full(1, 10.0**number)], [None])
    np.testing.assert_allclose([one.asnumpy()[0] for one in weights], [-0.1, -1], rtol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make_all", [lambda: [_optimizer(), _optimizer()], lambda: _twins(_optimizer())])
def test_objects_that_all_ranks_make_may_be_used_in_any_order(make_all, rank):
    _use_in_other_orders(make_all(), rank)


@pytest.mark.ranks(2)
def test_objects_of_an_earlier_init_may_be_used_in_any_order(rank):
    mykv.init()
    optimizers = [_optimizer(), _optimizer()]
    for optimizer in optimizers:
        _use_optimizer(optimizer, rank)
    for _ in range(2):
        mykv.shutdown()
        mykv.init()
        _use_in_other_orders([*optimizers], rank)
        _use_in_other_orders([_optimizer(), _optimizer()], rank)


@pytest.mark.ranks(3)
def test_objects_of_a_process_set_are_used_in_the_same_order_after_init(rank):
    mykv.init()
    members = mykv.add_process_set([0, 1])
    optimizers = [_optimizer(process_set=members), _optimizer(process_set=members)] if rank < 2 else []
    for optimizer in optimizers:
        _use_optimizer(optimizer, rank)
    mykv.shutdown()
    mykv.init()
    mykv.add_process_set(members)
    for optimizer in optimizers if rank == 0 else optimizers[::-1]:
        with pytest.raises(RuntimeError, match=r"the ranks use different objects after init\(\)"):
            _use_optimizer(optimizer, rank)
    for optimizer in optimizers:
        _use_optimizer(optimizer, rank)
    mykv.remove_process_set(members)


def _stock_trainer():
    net = dense_network(0)
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="mykv"), net


def _use_stock_trainer(made, rank):
    trainer, net = made
    with autograd.record():
        loss = (net(array(np.full((2, 6), rank, "float32"))) ** 2).sum()
    loss.backward()
    trainer.step(4)
    mx.nd.waitall()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("make", "use"), [(_optimizer, _use_optimizer), (_stock_trainer, _use_stock_trainer)], ids=["optimizer", "Trainer"]
)
def test_an_interrupted_first_use_continues(make, use, rank):
    made = make()
    if rank == 0:
        time.sleep(1)
    else:
        with interrupted_after(0.3, InterruptedError):
            use(made, rank)
    for _ in range(2):
        use(made, rank)


@pytest.mark.ranks(2)
def test_nothing_is_kept_of_stores_and_trainers_of_an_earlier_init(rank):
    def trainer():
        return mykv.DistributedTrainer(dense_network(0).collect_params(), "adam", update_on_kvstore=True)

    def store():
        made = mx.kv.create("mykv")
        made.set_optimizer(mx.optimizer.create("sgd"))
        return made

    mykv.init()
    gc.collect()  # objects of earlier tests
    names, groups = set(deadlock_check._checkpoints), len(process._groups)
    for make in (store, trainer) * 2:
        kept = make()
        assert len(deadlock_check._checkpoints) == len(names) + 1
        mykv.shutdown()
        mykv.init()
        del kept
        gc.collect()
    assert set(deadlock_check._checkpoints) <= names
    assert len(process._groups) == groups
