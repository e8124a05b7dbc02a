"""Usual actions of scripts around a trainer, with several workers."""

from __future__ import annotations

import logging
import os

import kvstore_plugin as mykv
import numpy as np
import pytest
from harness.support import IS_2, array, checksum, dense_network, parameters, structure
from kvstore_plugin.compat.mxnet import metric as metrics
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.estimator import BatchEnd, Estimator

_SGD = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})


def _data(step, rank, batch=4):
    return array(np.random.RandomState(100 * step + rank).randn(batch, 6).astype("float32"))


def _backward(net, data):
    with autograd.record():
        loss = (net(data) ** 2).sum()
    loss.backward()


def _trained(params):
    return [parameter for parameter in params.values() if parameter.grad_req != "null"]


def _assert_equal(net, other):
    for name, values in parameters(other).items():
        np.testing.assert_allclose(parameters(net)[name], values, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("hybridize", [False, True])
def test_accumulated_gradients_are_those_of_a_batch_as_large(rank, size, gather, hybridize):
    backwards = 3
    net, alone = dense_network(seed=rank), dense_network(seed=0)
    for parameter in _trained(structure(net)):
        parameter.grad_req = "add"
    if hybridize:
        net.hybridize(static_alloc=True, static_shape=True)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    trainer_alone = gluon.Trainer(alone.collect_params(), *_SGD, kvstore=None)
    for step in range(3):
        for part in range(backwards):
            _backward(net, _data(backwards * step + part, rank))
        trainer.step(4 * backwards)
        (net if IS_2 else net.collect_params()).zero_grad()
        data = [_data(backwards * step + part, one).asnumpy() for one in range(size) for part in range(backwards)]
        _backward(alone, array(np.concatenate(data)))
        trainer_alone.step(4 * backwards * size)
        _assert_equal(net, alone)
    assert len(set(gather(checksum(net)))) == 1


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_goes_by_the_norm_of_the_averaged_gradients(rank, size, gather, max_norm):
    net, alone = dense_network(seed=rank), dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    trainer_alone = gluon.Trainer(alone.collect_params(), *_SGD, kvstore=None)
    for step in range(3):
        _backward(net, _data(step, rank))
        trainer.allreduce_grads()
        gradients = [parameter.grad() for parameter in _trained(structure(net))]
        norm = gluon.utils.clip_global_norm(gradients, max_norm * 4)
        trainer.update(4)
        _backward(alone, array(np.concatenate([_data(step, one).asnumpy() for one in range(size)])))
        gradients = [parameter.grad() for parameter in _trained(structure(alone))]
        norm_alone = gluon.utils.clip_global_norm(gradients, max_norm * 4 * size)
        trainer_alone.update(4 * size)
        assert (norm > max_norm * 4) == (max_norm < 1)
        np.testing.assert_allclose(norm * size, norm_alone, rtol=1e-5)
        _assert_equal(net, alone)
    assert len(set(gather(checksum(net)))) == 1


class _Samples(gluon.data.Dataset):
    """Numbered samples, with the process that has loaded them."""

    def __init__(self, length):
        self._length = length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return np.full(6, index % 7, "float32"), np.array([index, os.getpid()], "int64")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("begins", ["before the trainer", "after a step"])
def test_a_data_loader_with_processes_beside_the_running_core(rank, gather, begins):
    """Two epochs with new processes for each, forked while the core runs and gradients travel."""
    mykv.init()
    dataset = _Samples(53)
    sampler = mykv.DistributedSampler(len(dataset), seed=2)

    def loader():
        return gluon.data.DataLoader(dataset, batch_size=5, sampler=sampler, num_workers=2)

    made = loader() if begins == "before the trainer" else None
    net = dense_network(seed=rank)
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    _backward(net, _data(0, rank))
    trainer.step(4)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected, seen, processes = list(sampler), [], set()
        for data, labels in made or loader():
            _backward(net, data)
            trainer.step(len(data))
            numbers = labels.asnumpy()
            seen += numbers[:, 0].tolist()
            processes |= set(numbers[:, 1].tolist())
        assert seen == expected
        assert 1 <= len(processes) <= 2 and os.getpid() not in processes  # on a busy machine one may do it all
        assert len(set(gather(checksum(net)))) == 1


class _EveryBatch(BatchEnd):
    def __init__(self):
        self.batches = 0

    def batch_end(self, estimator, *args, **kwargs):
        self.batches += 1


def _estimated(sampler, trainer_class, batch, seed):
    rng = np.random.RandomState(1)
    inputs = rng.randn(48, 6).astype("float32")
    labels = (inputs.sum(axis=1) > 0).astype("float32")
    net = dense_network(seed=seed)
    trainer = trainer_class(net.collect_params(), "adam", {"learning_rate": 0.05})
    estimator = Estimator(net, gluon.loss.SoftmaxCrossEntropyLoss(), train_metrics=metrics.Accuracy(), trainer=trainer)
    estimator.logger.setLevel(logging.ERROR)
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(inputs, labels), batch_size=batch, sampler=sampler)
    watched = _EveryBatch()
    estimator.fit(loader, val_data=loader, epochs=6, event_handlers=[watched])
    return net, estimator, watched.batches


@pytest.mark.ranks(2)
def test_an_estimator_trains_as_one_process_with_all_data(rank, size, gather):
    net, estimator, batches = _estimated(mykv.DistributedSampler(48, seed=5), mykv.DistributedTrainer, 8, seed=rank)
    order = mykv.DistributedSampler(48, seed=5, rank=0, size=1)
    alone, estimator_alone, _ = _estimated(order, gluon.Trainer, 8 * size, seed=0)
    assert batches == 6 * 3
    assert len(set(gather(checksum(net)))) == 1
    _assert_equal(net, alone)
    for own, all_data in zip(mykv.allreduce_metric(estimator.val_metrics), estimator_alone.val_metrics):
        assert own.num_inst == all_data.num_inst == 48
        np.testing.assert_allclose(own.get()[1], all_data.get()[1], rtol=1e-4)
    assert estimator_alone.train_metrics[0].get()[1] > 0.8


@pytest.mark.ranks(2)
def test_evaluation_of_uneven_shares(rank, size, gather):
    """Statistics, shares, and values of a metric together: as one process that evaluates all data."""
    rng = np.random.RandomState(3)
    inputs, labels = rng.randn(31, 6).astype("float32"), rng.randint(0, 2, 31).astype("float32")
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=6), nn.BatchNorm(in_channels=4), nn.Dense(2, in_units=4))
    net.initialize()
    trainer = mykv.DistributedTrainer(net.collect_params(), *_SGD)
    for step in range(3):
        _backward(net, _data(step, rank))
        trainer.step(4)
    mykv.sync_aux_params(net)
    mykv.check_in_step(net.collect_params(), auxiliary=True)

    def evaluated(sampler):
        metric = metrics.Accuracy()
        loader = gluon.data.DataLoader(gluon.data.ArrayDataset(inputs, labels), batch_size=4, sampler=sampler)
        for data, label in loader:
            metric.update([label], [net(data)])
        return metric

    mine = evaluated(mykv.DistributedSampler(31, even=False))
    assert sorted(gather(int(mine.num_inst))) == [15, 16]
    assert mykv.allreduce_metric(mine).get() == evaluated(gluon.data.SequentialSampler(31)).get()
