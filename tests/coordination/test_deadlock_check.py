"""Workers that wait for each other in different calls: an error on all of them, and the next call works."""

from __future__ import annotations

import time

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, MXNetError, array, checksum, clear_errors, dense_network, mx
from kvstore_plugin.coordination import deadlock_check
from kvstore_plugin.world import process
from mxnet import autograd

_SGD = ("sgd", {"learning_rate": 0.1})
_LIMIT = 20.0  # seconds; two workers that wait for each other would take longer


def _trainer(net, rank):
    return mykv.DistributedTrainer(net.collect_params(), *_SGD)


def _broadcast(net, rank):
    mykv.broadcast_parameters(net.collect_params())


def _module(net, rank):
    module = mx.mod.Module(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="f"), label_names=None)
    module.bind([("data", (2, 3))], for_training=True)
    module.init_params()
    module.init_optimizer(kvstore="mykv")


_CALLS = {
    "trainer": _trainer,
    "broadcast_parameters": _broadcast,
    "Module": pytest.param(_module, marks=pytest.mark.skipif(IS_2, reason="MXNet 2.0 has no Module")),
}
_every_call = pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)


def _step(net, trainer, rank, step=0):
    _begin_step(net, trainer, rank, step)
    mx.nd.waitall()


def _begin_step(net, trainer, rank, step):
    with autograd.record():
        loss = (net(array(np.random.RandomState(10 * step + rank).rand(4, 6).astype("float32"))) ** 2).sum()
    loss.backward()
    trainer.step(4)


def _all_goes_on(rank, gather):
    """All workers make what they made before, and train: numbers of trainers and broadcasts are alike again."""
    net = dense_network(seed=rank)
    mykv.broadcast_parameters(net.collect_params())
    trainer = _trainer(net, rank)
    for step in range(2):
        _step(net, trainer, rank, step)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(3, long=(2,))
@_every_call
def test_one_worker_waits_in_another_call_while_the_others_are_in_a_step(rank, gather, call):
    net = dense_network(seed=0)
    trainer = _trainer(net, rank)
    begin = time.monotonic()
    for step in range(2):
        _step(net, trainer, rank, step)
    with pytest.raises(MXNetError, match=r"rank 0 is in .*in a step of a trainer that rank 0 has not taken"):
        if rank:
            _step(net, trainer, rank)
        else:
            call(net, rank)
    clear_errors()
    assert time.monotonic() - begin < _LIMIT
    gather("all have their error")
    if rank:  # they come to the call that rank 0 was in, and find the error there
        with pytest.raises(MXNetError, match="rank 0 is in"):
            mykv.barrier()
        if call is _module:
            mx.kv.create("mykv")  # stores are counted by each worker alone
    mykv.barrier()
    _step(net, trainer, rank)
    assert len(set(gather(checksum(net)))) == 1
    _all_goes_on(rank, gather)


@pytest.mark.skipif(IS_2, reason="LARS of 2.0 reads no norms")
@pytest.mark.ranks(2)
def test_one_worker_is_in_an_update_that_waits(rank, gather):
    store = mx.kv.create("mykv")
    ones = np.ones((40, 30), "float32")
    store.init("key", array(ones))
    store.set_optimizer(mx.optimizer.create("lars", learning_rate=0.1))
    net = dense_network(seed=0)
    trainer = _trainer(net, rank)
    _step(net, trainer, rank)
    with pytest.raises(MXNetError, match=r"rank 0 is in the update of key 'key', but rank 1 is in a step of a trainer"):
        if rank:
            _step(net, trainer, rank)
        else:
            store.push("key", array(ones))
    clear_errors()
    if rank:
        with pytest.raises(MXNetError, match="rank 0 is in"):
            store.push("key", array(ones))
        clear_errors()
    store.init("key", array(ones))
    store.push("key", array(ones))
    out = array(ones)
    store.pull("key", out)
    assert len({one.tobytes() for one in gather(out.asnumpy())}) == 1
    _all_goes_on(rank, gather)


@pytest.mark.ranks(2)
@_every_call
def test_workers_wait_in_different_calls(rank, gather, call):
    begin = time.monotonic()
    net = dense_network(seed=0)
    mykv.init()
    for who in range(2):
        with pytest.raises(MXNetError, match=r"differs between ranks: .*barrier"):
            if rank == who:
                call(net, rank)
            else:
                mykv.barrier()
        assert time.monotonic() - begin < _LIMIT
    _all_goes_on(rank, gather)


@pytest.mark.ranks(2)
def test_one_worker_makes_a_trainer_and_the_other_broadcasts_parameters(rank, gather):
    net = dense_network(seed=0)
    mykv.init()
    with pytest.raises(MXNetError, match=r"DistributedTrainer\(\).*broadcast_parameters from rank 0"):
        (_trainer if rank == 0 else _broadcast)(net, rank)
    _all_goes_on(rank, gather)


@pytest.mark.ranks(2)
def test_one_worker_makes_a_trainer_with_wrong_arguments(rank, gather):
    """The other is told, and both count their trainers alike afterwards, also where one was alone in the call."""
    net = dense_network(seed=0)
    with pytest.raises(ValueError if rank else MXNetError, match="bucket_bytes"):
        mykv.DistributedTrainer(net.collect_params(), *_SGD, bucket_bytes=-1 if rank else None)
    _all_goes_on(rank, gather)


@pytest.mark.ranks(2)
def test_a_call_that_succeeds_while_it_looks_for_the_reason_refuses_no_step(rank, gather, monkeypatch):
    """The other worker has gone on to its next step then, and waits there for this one, which comes later."""
    net = dense_network(seed=0)
    trainer = _trainer(net, rank)
    for step in range(2):
        _step(net, trainer, rank, step)

    def wait_and_look(work, look=None, *first_look):
        while not work.wait(0.1):
            pass
        gather("rank 0 is in its next step")
        look()

    if rank == 0:
        mykv.barrier()
        _begin_step(net, trainer, rank, 2)
        gather("rank 0 is in its next step")
    else:
        with monkeypatch.context() as changed:
            changed.setattr(process, "wait", wait_and_look)
            mykv.barrier()
        _begin_step(net, trainer, rank, 2)
    mx.nd.waitall()
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(1)
def test_the_error_names_all_ranks_that_wait(rank):
    mykv.init()
    one, several = (deadlock_check._reason("barrier", ranks, "go on") for ranks in ([3], [1, 2]))
    assert one == "rank 0 is in barrier, but rank 3 is in a step of a trainer that rank 0 has not taken: go on"
    assert several == "rank 0 is in barrier, but ranks 1, 2 are in a step of a trainer that rank 0 has not taken: go on"
