"""Trainers and stores that survive shutdown() and init() with another communicator."""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import array, checksum, dense_network, mx, parameters, structure, value
from mxnet import autograd, gluon

_ADAM = ("adam", {"learning_rate": 0.05})  # its counts matter as well as its states
_HOSTS = {"MYKV_VIRTUAL_HOSTS": "2"}
_REFUSED = "optimizer states of .* divided over the workers of an earlier init"


def _world():
    from mpi4py import MPI  # not at the top: it would initialize MPI where tests are collected

    return MPI.COMM_WORLD


def _part_of_world(is_in, key):
    from mpi4py import MPI

    return MPI.COMM_WORLD.Split(0 if is_in else MPI.UNDEFINED, key)


@pytest.fixture
def begin(gather):
    """All ranks leave, and some of them join again; the next test has all ranks."""

    def begin(comm):
        mx.nd.waitall()
        gather("all ranks are done")
        mykv.shutdown()
        if comm:  # not the null communicator
            mykv.init(comm)

    mykv.init()
    yield begin
    begin(_world())


def _step(net, trainer, seed, batch=4):
    """A step on a batch that is the same on all workers, so that their mean is the gradient of one process."""
    x = array(np.random.RandomState(seed).uniform(-1, 1, (4, 6)).astype("float32"))
    with autograd.record():
        loss = (net(x) ** 2).sum()
    loss.backward()
    trainer.step(batch)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["trainer", "stock"])
def test_training_goes_on_with_fewer_workers_and_with_all_in_another_order(rank, size, gather, begin, kind):
    _require_fewer_and_another_order(rank, size, gather, begin, kind)


@pytest.mark.smoke
@pytest.mark.ranks(4, env=_HOSTS)
@pytest.mark.parametrize("kind", ["trainer", "stock"])
def test_training_goes_on_with_fewer_workers_on_two_hosts(rank, size, gather, begin, kind):
    _require_fewer_and_another_order(rank, size, gather, begin, kind)


def _require_fewer_and_another_order(rank, size, gather, begin, kind) -> None:
    """The last rank trains alone and is then rank 0: all continue from its weights, states and counts."""
    is_alone = rank == size - 1
    net = dense_network(seed=rank if kind == "trainer" else 0)
    if kind == "trainer":
        trainer = mykv.DistributedTrainer(net.collect_params(), *_ADAM, clip_global_norm=1e6)
    else:
        trainer = gluon.Trainer(net.collect_params(), *_ADAM, kvstore="mykv", update_on_kvstore=False)

    def train(seeds):
        for seed in seeds:
            _step(net, trainer, seed, 4 * mykv.size() if kind == "stock" else 4)  # the stock Trainer adds up

    train(range(2))
    begin(_world().Split(int(is_alone), rank))
    assert mykv.size() == (1 if is_alone else size - 1)
    own = range(10, 13) if is_alone else range(20, 21)
    train(own)
    if not is_alone:  # names of later trainers would differ between the ranks
        mykv.DistributedTrainer(dense_network(seed=0).collect_params(), "sgd")
    _require_alone(net, [0, 1, *own])

    begin(_world().Split(0, -rank))
    assert mykv.rank() == size - 1 - rank
    mykv.broadcast_parameters(net.collect_params())
    train(range(30, 33))
    another = dense_network(seed=rank)
    another_trainer = mykv.DistributedTrainer(another.collect_params(), *_ADAM)
    _step(another, another_trainer, 0)
    assert len(set(gather((checksum(net), checksum(another))))) == 1
    _require_alone(net, [0, 1, *range(10, 13), *range(30, 33)])


@pytest.mark.ranks(2)
def test_the_root_of_before_does_not_count_any_more(rank, gather, begin):
    """The workers have met again, perhaps without the root: parameters are broadcast from rank 0 from then on."""
    net = dense_network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_ADAM, root_rank=1, broadcast_period=1)
    _step(net, trainer, 0)
    begin(_world().Split(0, rank))
    _step(net, trainer, 1)
    for parameter in structure(net).values():
        parameter.set_data(array(np.full(parameter.shape, 10 * rank, "float32")))
    _step(net, trainer, 2)
    assert max(abs(one).max() for one in parameters(net).values()) < 5
    assert len(set(gather(checksum(net)))) == 1


def _require_alone(net, seeds):
    """The weights must be those after the same steps in one process."""
    reference = dense_network(seed=0)
    trainer = gluon.Trainer(reference.collect_params(), *_ADAM, kvstore=None)
    for seed in seeds:
        _step(reference, trainer, seed)
    for one, other in zip(parameters(net).values(), parameters(reference).values()):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["trainer", "stock", "store"])
def test_states_of_another_division_are_refused_until_states_are_loaded(rank, gather, begin, kind, tmp_path):
    _require_refusal_until_loaded(rank, gather, begin, kind, tmp_path)


@pytest.mark.ranks(4, env=_HOSTS)
@pytest.mark.parametrize("kind", ["trainer", "stock", "store"])
def test_states_of_another_division_are_refused_on_two_hosts(rank, gather, begin, kind, tmp_path):
    _require_refusal_until_loaded(rank, gather, begin, kind, tmp_path)


