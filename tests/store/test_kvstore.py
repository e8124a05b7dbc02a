"""MyKV as a registered KVStore: its interface, its keys, and the stock gluon.Trainer with it."""

from __future__ import annotations

import pickle

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import array, checksum, dense_network, mx, value
from mxnet import autograd, gluon
from mxnet.kvstore import KVStoreBase


@pytest.mark.ranks(1, 2, 3)
def test_attributes(rank, size):
    store = mx.kv.create("mykv")
    assert type(store) is mykv.MyKV and isinstance(store, KVStoreBase)
    assert store.type == "mykv"
    assert (store.rank, store.num_workers, store.size) == (rank, size, size)
    assert (store.local_rank, store.local_size) == (rank, size)


@pytest.mark.ranks(4, env={"MYKV_VIRTUAL_HOSTS": "2"})
def test_local_attributes_on_two_hosts(rank, gather):
    store = mx.kv.create("mykv")
    assert store.local_size == 2 and store.local_rank in (0, 1)
    assert sorted(gather((mykv.cross_rank(), store.local_rank))) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.ranks(1)
def test_capabilities_are_asked_of_the_class(size):
    assert mykv.MyKV.is_capable("optimizer") is True
    assert mykv.MyKV.is_capable("teleport") is False
    assert isinstance(vars(mykv.MyKV)["is_capable"], staticmethod)


@pytest.mark.ranks(2)
def test_instances_have_keys_of_their_own(rank):
    first, second = mx.kv.create("mykv"), mx.kv.create("mykv")
    a, b = array(np.full(3, 1.0)), array(np.full(4, 10.0))
    for store, inout in ((first, a), (second, b)) if rank else ((second, b), (first, a)):
        store.pushpull("key", inout)
    assert (value(a) == 2).all() and (value(b) == 20).all()


@pytest.mark.ranks(2)
def test_copy_of_a_store_is_the_same_store(rank):
    store = mx.kv.create("mykv")
    inout = array(np.ones(3))
    (pickle.loads(pickle.dumps(store)) if rank else store).pushpull("key", inout)
    assert (value(inout) == 2).all()


@pytest.mark.ranks(1)
def test_alone_everything_works_as_rank_0_of_1():
    store = mx.kv.create("mykv")
    one, out = array(np.arange(3.0)), array(np.zeros(3))
    store.pushpull("a", [one, one], out)
    np.testing.assert_array_equal(value(out), 2 * np.arange(3.0))
    store.broadcast("b", one, out)
    np.testing.assert_array_equal(value(out), np.arange(3.0))


def _train(net, trainer, rank, size, steps=3):
    for step in range(steps):
        x = array(np.random.RandomState(100 * step + rank).randn(4, 6).astype("float32"))
        with autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        trainer.step(4 * size)


@pytest.mark.smoke
@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("by_name", [True, False])
def test_stock_trainer_keeps_workers_equal(rank, size, gather, by_name):
    net = dense_network(seed=rank)
    mykv.broadcast_parameters(net.collect_params())
    store = "mykv" if by_name else mx.kv.create("mykv")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    before = checksum(net)
    _train(net, trainer, rank, size)
    sums = gather(checksum(net))
    assert len(set(sums)) == 1 and sums[0] != before


@pytest.mark.ranks(2)
def test_trainer_given_the_name_takes_gradients_of_all_workers(rank, size):
    """A worker that trained alone would see its own gradient."""
    net = dense_network(seed=0)
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="mykv", update_on_kvstore=False
    )
    x = array(np.random.RandomState(rank).randn(4, 6).astype("float32"))
    with autograd.record():
        loss = (net(x) ** 2).sum()
    loss.backward()
    weight = next(iter(net.collect_params().values()))
    own = weight.grad().asnumpy()
    trainer.allreduce_grads()
    summed = weight.grad().asnumpy()
    assert abs(summed - own).max() > 1e-3
    alone = dense_network(seed=0)
    both = np.concatenate([np.random.RandomState(k).randn(4, 6).astype("float32") for k in range(size)])
    with autograd.record():
        loss = (alone(array(both)) ** 2).sum()
    loss.backward()
    np.testing.assert_allclose(summed, next(iter(alone.collect_params().values())).grad().asnumpy(), rtol=1e-4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("update_on_kvstore", [None, False])
def test_two_stock_trainers_with_a_store_each_do_not_collide(rank, size, gather, update_on_kvstore):
    nets = [dense_network(seed=k, widths=(3 + k, 2)) for k in range(2)]
    trainers = [
        gluon.Trainer(
            net.collect_params(),
            "adam",
            {"learning_rate": 0.1},
            kvstore=mx.kv.create("mykv"),
            update_on_kvstore=update_on_kvstore,
        )
        for net in nets
    ]
    for _ in range(3):
        for net, trainer in zip(nets, trainers):
            _train(net, trainer, rank, size, steps=1)
    for net in nets:
        assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_stock_trainer_sets_up_its_store_again_after_loading(rank, size, gather, tmp_path):
    net = dense_network(seed=0)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=mx.kv.create("mykv"))
    _train(net, trainer, rank, size)
    net.save_parameters(str(tmp_path / f"net{rank}"))
    net.load_parameters(str(tmp_path / f"net{rank}"))
    _train(net, trainer, rank, size)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_gradients_alone_are_refused_by_the_stock_trainer_that_updates_on_the_store(rank):
    net = dense_network(seed=0)
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=mx.kv.create("mykv"), update_on_kvstore=True)
    _train(net, trainer, rank, 2, steps=1)
    with pytest.raises(AssertionError, match="update_on_kvstore"):
        trainer.allreduce_grads()
