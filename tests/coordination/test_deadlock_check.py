"""Workers that wait for each other in different calls: an error on all of them, and the next call works."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, MXNetError, array, checksum, clear_errors, dense_network, mx
from kvstore_plugin.coordination import deadlock_check
from kvstore_plugin.world import process
from mxnet import autograd

_SGD = ("sgd", {"learning_rate": 0.1})
_LATE = 4.0  # seconds; a rank that waits looks for deadlocks after two
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


@pytest.fixture
def pair():
    """A process set of ranks 0 and 1."""
    mykv.shutdown()  # the tests of another file may have left sets
    mykv.init()
    yield mykv.add_process_set([0, 1])
    mykv.shutdown()
    mykv.init()


def _step_again(net, trainer, rank, folder):
    _step(net, trainer, rank, 2)


def _save(net, trainer, rank, folder):
    trainer.save_states(str(folder / "states"))


def _barrier(net, trainer, rank, folder):
    mykv.barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("go_on", [_step_again, _save, _barrier])
def test_others_go_on_while_a_process_set_waits(pair, rank, gather, tmp_path, go_on):
    """Rank 2 is no member of the set, so its next step is no sign that the members take different numbers of steps."""
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD, update_on_kvstore=go_on is _save)
    for step in range(2):
        _step(net, trainer, rank, step)
    if rank == 1:
        time.sleep(_LATE)
    if rank < 2:
        mykv.barrier(process_set=pair)
    go_on(net, trainer, rank, tmp_path)
    _step(net, trainer, rank, 3)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(3)
def test_a_member_of_the_process_set_is_in_a_step(pair, rank, gather):
    net = dense_network(seed=0)
    trainer = _trainer(net, rank)
    begin = time.monotonic()
    for step in range(2):
        _step(net, trainer, rank, step)
    with pytest.raises(MXNetError, match=r"rank 0 is in barrier, but rank 1 is in a step of a trainer that rank 0 has"):
        if rank == 0:
            mykv.barrier(process_set=pair)
        else:
            _step(net, trainer, rank)
    clear_errors()
    assert time.monotonic() - begin < _LIMIT
    if rank == 1:  # comes to the call that rank 0 was in
        with pytest.raises(MXNetError, match="rank 0 is in barrier"):
            mykv.barrier(process_set=pair)
    _step(net, trainer, rank)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(3)
@pytest.mark.parametrize("in_pair", range(2))
def test_workers_wait_in_calls_of_different_process_sets(pair, rank, gather, in_pair):
    _wait_in_different_sets(pair, rank, gather, in_pair)


@pytest.mark.ranks(3, env={"MYKV_VIRTUAL_HOSTS": "3"})
def test_workers_on_three_hosts_wait_in_calls_of_different_process_sets(pair, rank, gather):
    assert mykv.local_size() == 1
    _wait_in_different_sets(pair, rank, gather, 0)


def _wait_in_different_sets(pair, rank, gather, in_pair):
    """The lower of the two ranks that wait for each other gives up its call."""
    begin = time.monotonic()
    lower = "barrier, but rank 1 is in a call of " + ("global_process_set" if in_pair == 0 else r"ProcessSet\(\[0, 1")
    with pytest.raises(MXNetError, match=f"rank 0 is in {lower}.* that rank 0 has not made: all workers must make"):
        mykv.barrier(process_set=pair if rank == in_pair else mykv.global_process_set)
    assert time.monotonic() - begin < _LIMIT
    if rank == 1:  # comes to the call that rank 0 was in
        with pytest.raises(MXNetError, match="rank 0 is in barrier"):
            mykv.barrier(process_set=pair if in_pair == 0 else mykv.global_process_set)
    if rank < 2:
        mykv.barrier(process_set=pair)
    assert gather(rank) == [0, 1, 2]
    mykv.barrier()


@contextlib.contextmanager
def _barrier_in_a_thread(process_set, delay):
    def wait():
        time.sleep(delay)
        mykv.barrier(process_set=process_set)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        yield
        waiting.result()


@pytest.mark.ranks(3)
def test_each_process_set_has_a_thread(pair, rank, gather):
    """Rank 0 is late in the thread of one set, and rank 1 in the thread of the other: no deadlock."""
    if rank < 2:
        with _barrier_in_a_thread(pair, _LATE * rank):
            time.sleep((1.5 - 1.5 * rank) * _LATE)
            mykv.barrier()
    else:
        mykv.barrier()
    assert gather(rank) == [0, 1, 2]


@pytest.mark.ranks(3)
def test_a_rank_waits_in_both_calls(pair, rank, gather):
    """Rank 1 has a thread for each set, rank 0 makes one call after the other, and rank 2 is late: no deadlock."""
    if rank == 1:
        with _barrier_in_a_thread(pair, 0.0):
            mykv.barrier()
    else:
        time.sleep(_LATE if rank == 2 else 0)
        mykv.barrier()
        if rank == 0:
            mykv.barrier(process_set=pair)
    assert gather(rank) == [0, 1, 2]


@pytest.mark.ranks(1)
def test_the_error_names_all_ranks_that_wait(rank):
    mykv.init()
    one, several = (deadlock_check._reason("barrier", ranks, "in a step: go on") for ranks in ([3], [1, 2]))
    assert one == "rank 0 is in barrier, but rank 3 is in a step: go on"
    assert several == "rank 0 is in barrier, but ranks 1, 2 are in a step: go on"


@pytest.mark.skipif(IS_2, reason="the script has arrays of MXNet 1.9")
def test_states_that_one_worker_alone_saves_name_the_call_and_the_remedy(mpirun):
    script = """
    import kvstore_plugin as mykv
    import mxnet as mx
    from mxnet import autograd, gluon

    net = gluon.nn.Dense(1, in_units=2)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "adam", kvstore=mx.kv.create("mykv"))
    with autograd.record():
        loss = net(mx.nd.ones((2, 2))).sum()
    loss.backward()
    trainer.step(4)
    mx.nd.waitall()
    if mykv.rank() == 0:
        trainer.save_states("unused.states")
    """
    result = mpirun(2, script, env={"MYKV_EXIT_WAIT_S": "1"}, timeout=120)
    assert result.code != 0, result.text
    assert "save_optimizer_states('unused.states'): rank 1 has left" in result.stderr, result.text
    assert "its save_states() and load_states() make this call: all workers must" in result.stderr, result.text
