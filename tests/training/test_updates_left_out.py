"""allreduce_grads() without update(): an update counts only if every worker has made it."""

from __future__ import annotations

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness import marks
from harness.support import IS_2, MXNetError, array, checksum, clear_errors, mx
from kvstore_plugin.gradients.dense_reducer import DenseReducer
from mxnet import autograd, gluon
from mxnet.gluon import nn

_ADAM = ("adam", {"learning_rate": 0.1})
_NAG = ("nag", {"learning_rate": 0.1, "momentum": 0.9})
_OWN = {
    "own": {},
    "clipped": {"clip_global_norm": 0.5},
    "periods": {"aux_sync_period": 2, "broadcast_period": 2},
    "hook": {"communication_hook": lambda bucket: bucket.allreduce_()},
    "sums": {"gradients_after_allreduce": "sum"},
    "one by one": {"bucket_bytes": 0},
}


_MISTAKES = [1, 4]  # steps; in one of them periodic operations are due


class _Training:
    def __init__(self, kind, rank, optimizer=_ADAM, **options):
        mx.random.seed(rank)
        self.net = nn.HybridSequential()
        self.is_sparse = kind == "sparse"
        if self.is_sparse:
            self.net.add(nn.Embedding(9, 3, sparse_grad=True), nn.Dense(2, in_units=3, flatten=False))
        else:
            self.net.add(nn.Dense(4, in_units=3), nn.BatchNorm(in_channels=4), nn.Dense(2, in_units=4))
        self.net.initialize(mx.init.Uniform(0.5))
        params = self.net.collect_params()
        if kind == "stock":
            mykv.broadcast_parameters(params)
            self.trainer = gluon.Trainer(params, *optimizer, kvstore="mykv", update_on_kvstore=False)
        else:
            self.trainer = mykv.DistributedTrainer(params, *optimizer, **_OWN.get(kind, {}), **options)
        self.batch = 4 * (mykv.size() if kind == "stock" else 1)
        self._rank = rank

    def backward(self, seed):
        draw = np.random.RandomState(10 * seed + self._rank)
        data = draw.randint(0, 9, (4,)) if self.is_sparse else draw.rand(4, 3).astype("float32")
        with autograd.record():
            loss = (self.net(array(data)) ** 2).sum()
        loss.backward()

    def run(self, steps, updates=True):
        for seed in steps:
            self.backward(seed)
            self.trainer.allreduce_grads()
            if updates:
                self.trainer.update(self.batch)

    def weights(self):
        """The bits of what is trained; running means differ between workers."""
        params = self.net.collect_params().values()
        return b"".join(one.data().asnumpy().tobytes() for one in params if one.grad_req != "null")

    def state(self):
        optimizer = self.trainer._optimizer
        counts = sorted(optimizer._index_update_count.items())
        return self.weights(), counts, optimizer.num_update, getattr(self.trainer, "_steps", 0)


def _same(gather, training):
    mx.nd.waitall()
    assert len({str(state) for state in gather(training.state())}) == 1


@pytest.mark.ranks(2, long=(1, 3))
@pytest.mark.parametrize(
    "kind",
    ["own", "clipped", "periods", "stock", *map(marks.long, ["hook", "sums", "one by one", "sparse"])],
)
@pytest.mark.parametrize("optimizer", [_ADAM, marks.long(_NAG)], ids=["adam", "nag"])
def test_updates_that_all_workers_leave_out_count_nothing(rank, gather, kind, optimizer):
    if kind == "sparse" and IS_2:
        pytest.skip("MXNet 2.0 has no sparse gradients of Embedding")
    training, expected = _Training(kind, rank, optimizer), _Training(kind, rank, optimizer)
    training.run([0])
    training.run([7, 8], updates=False)
    training.run([1, 2])
    training.run([9], updates=False)
    training.backward(3)
    training.trainer.step(training.batch)
    expected.run([0, 1, 2])
    expected.backward(3)
    expected.trainer.step(training.batch)
    _same(gather, training)
    counts = training.trainer._optimizer
    assert counts.num_update == 4 and set(counts._index_update_count.values()) == {4}
    assert training.state() == expected.state()


@pytest.mark.ranks(2, long=(3,))
@pytest.mark.parametrize("kind", ["own", "periods", "stock", *map(marks.long, ["clipped", "hook", "sparse"])])
@pytest.mark.parametrize("then", ["allreduce_grads", marks.long("step")])
@pytest.mark.parametrize("who", [[1], marks.long([0]), marks.long([1, 2])], ids=str)
def test_an_update_that_some_workers_leave_out_is_an_error_and_counts_on_all(rank, gather, kind, then, who):
    if kind == "sparse" and IS_2:
        pytest.skip("MXNet 2.0 has no sparse gradients of Embedding")
    training = _Training(kind, rank)
    failed = []
    for seed in range(8):
        try:
            training.backward(seed)
            if then == "step" and seed not in _MISTAKES:
                training.trainer.step(training.batch)
            else:
                training.trainer.allreduce_grads()
                if seed not in _MISTAKES or rank not in who:
                    training.trainer.update(training.batch)
            mx.nd.waitall()
        except MXNetError as error:
            assert "no update() after allreduce_grads()" in str(error)
            failed.append(seed)
            clear_errors()
    assert failed == ([] if rank in who else _MISTAKES)
    _same(gather, training)
    assert training.trainer._optimizer.num_update == 8