def _require_refusal_until_loaded(rank, gather, begin, kind, tmp_path) -> None:
    """The same ranks continue with them; other ranks must load a file first."""
    path = gather(str(tmp_path / "states"))[0]
    net = dense_network(seed=0)
    if kind == "trainer":
        trainer = mykv.DistributedTrainer(net.collect_params(), *_ADAM, update_on_kvstore=True)
    elif kind == "stock":
        trainer = gluon.Trainer(net.collect_params(), *_ADAM, kvstore="mykv", update_on_kvstore=True)
    else:
        trainer = _OnStore()
    batch = 4 * mykv.size() if kind == "stock" else 4  # the stock Trainer adds up
    _step(net, trainer, 0, batch)
    kept = checksum(net)
    begin(_world().Split(0, -rank))
    with pytest.raises((RuntimeError, mx.base.MXNetError), match=_REFUSED):
        _step(net, trainer, 1, batch)
    with pytest.raises((RuntimeError, mx.base.MXNetError), match=_REFUSED):
        trainer.save_states(path)
    assert checksum(net) == kept
    begin(_world())
    _step(net, trainer, 1, batch)
    trainer.save_states(path)
    begin(_part_of_world(rank < 2, -rank))
    if rank < 2:
        trainer.load_states(path)
        _step(net, trainer, 2, 8 if kind == "stock" else 4)
        if kind == "store":
            trainer.require_alone(3)
        else:
            _require_alone(net, [0, 1, 2])
    weight = trainer.weight() if kind == "store" else checksum(net)
    assert len(set(gather(weight)[:2])) == 1


class _OnStore:
    """A store that updates one weight, with the methods of a trainer."""

    def __init__(self):
        self._store, self._weight = mx.kv.create("mykv"), mx.nd.ones((9, 7))
        self._store.init("w", self._weight)
        self._store.set_optimizer(mx.optimizer.create(_ADAM[0], **_ADAM[1]))

    def step(self, batch):
        self._store.pushpull("w", mx.nd.ones((9, 7)) / mykv.size(), out=self._weight)
        value(self._weight)

    def weight(self):
        return value(self._weight).tobytes()

    def require_alone(self, steps):
        """The weight must be as after so many steps in one process."""
        weight = mx.nd.ones((9, 7))
        updater = mx.optimizer.get_updater(mx.optimizer.create(_ADAM[0], **_ADAM[1]))
        for _ in range(steps):
            updater(0, mx.nd.ones((9, 7)), weight)
        np.testing.assert_allclose(value(self._weight), value(weight), rtol=1e-4)

    def save_states(self, path):
        self._store.save_optimizer_states(path, dump_optimizer=True)

    def load_states(self, path):
        self._store.load_optimizer_states(path)


@pytest.mark.ranks(2)
def test_a_trainer_of_before_does_not_meet_one_that_is_new(rank, begin):
    """They would continue with different states of the optimizer."""
    reason = r"made before the last init|is in DistributedTrainer\(\)"
    refused = pytest.raises((RuntimeError, mx.base.MXNetError), match=reason)
    nets = [dense_network(seed=rank) for _ in range(2)]
    kept = mykv.DistributedTrainer(nets[0].collect_params(), *_ADAM)
    begin(_world())
    if rank == 0:
        mykv.global_process_set._numbers["trainer"] -= 1  # as in a process that was started now
        with refused:
            mykv.DistributedTrainer(nets[1].collect_params(), *_ADAM)
    else:
        with refused:
            _step(nets[0], kept, 0)


@pytest.mark.ranks(2)
def test_local_trainers_are_refused(rank, begin):
    net = dense_network(seed=rank)
    trainer = mykv.LocalTrainer(net.collect_params(), "sgd", period=2)
    _step(net, trainer, 0)
    begin(_world())
    for use in (lambda: _step(net, trainer, 1), trainer.synchronize):
        with pytest.raises(RuntimeError, match="LocalTrainer of an earlier init"):
            use()


@pytest.mark.ranks(2)
def test_power_sgd_begins_with_equal_matrices_again(rank, gather, begin):
    """Ranks that have trained apart have other matrices; products of these would be no mean."""
    nets = [dense_network(seed=0) for _ in range(2)]
    trainer = _power_sgd(nets[0])
    begin(_world().Split(rank, 0))
    for seed in range(3):
        _step(nets[0], trainer, 10 * rank + seed)
    begin(_world())
    mykv.broadcast_parameters(nets[0].collect_params())
    for one, other in zip(nets[1].collect_params().values(), nets[0].collect_params().values()):
        one.set_data(other.data())
    _step(nets[0], trainer, rank)
    _step(nets[1], _power_sgd(nets[1]), rank)
    for one, other in zip(parameters(nets[0]).values(), parameters(nets[1]).values()):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert len(set(gather(checksum(nets[0])))) == 1


def _power_sgd(net):
    return mykv.DistributedTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}, communication_hook=mykv.PowerSGD(rank=1)
    )