@pytest.mark.ranks(2)
def test_the_first_step_after_all_parameters_were_frozen_counts_once(rank, gather):
    training = _Training("clipped", rank)
    params = [one for one in training.net.collect_params().values() if one.grad_req != "null"]
    training.run([0])
    for one in params:
        one.grad_req = "null"
    for _ in range(2):
        training.trainer.step(4)
    for one in params:
        one.grad_req = "write"
    training.backward(1)
    training.trainer.step(4)
    _same(gather, training)
    assert training.trainer._optimizer.num_update == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["own", "stock", marks.long("periods"), marks.long("clipped")])
def test_update_after_an_allreduce_grads_that_has_failed_on_one_worker(rank, gather, kind, monkeypatch):
    training = _Training(kind, rank)
    training.run([0, 1])
    before = training.weights()
    original = DenseReducer._push_all

    def fails(self, operations, label):
        raise MXNetError("planted")

    training.backward(2)
    if rank == 1:
        monkeypatch.setattr(DenseReducer, "_push_all", fails)
        with pytest.raises(MXNetError, match="planted"):
            training.trainer.allreduce_grads()
        monkeypatch.setattr(DenseReducer, "_push_all", original)
    else:
        training.trainer.allreduce_grads()
    with pytest.raises(MXNetError, match="is refused|was refused"):
        training.trainer.update(training.batch)
        mx.nd.waitall()
    clear_errors()
    mykv.barrier()
    assert training.weights() == before
    _same(gather, training)
    training.run([3, 4])
    _same(gather, training)


class _Halving(mykv.DistributedTrainer):
    """As subclasses of Horovod's trainer do."""

    calls: tuple = ()

    def _allreduce_grads(self):
        super()._allreduce_grads()
        self.calls += ("allreduce",)
        for parameter in self._params:
            if parameter.grad_req != "null":
                parameter.grad()[:] *= 0.5

    def _update(self, ignore_stale_grad=False):
        self.calls += (f"update {ignore_stale_grad}",)
        super()._update(ignore_stale_grad)


class _WithItsOwnStep(_Halving):
    def step(self, batch_size, ignore_stale_grad=False):
        self._optimizer.rescale_grad = self._scale / batch_size
        self._allreduce_grads()
        self._update(ignore_stale_grad)


@pytest.mark.ranks(2, long=(1,))
@pytest.mark.parametrize("kind", [_Halving, _WithItsOwnStep], ids=["hooks", "own step"])
@pytest.mark.parametrize("options", [{}, marks.long({"clip_global_norm": 1e9})], ids=["plain", "clipped"])
def test_a_subclass_overrides_the_methods_of_gluons_trainer(rank, gather, kind, options):
    net = nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.One())
    trainer = kind(net.collect_params(), "sgd", {"learning_rate": 1.0}, **options)
    for step in range(3):
        with autograd.record():
            loss = net(array(np.ones((1, 2), "float32"))).sum()
        loss.backward()
        if step < 2:
            trainer.step(1, ignore_stale_grad=step == 1)
        else:
            trainer.allreduce_grads()
            trainer.update(1)
    np.testing.assert_array_equal(net.weight.data().asnumpy(), [[-0.5, -0.5]])
    assert trainer.calls == ("allreduce", "update False", "allreduce", "update True", "allreduce", "update False")
    assert trainer._optimizer.num_update == 3 and len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(2)
def test_a_batch_size_that_differs_in_a_subclass_with_a_step_of_its_own(rank, gather):
    net = nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.One())
    trainer = _WithItsOwnStep(net.collect_params(), "sgd", {"learning_rate": 1.0})
    with autograd.record():
        loss = net(array(np.ones((1, 2), "float32"))).sum()
    loss.backward()
    with pytest.raises(MXNetError, match="batch size"):
        trainer.step(1 + rank)
        net.weight.data().wait_to_read()
    clear_errors()
    np.testing.assert_array_equal(net.weight.data().asnumpy(), [[1, 1]])


@pytest.mark.ranks(2)
def test_trainers_that_workers_make_in_another_order_are_told_so(rank):
    nets = [nn.Dense(1, in_units=2), nn.Dense(1, in_units=2)]
    for net in nets:
        net.initialize()
    made = {
        id(net): mykv.DistributedTrainer(list(net.collect_params().values()), "sgd") for net in nets[:: 1 - 2 * rank]
    }
    for net in nets:
        with autograd.record():
            loss = net(array(np.ones((1, 2), "float32"))).sum()
        loss.backward()
    with pytest.raises(MXNetError, match="different orders. Make all trainers, and call step.. of each, in the same"):
        made[id(nets[0])].step(1)
